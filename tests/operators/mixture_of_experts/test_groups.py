"""``mixture_of_experts``: calls with late ranks, several groups, and peers that fail."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import ExpertActivation, Faults
from tests.errors import error_of
from tests.operators.mixture_of_experts.calls import Call, check_all, forward, leaves_of, run_one


def _with_faults(calls, turns):
    """Several layers forward, then backward in the reverse order, as a model does; every rank late
    by turns, puts reordered.
    """
    rank = dist.get_rank()
    found = []
    for turn in range(turns):
        faults = Faults(
            seed=10 * turn + rank, max_delay_s=2e-3 * (turn % 2 == rank % 2), reorder_puts=True
        )
        with interlace.inject(faults):
            layers = []
            for call in calls:
                tensors = call.inputs(rank)
                layers.append((tensors, [tensors[i].requires_grad_() for i in (0, 2, 3, 4)]))
            ys = [forward(call, tensors) for call, (tensors, _) in zip(calls, layers, strict=True)]
            grads = []
            for y, (tensors, leaves) in reversed(list(zip(ys, layers, strict=True))):
                grads.insert(0, torch.autograd.grad(y, leaves, tensors[5]))
        found.append([[y.detach(), *grad] for y, grad in zip(ys, grads, strict=True)])
    return found


def test_many_calls_with_late_ranks(ranks):
    """More layers than the group has buffers, whose forward passes all come before their backward
    passes; the same bits in every turn.
    """
    calls = [
        Call(2, tokens, hidden=hidden, seed=tokens) for tokens, hidden in ((5, 8), (9, 16), (5, 8))
    ]
    outcomes = ranks(2).run(_with_faults, calls, 2)
    check_all(calls, [outcome[0] for outcome in outcomes])
    for first, second in outcomes:
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def _two_groups(call, half):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[dist.get_rank() % 2]
    return run_one(call), run_one(half, mine)


def test_groups_that_overlap(ranks):
    call, half = Call(4, tokens=5), Call(2, tokens=6, seed=3)
    results = ranks(4).run(_two_groups, call, half)
    call.check([both for both, _ in results])
    half.check([results[rank][1] for rank in (0, 2)])
    half.check([results[rank][1] for rank in (1, 3)])


def _absent_peer(call, backward):
    group, rank = dist.new_group(), dist.get_rank()
    run_one(call, group)
    tensors = call.inputs(rank)
    tensors[0].requires_grad_()
    y = forward(call, tensors, group)
    interlace.set_deadline(1.0, group)
    if rank == 1:
        dist.barrier()
        return None
    start = time.monotonic()
    error = (
        error_of(y.backward, tensors[5]) if backward else error_of(forward, call, tensors, group)
    )
    seconds = time.monotonic() - start
    later = error_of(run_one, call, group)
    dist.barrier()
    return error, later, seconds


@pytest.mark.parametrize("backward", [False, True])
def test_a_peer_that_never_calls(ranks, backward):
    """The waiting rank names it after the deadline, and stays broken."""
    (error, later, seconds), _ = ranks(2).run(_absent_peer, Call(2), backward)
    name = "mixture_of_experts.backward" if backward else "mixture_of_experts"
    assert error[0] == "PeerTimeoutError"
    assert error[1].startswith(f"{name}: rank 0 waited 1 s for rank 1 (slice 0, epoch ")
    assert later == error
    assert 1 <= seconds < 60


def _left_by_an_absent_peer(call):
    """Backward, as on a GPU, where the error comes with the next call: what rank 0 is left with,
    and bytes that it sent.
    """
    process_group, rank = dist.new_group(), dist.get_rank()
    group = interlace.group_of(process_group)
    run_one(call, process_group)
    tensors = call.inputs(rank)
    leaves = [leaf.requires_grad_() for leaf in leaves_of(tensors)]
    y = forward(call, tensors, process_group)
    interlace.set_deadline(0.5, process_group)
    dist.barrier()
    found = None
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "check", lambda: None)
            group.traffic.reset()
            gradients = torch.autograd.grad(y, leaves, tensors[5])
            found = [bool(each.isnan().any()) for each in gradients], group.traffic.message_bytes
    dist.barrier()
    return found


def test_nothing_goes_to_a_peer_that_has_not_granted(ranks):
    """Neither rows nor results: its memory may still be of use to it."""
    clamped = ExpertActivation(limit=0.5, up_offset=1.0)
    call = Call(2, biases=True, activation=clamped)
    (gradients, sent), _ = ranks(2).run(_left_by_an_absent_peer, call)
    assert gradients == [True] * 6
    assert sent == 0


def _mismatch(call, changed):
    group = dist.new_group()
    return error_of(run_one, changed if dist.get_rank() else call, group)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokens": 8},
            (
                "the shape of x must be the same on every rank; got [7, 24] on rank 0, [8, 24] on "
                "rank 1."
            ),
        ),
        (
            {"biases": True},
            (
                "which biases there are must be the same on every rank; got [] on rank 0, "
                "['b_in', 'b_out'] on rank 1."
            ),
        ),
        ({"factor": 1.0}, "capacity must be the same on every rank; got 7 on rank 0, 4 on rank 1."),
    ],
)
def test_ranks_that_differ(ranks, change, message):
    call = Call(2)
    for kind, found, _ in ranks(2).run(_mismatch, call, dataclasses.replace(call, **change)):
        assert (kind, found) == (
            "RankMismatchError",
            f"mixture_of_experts: {message} Nothing was computed.",
        )
