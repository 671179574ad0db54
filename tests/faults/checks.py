"""What the ranks must have seen of each of :mod:`tests.faults.scenarios`."""

from __future__ import annotations

from tests.faults.scenarios import FAULTY, Outcome


def late_in_time(outcomes: list[Outcome]) -> None:
    assert [(outcome.kind, outcome.wrong, outcome.broken) for outcome in outcomes] == [
        ("", 0, False)
    ] * len(outcomes)


def too_late(outcomes: list[Outcome]) -> None:
    """The others name the late rank; the late rank names one of those who gave up.

    Its first call may end without an error, with what they had sent and with NaN for what they had
    not.
    """
    others = [rank for rank in range(len(outcomes)) if rank != FAULTY]
    for rank, outcome in enumerate(outcomes):
        _expired(outcome, [FAULTY] if rank != FAULTY else others)


def died(outcomes: list[Outcome | None], faulty: int) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank == faulty:
            assert outcome is None
        else:
            assert outcome is not None
            _expired(outcome, [faulty])


def other_operator(outcomes: list[Outcome]) -> None:
    """Every rank learns at once who called what; nothing is broken."""
    for outcome in outcomes:
        _disagreed(outcome)
        assert "ranks must make the same calls in the same order" in outcome.message
        assert f"'gemm_reduce_scatter' on rank {FAULTY}" in outcome.message
        assert "'gemm_all_reduce' on rank 0" in outcome.message


def other_shape(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        _disagreed(outcome)
        assert f"[48, 32] on rank {FAULTY}" in outcome.message
        assert "[64, 32] on rank 0" in outcome.message


def _disagreed(outcome: Outcome) -> None:
    assert (outcome.kind, outcome.broken) == ("RankMismatchError", False), outcome


def other_shape_agreed_on(outcomes: list[Outcome]) -> None:
    """A rank whose peer made the other call says so."""
    # Each side waits for the other, as with another operator, which has memory of its own.
    too_late(outcomes)
    assert outcomes[FAULTY].fields["different_call"], outcomes[FAULTY]


def out_of_memory(outcomes: list[tuple[Outcome, int]]) -> None:
    """Every rank raises at once, the others name the rank, and calls that need no more memory go
    on.
    """
    for rank, (outcome, wrong_afterwards) in enumerate(outcomes):
        assert (outcome.kind, outcome.broken, wrong_afterwards) == ("WorkspaceError", False, 0), (
            outcome
        )
        assert rank == FAULTY or f"rank {FAULTY}" in outcome.message, outcome


def interrupted(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank == FAULTY:
            assert outcome.kind == "KeyboardInterrupt"
        else:
            _expired(outcome, [FAULTY])


def interrupted_in_a_wait(outcomes: list[tuple[Outcome, Outcome]]) -> None:
    """The interrupted rank's group is broken, and its peers, who come later, wait for it in
    vain.
    """
    for rank, (first, then) in enumerate(outcomes):
        if rank == FAULTY:
            assert first.kind in ("KeyboardInterrupt", "PeerTimeoutError"), first
            assert then.kind in ("GroupError", "PeerTimeoutError"), then
            assert then.broken
            assert then.free
        else:
            _expired(then, [FAULTY])


def _expired(outcome: Outcome, peers: list[int]) -> None:
    assert any(outcome.expired(peer) for peer in peers), outcome
