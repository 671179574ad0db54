"""``gemv_all_reduce`` on several groups, as its memory grows and goes, and when a peer fails."""

import dataclasses
import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

import interlace
from interlace import Faults, GemvAllReduceConfig, LaunchError
from tests.errors import error_of
from tests.operators.gemv_all_reduce.calls import Call, run_one

PROTOCOLS = ["one_shot", "two_phase"]


def _config(protocol, **more):
    return GemvAllReduceConfig(protocol, block_n=4, block_k=16, **more)


def _several_groups(call):
    """The world, its halves, and a group of one rank; calls on them in turn."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = dist.new_group([1])
    half = halves[dist.get_rank() % 2]
    results = {"world": [], "half": [], "alone": []}
    for _ in range(3):
        results["world"].append(run_one(call))
        results["half"].append(run_one(call, half))
        if dist.get_rank() == 1:
            results["alone"].append(run_one(call, alone))
    if dist.get_rank() != 1:
        results["alone"].append(error_of(run_one, call, alone))
    return results


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_groups_that_overlap(ranks, protocol):
    """A group has its own memory and epochs; ranks in it are counted in the group."""
    call = Call(2, 9, 16, config=_config(protocol))
    results = ranks(4).run(_several_groups, call)
    for turn in range(3):
        call.check([result["world"][turn] for result in results])
        call.check([results[rank]["half"][turn] for rank in (0, 2)])
        call.check([results[rank]["half"][turn] for rank in (1, 3)])
        call.check([results[1]["alone"][turn]])
    for rank in (0, 2, 3):
        assert results[rank]["alone"][0][0] == "GroupError"


def _grow(calls):
    group = dist.new_group()
    owner = interlace.group_of(group)
    held = [owner.workspace_bytes()]
    results = []
    for call in calls:
        results.append(run_one(call, group))
        held.append(owner.workspace_bytes())
    owner.release()
    held.append(owner.workspace_bytes())
    return [*results, run_one(calls[0], group)], held


def _mappings():
    with open("/proc/self/maps") as maps:
        return sum("memfd:interlace" in line for line in maps)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_workspace_grows_on_demand_and_goes(ranks, protocol):
    """It grows for a larger call, stays for a smaller one, and after a release starts again at
    epoch 1.
    """
    config = GemvAllReduceConfig(protocol, block_n=64, block_k=16)
    calls = [Call(1, rows, 16, config=config) for rows in (9, 400, 9)]
    outcomes = ranks(2).run(_grow, calls)
    for i, call in enumerate([*calls, calls[0]]):
        call.check([results[i] for results, _ in outcomes])
    for _, held in outcomes:
        name = f"gemv_all_reduce.{protocol}"
        before, small, large, still_large, released = (each.get(name, 0) for each in held)
        assert before == released == 0
        assert 0 < small < large == still_large


def _grow_and_release(call, times):
    group = dist.new_group()
    counts = []
    for _ in range(times):
        run_one(call, group)
        interlace.group_of(group).release()
        counts.append(_mappings())
    return counts


def test_released_memory_is_unmapped(ranks):
    for counts in ranks(2).run(_grow_and_release, Call(1, 9, 16, config=_config("one_shot")), 4):
        assert len(set(counts)) == 1, counts


def _absent_peer(call, absent):
    """``absent`` never calls: what the others see, and how long it took them."""
    group = dist.new_group()
    run_one(call, group)
    interlace.set_deadline(3.0, group)  # on a busy machine the others may be late, too
    if dist.get_rank() == absent:
        dist.barrier()
        run_one(call)
        return None
    start = time.monotonic()
    first = error_of(run_one, call, group)
    seconds = time.monotonic() - start
    later = error_of(run_one, call, group)
    broken = interlace.group_of(group).broken
    dist.barrier()
    return (
        first,
        later,
        broken,
        seconds,
        error_of(interlace.synchronize, group),
        error_of(run_one, call),
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_peer_that_never_calls(ranks, protocol):
    """Each waiting rank names the peer, epoch and slice after its deadline; the group stays broken,
    others do not.
    """
    outcomes = ranks(3).run(_absent_peer, Call(1, 4, 16, config=_config(protocol)), 2)
    for rank, outcome in enumerate(outcomes):
        if rank == 2:
            assert outcome is None
            continue
        first, later, broken, seconds, on_synchronize, elsewhere = outcome
        kind, message, fields = first
        assert kind == "PeerTimeoutError"
        assert message.startswith(
            f"gemv_all_reduce.{protocol}: rank {rank} waited 3 s for rank 2 (slice 0, epoch 2, "
            f"and saw epoch {fields['seen']})."
        )
        assert fields["seen"] < 2
        assert {name: field for name, field in fields.items() if name != "seen"} == {
            "operator": f"gemv_all_reduce.{protocol}", "rank": rank, "peer": 2, "node": None,
            "slice": 0, "wanted": 2, "different_call": False, "deadline_s": 3.0,
            "lost_store": False, "through": None,
        }  # fmt: skip
        assert broken
        assert later == on_synchronize == first
        assert 3.0 <= seconds < 60
        assert elsewhere is None


def _dies(protocol, pids):
    call = Call(1, 9, 16, config=_config(protocol))
    with open(os.path.join(pids, str(dist.get_rank())), "w") as file:
        file.write(str(os.getpid()))
    run_one(call)
    interlace.set_deadline(200.0)
    if dist.get_rank() == 1:
        with interlace.inject(Faults(die_after_puts=1)):
            run_one(call)
    run_one(call)


@pytest.mark.usefixtures("quick_launches")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_peer_that_dies_within_a_kernel(tmp_path, protocol):
    """The caller of launch is told which rank ended, and every process is gone: none waits out its
    deadline.
    """
    with pytest.raises(LaunchError, match=r"rank 1 ended without a result: .*SIGKILL") as caught:
        interlace.launch(_dies, 2, protocol, str(tmp_path), backend="cpu", timeout_s=120)
    assert caught.value.rank == 1
    for rank in range(2):
        assert not os.path.exists(f"/proc/{(tmp_path / str(rank)).read_text()}")


_SOLO = """
import torch, interlace
x, w = torch.ones(2, 16), torch.arange(144.0).reshape(9, 16)
assert torch.equal(interlace.gemv_all_reduce(x, w), x @ w.T)
assert torch.equal(interlace.gemv_all_reduce(x, w, impl="unfused"), x @ w.T)
assert interlace.group_of().world_size == 1
"""


def test_a_process_on_its_own_needs_no_process_group():
    """One rank without torch.distributed, and TRITON_INTERPRET set by nobody."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"INTERLACE_BACKEND": "cpu"}
    subprocess.run([sys.executable, "-c", _SOLO], check=True, env=environment, timeout=300)


def _different_calls(calls):
    """All ranks make both calls, and then each rank another one of them."""
    group = dist.new_group()
    for call in calls:
        run_one(call, group)
    interlace.set_deadline(0.5, group)
    error = error_of(run_one, calls[dist.get_rank()], group)
    dist.barrier()
    return error


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "change", [{"rows": 12}, {"bias": True}, {"tokens": 2}], ids=["rows", "bias", "tokens"]
)
def test_different_calls_that_each_were_agreed_on(ranks, protocol, change):
    """No rank takes the other call's data for its own; whoever sees it at its own epoch says what
    happened.
    """
    call = Call(1, 8, 16, config=_config(protocol))
    outcomes = ranks(2).run(_different_calls, [call, dataclasses.replace(call, **change)])
    for rank, (kind, _, fields) in enumerate(outcomes):
        assert kind == "PeerTimeoutError"
        assert (fields["rank"], fields["peer"], fields["wanted"]) == (rank, 1 - rank, 3)
    assert any(fields["different_call"] for _, _, fields in outcomes)
    for _, message, fields in outcomes:
        assert fields["different_call"] == (
            "The peer made a different call; this group is broken now." in message
        )


def _left_by_a_different_call(calls):
    """What a call returns whose words were those of another call, as on a GPU, where the error
    comes with the next call.
    """
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    for call in calls:
        run_one(call, process_group)
    interlace.set_deadline(0.5, process_group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "check", lambda: None)
        y = run_one(calls[dist.get_rank()], process_group)
    dist.barrier()
    return bool(y.isnan().all()), group.broken


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_pairs_of_another_call_become_nan(ranks, protocol):
    """Two values share a word, which has no room for the call's mark: all of y must be NaN, whoever
    computed it.
    """
    calls = [
        Call(2, 16, columns, dtype="bfloat16", config=_config(protocol)) for columns in (16, 32)
    ]
    assert ranks(2).run(_left_by_a_different_call, calls) == [(True, True)] * 2
