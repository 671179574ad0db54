"""``gemm_all_to_all`` between nodes in slices: results, bytes by the costs, a late rank."""

import dataclasses
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.costs.gemm import network_traffic
from interlace.gemm.implementations import network
from tests.gemm.calls import Call, check_all
from tests.nodes.groups import call_without_one, check_late, check_traffic, process_group_of

SHAPES = [(4, 2), (2, 2)]


def _calls(ranks):
    call = Call("gemm_all_to_all", 16 * ranks, 24, 20, impl="chunked", bias=True)
    return [
        call,
        dataclasses.replace(call, dtype="bfloat16", bias=False),
        dataclasses.replace(call, rows=3 * ranks, w_along="N"),
    ]


def _results(calls, nodes, slice_bytes):
    before, network.SLICE_BYTES = network.SLICE_BYTES, slice_bytes
    with process_group_of(nodes) as process_group:
        traffic = interlace.group_of(process_group).traffic
        try:
            results = []
            for call in (*calls, calls[0]):  # the last call finds what the first one has left
                traffic.reset()
                y = call.make(process_group)
                results.append((y, dict(traffic.bytes_to), traffic.messages))
        finally:
            network.SLICE_BYTES = before
        return results


@pytest.mark.parametrize(
    ("world_size", "nodes", "slice_bytes"), [(4, 2, 1 << 20), (4, 2, 200), (2, 2, 200)]
)
def test_results_and_traffic(ranks, world_size, nodes, slice_bytes):
    calls = _calls(world_size)
    outcomes = ranks(world_size).run(_results, calls, nodes, slice_bytes)
    calls.append(calls[0])
    check_all(calls, [[y for y, *_ in outcome] for outcome in outcomes])
    node_of_rank = [rank * nodes // world_size for rank in range(world_size)]
    for rank, outcome in enumerate(outcomes):
        for call, (y, bytes_to, messages) in zip(calls, outcome, strict=True):
            share = call.rows // world_size
            row_bytes = 24 * y.element_size()
            slices = max(1, min(8, share * row_bytes // slice_bytes))
            nbytes, count = network_traffic(
                rank=rank,
                sent=[[share] * world_size] * world_size,
                row_bytes=row_bytes,
                slices=slices,
                node_of_rank=node_of_rank,
            )
            check_traffic(bytes_to, messages, rank, node_of_rank, (nbytes, count))


def _trained(call, nodes):
    with process_group_of(nodes) as process_group:
        tensors = {
            name: tensor.requires_grad_() for name, tensor in call.inputs(dist.get_rank()).items()
        }
        y = call.make(process_group, **tensors)
        y.backward(torch.ones_like(y))
        return [tensor.grad for tensor in tensors.values()]


def test_gradients_are_those_of_one_node(ranks):
    call = _calls(4)[0]
    between, within = (ranks(4).run(_trained, call, nodes) for nodes in (2, 1))
    for one, other in zip(between, within, strict=True):
        assert all(map(torch.equal, one, other))


def _explained():
    with process_group_of(2) as process_group:
        x, w = torch.randn(8, 16), torch.randn(8, 16)
        return interlace.explain("gemm_all_to_all", x, w, group=process_group)


def test_explain_says_that_the_pair_runs(ranks):
    reason = (
        "no network between the 2 nodes was measured, which INTERLACE_MEASURE_MACHINE=1 or "
        "`interlace tune machine` on them does"
    )
    for said in ranks(2).run(_explained):
        assert ": unfused, because" in said
        assert reason in said


@pytest.mark.parametrize(("world_size", "late"), [(4, 3), (2, 0)])
def test_a_late_rank_is_named(ranks, world_size, late):
    call = _calls(world_size)[0]
    outcomes = ranks(world_size).run(call_without_one, call, late)
    check_late(outcomes, late)
    check_all([call], [[y] for *_, y in outcomes])


def _replays(connections):
    """Make one call; return how many go through the store of graphs."""
    call = _calls(2)[0]
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    with process_group_of(2) as process_group, mock.patch.dict(os.environ, variables):
        replays = interlace.group_of(process_group).replays
        with mock.patch.object(replays, "run", wraps=replays.run) as run:
            call.make(process_group)
        return run.call_count


@pytest.mark.parametrize(("connections", "count"), [("32", 1), ("1", 0)])
def test_a_single_queue_to_the_device_lets_nothing_be_replayed(ranks, connections, count):
    """With it, a graph may put a wait before the kernel that it is for."""
    assert ranks(2).run(_replays, connections) == [count] * 2
