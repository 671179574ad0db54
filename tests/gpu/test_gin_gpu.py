"""GPU-initiated puts on GPUs: the self-test passes, or says in time why there are none here.

With ``-m gpu``, and ``INTERLACE_NCCL`` where torch's NCCL is older than 2.30.7.
"""

import os
import time
import warnings

import pytest

import interlace
from interlace_gin.self_test import try_gin
from tests.gin.wheels import nccl_folder

pytestmark = pytest.mark.gpu

_LIMIT_S = 120.0


def _tried(folder):
    os.environ["INTERLACE_NCCL"] = folder
    begin = time.monotonic()
    outcome = try_gin(interlace.group_of(), _LIMIT_S)
    return outcome, time.monotonic() - begin


def test_puts_arrive_or_it_is_said_why_not(ranks, own_gpus):
    for outcome, taken_s in ranks(2).run(_tried, str(nccl_folder())):
        warnings.warn(f"gin: {outcome}", stacklevel=1)
        assert taken_s < 2 * _LIMIT_S
        # Without a card that NCCL can drive, its own words; with one, the patterns arrive.
        assert outcome.passed or "gin must have NCCL's device API and a back end" in outcome.reason
