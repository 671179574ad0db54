"""Groups: agreement on the host, deadlines, and the environment's say in them."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import interlace
from interlace import ArgumentError, BackendError
from interlace.comm.groups import group as group_module
from interlace.comm.runtime import context
from tests.errors import error_of


def _exchange(times):
    group = interlace.group_of(dist.new_group())
    return [group.exchange("greeting", {"rank": group.rank, "turn": turn}) for turn in range(times)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exchange_returns_every_value_in_rank_order(ranks, world_size):
    expected = [[{"rank": rank, "turn": turn} for rank in range(world_size)] for turn in range(5)]
    assert ranks(world_size).run(_exchange, 5) == [expected] * world_size


def _different_exchanges():
    group = interlace.group_of(dist.new_group())
    return error_of(group.exchange, f"question {group.rank}", None)


def test_different_exchanges_do_not_mix(ranks):
    message = (
        "ranks must make the same calls in the same order; got 'question 0' on rank 0, 'question "
        "1' on rank 1. "
        "Look for a call that depends on the rank."
    )
    assert [error[:2] for error in ranks(2).run(_different_exchanges)] == [
        ("RankMismatchError", message)
    ] * 2


def _groups_that_are_none():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.ones(2, 4)
    return [
        error_of(interlace.gemm_all_reduce, x, x, group=group)
        for group in (mesh, "tp", 0, x, dist.GroupMember.NON_GROUP_MEMBER)
    ] + [error_of(interlace.gemm_all_reduce, distribute_tensor(x, mesh, [Shard(1)]), x)]


def test_what_is_no_process_group_or_no_plain_tensor_is_refused(ranks):
    for mesh, name, number, tensor, other, dtensor in ranks(2).run(_groups_that_are_none):
        for error in (mesh, name, number, tensor):
            assert error[:1] == ("ArgumentError",)
            assert error[1].startswith("group must be a torch.distributed.ProcessGroup, or None")
        assert "mesh.get_group(name)" in mesh[1]
        assert other[0] == "GroupError"
        assert dtensor[1].startswith("gemm_all_reduce: x must be this rank's tensor; got a DTensor")


def test_marks_of_calls():
    """One for each call, none of them zero, none equal to those of the 126 calls before, all above
    the epoch's bits.
    """
    group = group_module.Group(None, torch.device("cpu"))
    marks = [group.agree("multiply", columns=columns) for columns in range(300)]
    assert [group.agree("multiply", columns=columns) for columns in range(300)] == marks
    assert all(mark % 2**24 == 0 and 0 < mark < 2**31 for mark in marks)
    assert all(len(set(marks[i : i + 127])) == 127 for i in range(300 - 127))
    assert group.agree("divide", columns=0) != group.agree("multiply", columns=0)


def _absent_from_exchange():
    process_group = dist.new_group()
    group = interlace.group_of(process_group)
    interlace.set_deadline(3.0, process_group)  # on a busy machine the others may be late, too
    error = None
    if group.rank != 1:
        error = error_of(group.exchange, "roll call", None)
    dist.barrier()
    return error, group.broken


def test_an_exchange_that_a_rank_misses_ends_at_the_deadline(ranks):
    outcomes = ranks(4).run(_absent_from_exchange)
    for rank, (error, broken) in enumerate(outcomes):
        assert broken == (rank != 1)
        if rank != 1:
            kind, message, fields = error
            assert kind == "PeerTimeoutError"
            assert message.startswith(
                f"roll call: rank {rank} waited 3 s for rank 1 (in the exchange on the host)."
            )
            assert (fields["rank"], fields["peer"], fields["deadline_s"]) == (rank, 1, 3.0)


def _same_group():
    process_group = dist.new_group()
    here, again = interlace.group_of(process_group), interlace.group_of(process_group, "cpu")
    world = interlace.group_of()
    return here is again, here is world, world is interlace.group_of(dist.group.WORLD)


def test_a_process_group_has_one_group(ranks):
    assert ranks(2).run(_same_group) == [(True, False, True)] * 2


@pytest.mark.parametrize(("text", "seconds"), [("", 30.0), ("2.5", 2.5), ("600", 600.0)])
def test_deadline_from_the_environment(monkeypatch, text, seconds):
    monkeypatch.setenv("INTERLACE_DEADLINE_S", text)
    assert group_module.Group(None, torch.device("cpu")).deadline_s == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("soon", "INTERLACE_DEADLINE_S must be a number of seconds; got 'soon'."),
        ("0", "INTERLACE_DEADLINE_S must be above 0 and below a million seconds; got 0.0."),
        ("-1", "INTERLACE_DEADLINE_S must be above 0 and below a million seconds; got -1.0."),
        ("nan", "INTERLACE_DEADLINE_S must be above 0 and below a million seconds; got nan."),
        ("inf", "INTERLACE_DEADLINE_S must be above 0 and below a million seconds; got inf."),
    ],
)
def test_deadlines_that_are_none(monkeypatch, text, message):
    monkeypatch.setenv("INTERLACE_DEADLINE_S", text)
    with pytest.raises(ArgumentError) as caught:
        group_module.Group(None, torch.device("cpu"))
    assert str(caught.value) == message


def test_a_deadline_in_numbers_of_numpy_is_as_long():
    group = group_module.Group(None, torch.device("cpu"))
    fields = group.context("multiply")
    group.deadline_s = np.int32(60)
    assert group.deadline_s == 60.0
    assert fields[context.DEADLINE_NS] == 60_000_000_000


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), 1e6, "x", None])
def test_set_deadline_refuses_what_never_or_always_expires(seconds):
    group = group_module.Group(None, torch.device("cpu"))
    with pytest.raises(
        ArgumentError, match=r"^a deadline must be above 0 and below a million seconds; got "
    ):
        group.deadline_s = seconds
    assert group.deadline_s == 30.0


def test_an_unknown_backend_in_the_environment(monkeypatch):
    monkeypatch.setenv("INTERLACE_BACKEND", "tpu")
    with pytest.raises(
        BackendError, match=r"^INTERLACE_BACKEND must be auto, cuda or cpu; got 'tpu'\.$"
    ):
        interlace.group_of()


def test_an_unknown_device():
    with pytest.raises(BackendError, match=r"^a group's device must be cuda or cpu; got meta\.$"):
        interlace.group_of(device="meta")
