"""Residual and norm after an all-reduce, put into one operator by the pass, on GPUs, whatever the
tables say. Run with ``-m gpu``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compile.norms import FUSED, NORMED, ROUNDINGS
from tests.compile.programs import fuse_everything, fused, tensors, traced

pytestmark = pytest.mark.gpu


def _norms(dtype: torch.dtype) -> dict[str, tuple[list[str], float]]:
    outcomes = {}
    with pytest.MonkeyPatch.context() as patch:
        fuse_everything(patch)
        for name, (program, shapes, _) in FUSED.items():
            arguments = tensors(*shapes, dtype=dtype)
            names, _, error = fused(traced(program, arguments), arguments)
            outcomes[name] = names, error
    return outcomes


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_norms(ranks: Any, dtype: torch.dtype) -> None:
    for outcomes in ranks(2).run(_norms, dtype):
        assert {name: names for name, (names, _) in outcomes.items()} == {
            name: [NORMED] * case[2] for name, case in FUSED.items()
        }
        # Products and sums are in another order than PyTorch's.
        allowed = max(ROUNDINGS[dtype], 1e-5)
        assert {name: error for name, (_, error) in outcomes.items() if not error < allowed} == {}
