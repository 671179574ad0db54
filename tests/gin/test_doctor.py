"""What ``interlace doctor --network`` says of the self-test of GPU-initiated puts."""

import dataclasses

import pytest

from interlace_gin.self_test import Outcome, puts_sentences


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            Outcome(True, "NCCL 2.30.7, GDAKI", {64: 9.4, 65536: 20.0, 4 * 2**20: 210.6}),
            "GPU-initiated puts (gin) passed their self-test, by NCCL 2.30.7, GDAKI: one exchange "
            "with every remote rank 64 B in 9 us, 64 KiB in 20 us, 4 MiB in 211 us. Nothing uses "
            "them unless it is asked to (interlace_gin.open_gin). Please report it: they have run "
            "nowhere else.",
        ),
        (
            Outcome(False, reason="rank 1: no answer in 120 s; its process was killed"),
            "GPU-initiated puts (gin) cannot be used here: rank 1: no answer in 120 s; its process "
            "was killed. Nothing uses them unless it is asked to.",
        ),
    ],
)
def test_the_outcome_is_one_sentence(outcome, said):
    assert puts_sentences(dataclasses.asdict(outcome)) == [said]


def test_nothing_is_said_where_nothing_was_tried():
    assert puts_sentences(None) == []
