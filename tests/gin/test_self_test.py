"""The self-test of GPU-initiated puts passes where Gloo carries them; a rank without an answer in
time takes nobody along.
"""

import dataclasses
import time

import interlace
from interlace_gin.self_test import Outcome, try_gin
from tests.nodes.groups import process_group_of


def _tried(limit_s):
    with process_group_of(2) as process_group:
        begin = time.monotonic()
        outcome = try_gin(interlace.group_of(process_group), limit_s)
        return dataclasses.astuple(outcome), time.monotonic() - begin


def test_every_pair_of_remote_ranks_is_tried(ranks):
    """Patterns of all sizes, and a wait that its deadline ends; in new processes."""
    passed = Outcome(True, "Gloo, in place of a network card")
    for outcome, _ in ranks(2).run(_tried, 120.0):
        assert outcome == dataclasses.astuple(passed)


def test_a_process_that_does_not_answer_is_killed(ranks):
    """No process imports torch in so short a time."""
    reason = "rank 0: no answer in 0.1 s; its process was killed"
    for outcome, taken_s in ranks(2).run(_tried, 0.1):
        assert outcome == (False, "", {}, reason)
        assert taken_s < 60
