"""``embedding_all_to_all``: several groups, memory that grows and goes, and peers that fail."""

import time

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import Faults, LaunchError
from tests.errors import error_of
from tests.operators.embedding_all_to_all.calls import Call, run_one
from tests.operators.embedding_all_to_all.test_gradients import upstream


def _several_groups(call, half_call):
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = halves[dist.get_rank() % 2]
    return [(run_one(call), run_one(half_call, half)) for _ in range(3)]


def test_groups_that_overlap(ranks):
    """A group has its own buffers and epochs; ranks in it are counted in the group."""
    call, half = Call(((4,), (2,), (), (3,)), 6), Call(((5,), (2, 2)), 5, seed=3)
    results = ranks(4).run(_several_groups, call, half)
    for turn in range(3):
        call.check([result[turn][0] for result in results])
        half.check([results[rank][turn][1] for rank in (0, 2)])
        half.check([results[rank][turn][1] for rank in (1, 3)])


def _mappings():
    with open("/proc/self/maps") as maps:
        return sum("memfd:interlace" in line for line in maps)


def _grow(calls):
    """Memory of the outputs before, with small and large calls, and after a release; results that
    outlive it.
    """
    group = dist.new_group()
    owner, before = interlace.group_of(group), _mappings()
    held, results = [], []
    for call in calls:
        results.append(run_one(call, group))
        held.append(owner.outputs.nbytes)
    owner.release()
    released = owner.outputs.nbytes
    results.append(run_one(calls[0], group))
    copies = [y.clone() for y in results]
    owner.release()
    del results
    return copies, held, released, _mappings() - before


def test_buffers_grow_on_demand_and_go(ranks):
    calls = [Call(((4,), (2,)), batch) for batch in (3, 700, 3)]
    outcomes = ranks(2).run(_grow, calls)
    for i, call in enumerate([*calls, calls[0]]):
        call.check([copies[i] for copies, *_ in outcomes])
    for _, (small, large, still), released, mappings in outcomes:
        assert 0 < small < large == still
        assert released == mappings == 0


def _absent_peer(call, absent, backward):
    """``absent`` never calls: what the others see, how long it took them, and what the tables hold
    then.
    """
    group, rank = dist.new_group(), dist.get_rank()
    run_one(call, group)
    tables = [table.requires_grad_() for table in call.tables(rank)]
    indices, offsets, _ = call.lookups(rank)
    keep = {
        "batch_size": call.batch,
        "group": group,
        "config": call.config,
        "check_indices": False,
        "name": "trained",
    }
    update = interlace.optim.SGD(0.5)
    interlace.embedding_all_to_all(tables, indices, offsets, gradient=update, **keep).backward(
        upstream(call, rank)
    )
    y = interlace.embedding_all_to_all(tables, indices, offsets, gradient=update, **keep)
    before = [table.detach().clone() for table in tables]
    interlace.set_deadline(3.0, group)  # on a busy machine the others may be late, too
    if rank == absent:
        dist.barrier()
        return None
    start = time.monotonic()
    if backward:
        first = error_of(y.backward, upstream(call, rank))
    else:
        first = error_of(
            interlace.embedding_all_to_all, tables, indices, offsets, gradient=update, **keep
        )
    seconds = time.monotonic() - start
    later = error_of(run_one, call, group)
    dist.barrier()
    unchanged = all(map(torch.equal, tables, before))
    return first, later, interlace.group_of(group).broken, seconds, unchanged


@pytest.mark.parametrize("backward", [False, True])
def test_a_peer_that_never_calls(ranks, backward):
    """Each waiting rank names the peer after its deadline; the group stays broken, and no table was
    updated by halves.
    """
    call = Call(((4,), (2,), (3,)), 6)
    outcomes = ranks(3).run(_absent_peer, call, 2, backward)
    assert outcomes[2] is None
    name = "embedding_all_to_all" + (".backward" if backward else "")
    for rank, (first, later, broken, seconds, unchanged) in enumerate(outcomes[:2]):
        kind, message, fields = first
        assert kind == "PeerTimeoutError"
        assert message.startswith(f"{name}: rank {rank} waited 3 s for rank 2 (slice 0, epoch ")
        assert (fields["operator"], fields["rank"], fields["peer"], fields["different_call"]) == (
            name,
            rank,
            2,
            False,
        )
        assert broken
        assert later == first
        assert 3.0 <= seconds < 60
        assert unchanged


def _dies():
    call = Call(((4,), (2,)), 6)
    run_one(call, check_indices=False)
    interlace.set_deadline(200.0)
    if dist.get_rank() == 1:
        with interlace.inject(Faults(die_after_puts=2)):
            run_one(call, check_indices=False)
    run_one(call, check_indices=False)


@pytest.mark.usefixtures("quick_launches")
def test_a_peer_that_dies_within_a_kernel():
    """The caller of launch is told which rank ended, and every process is gone: none waits out its
    deadline.
    """
    with pytest.raises(LaunchError, match=r"rank 1 ended without a result: .*SIGKILL") as caught:
        interlace.launch(_dies, 2, backend="cpu", timeout_s=120)
    assert caught.value.rank == 1


def _late(call):
    """Rank 1 comes when rank 0 has given up: what each of them sees."""
    group, rank = dist.new_group(), dist.get_rank()
    run_one(call, group)
    interlace.set_deadline(0.5, group)
    if rank == 1:
        dist.barrier()
    error = error_of(run_one, call, group, check_indices=False)
    if rank == 0:
        dist.barrier()
    return error[0], error[2]["peer"]


def test_a_peer_that_comes_too_late(ranks):
    """It must not take the other's buffer for complete: it waits out its own deadline."""
    assert ranks(2).run(_late, Call(((4,), (2,)), 6)) == [
        ("PeerTimeoutError", 1),
        ("PeerTimeoutError", 0),
    ]
