"""Two levels between nodes: results, traffic by the costs, order of sums, gradients, failures."""

import dataclasses
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm.host.nodes import ranks_of_nodes
from interlace.costs import find_cost
from interlace.costs import gemm as product_costs
from interlace.costs.gemm import STAMP_BYTES
from interlace.gemm.implementations import network
from interlace.testing.cases import every_case
from tests.errors import error_of
from tests.gemm.calls import Call, check_all
from tests.nodes.groups import call_without_one, errors_after_a_death, process_group_of

OPERATORS = ["gemm_reduce_scatter", "all_gather_gemm", "gemm_all_reduce"]
SHAPES = [(4, (0, 0, 1, 1)), (4, (0, 1, 0, 1)), (2, (0, 1)), (4, (0, 1, 2, 3))]
"""Ranks, and each one's node: 2 x 2 in two orders, 2 x 1, and 4 x 1."""


def _calls(operator, ranks):
    """Two calls with different sizes, which are cut into three slices of 200 bytes or more."""
    rows = 8 if operator == "all_gather_gemm" else 8 * ranks
    return [
        Call(operator, rows, 24, 20, impl="chunked", bias=True),
        Call(operator, rows // 2, 96, 80, impl="chunked", dtype="bfloat16", w_along="N"),
    ]


def _results(calls, nodes, slice_bytes, latency_bytes):
    with (
        mock.patch.object(network, "SLICE_BYTES", slice_bytes),
        mock.patch.object(product_costs, "_LATENCY_BYTES", latency_bytes),
        process_group_of(nodes) as process_group,
    ):
        traffic = interlace.group_of(process_group).traffic
        results = []
        for call in (*calls, calls[0]):  # the last call finds what the first one has left
            traffic.reset()
            y = call.make(process_group)
            results.append((y, dict(traffic.bytes_to), traffic.messages))
        return results


@pytest.mark.parametrize(
    ("world_size", "nodes", "slice_bytes", "latency_bytes"),
    [(*shape, 200, -1 << 30) for shape in SHAPES] + [(*SHAPES[0], 1 << 20, 1 << 30)],
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_results_and_traffic(ranks, operator, world_size, nodes, slice_bytes, latency_bytes):
    calls = _calls(operator, world_size)
    outcomes = ranks(world_size).run(_results, calls, nodes, slice_bytes, latency_bytes)
    calls.append(calls[0])
    check_all(calls, [[y for y, *_ in outcome] for outcome in outcomes])
    for rank, outcome in enumerate(outcomes):
        for call, (y, bytes_to, _) in zip(calls, outcome, strict=True):
            with mock.patch.object(product_costs, "_LATENCY_BYTES", latency_bytes):
                cost = _cost(call, y.dtype, nodes, slice_bytes)
                within = _bytes_within_the_node(call, y.dtype, nodes, rank, cost.slices)
            far = {peer for peer in bytes_to if nodes[peer] != nodes[rank]}
            assert len(far) == len(set(nodes)) - 1
            assert sum(bytes_to[peer] for peer in far) == cost.network_bytes
            near = {peer: nbytes for peer, nbytes in bytes_to.items() if peer not in far}
            assert near == within


def _cost(call, dtype, nodes, slice_bytes):
    """The traffic of a rank by :mod:`interlace.costs`."""
    ranks, is_gather = len(nodes), call.operator == "all_gather_gemm"
    sizes = {
        "rows": call.rows * (ranks if is_gather else 1),
        "columns": call.columns,
        "inner": call.inner,
        "itemsize": dtype.itemsize,
        "world_size": ranks,
        "node_of_rank": nodes,
    }
    formula = find_cost(call.operator).between_nodes["chunked"]
    exchange = formula(**sizes, slices=1)
    # An all-reduce in shares has two exchanges.
    per_exchange = exchange.network_bytes // (len(set(nodes)) - 1) - STAMP_BYTES
    slices = max(1, min(8, per_exchange // exchange.slices // slice_bytes))
    return formula(**sizes, slices=slices)


def _bytes_within_the_node(call, dtype, nodes, rank, slices):
    """The bytes that a rank sends to each other rank of its node: rows, and a word a kernel."""
    is_gather, is_both = call.operator == "all_gather_gemm", call.operator == "gemm_all_reduce"
    row_bytes = (call.inner if is_gather else call.columns) * dtype.itemsize
    others = len(set(nodes)) - 1
    # What the ranks of a node own on all nodes, once to sum and once to gather.
    share = call.rows // (1 if is_gather else len(nodes)) * (others + 1)
    peers = [peer for peer, node in enumerate(nodes) if node == nodes[rank] and peer != rank]
    if is_both and product_costs.exchanges_sums(
        rows=call.rows, row_bytes=row_bytes, nodes=others + 1, node_ranks=len(peers) + 1
    ):
        kernels = 2 * slices
    else:
        # Sums of each node's slices; gathers of each other node's slices and of this node's rows.
        cuts = slices // 2 if is_both else slices
        sums, gathers = cuts * (others + 1), cuts * others + 1
        kernels = (0 if is_gather else sums) + (gathers if is_gather or is_both else 0)
    return dict.fromkeys(peers, share * row_bytes * (2 if is_both else 1) + 8 * kernels)


def _messages(call, slice_bytes):
    with (
        mock.patch.object(network, "SLICE_BYTES", slice_bytes),
        process_group_of(2) as process_group,
    ):
        call.make(process_group)
        traffic = interlace.group_of(process_group).traffic
        traffic.reset()
        call.make(process_group)
        return traffic.messages


@pytest.mark.parametrize("operator", OPERATORS)
def test_messages_on_the_network(ranks, operator):
    """With one rank per node, all messages are on the network."""
    call = _calls(operator, 2)[0]
    cost = _cost(call, torch.float32, (0, 1), 1)
    assert ranks(2).run(_messages, call, 1) == [cost.network_messages] * 2


# The order of sums


def _summands(rank, rows, columns):
    """Numbers of very different sizes: another order of additions rounds otherwise."""
    generator = torch.Generator().manual_seed(rank)
    sizes = 2.0 ** torch.randint(-12, 12, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * sizes


def _summed(operator, nodes, slice_bytes):
    """Sum numbers over ranks: each is the only product of its sum over K."""
    with (
        mock.patch.object(network, "SLICE_BYTES", slice_bytes),
        process_group_of(nodes) as process_group,
    ):
        x, w = _summands(dist.get_rank(), 32, 16), torch.eye(16)
        return getattr(interlace, operator)(x, w, group=process_group, impl="chunked")


@pytest.mark.parametrize("slice_bytes", [1 << 20, 150])
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_sums_are_float32_in_the_order_of_a_nodes_ranks_and_then_of_nodes(
    ranks, operator, nodes, slice_bytes
):
    parts = [_summands(rank, 32, 16) for rank in range(4)]
    expected, rank_order = torch.zeros(32, 16), sum(parts[1:], parts[0])
    for members in ranks_of_nodes(nodes):
        expected += sum((parts[rank] for rank in members[1:]), parts[members[0]])
    results = ranks(4).run(_summed, operator, nodes, slice_bytes)
    if operator == "gemm_reduce_scatter":
        results = [torch.cat(results)]
    for y in results:
        assert torch.equal(y, expected)
        # With one rank on each node it is the order of ranks, as on one node.
        assert torch.equal(y, rank_order) == (len(set(nodes)) == 4)


def _gathered(nodes, slice_bytes):
    with (
        mock.patch.object(network, "SLICE_BYTES", slice_bytes),
        process_group_of(nodes) as process_group,
    ):
        x, w = _summands(dist.get_rank(), 8, 16), torch.eye(16)
        return interlace.all_gather_gemm(
            x, w, group=process_group, impl="chunked", return_gathered=True
        )


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)])
def test_gathered_rows_have_the_bits_of_their_rank(ranks, nodes):
    expected = torch.cat([_summands(rank, 8, 16) for rank in range(4)])
    for y, gathered in ranks(4).run(_gathered, nodes, 150):
        assert torch.equal(y, expected)
        assert torch.equal(gathered, expected)


def _wrong_elements(operator):
    with process_group_of(2) as process_group:
        ranks = dist.get_world_size()
        cases = [case for case in every_case(ranks, [operator]) if case.impl == "chunked"]
        return [(case.label, case.prepare(process_group).check()) for case in cases]


@pytest.mark.parametrize("operator", OPERATORS)
def test_cases_of_whole_numbers_are_exact_forward_and_backward(ranks, operator):
    """Also those with uneven rows, which ``auto`` runs."""
    for results in ranks(4).run(_wrong_elements, operator):
        assert results
        for label, wrong in results:
            assert not any(wrong), label


# Refusals


def _refusal(nodes, call):
    with process_group_of(nodes) as process_group:
        kind, message, _ = error_of(call.make, process_group)
        return kind, message, call.make(process_group, impl="auto")


@pytest.mark.parametrize(
    ("nodes", "rows", "more", "lacking"),
    [
        ((0, 0, 1, 1), 10, {}, "rows that are split evenly"),
        ((0, 0, 0, 1), 8, {}, "as many ranks on every node"),
        ((0, 0, 1, 1), 8, {"out_dtype": "bfloat16"}, "a result of the dtype that comes by default"),
    ],
)
def test_calls_that_need_the_pair_are_refused_on_every_rank_and_run_by_auto(
    ranks, nodes, rows, more, lacking
):
    message = f"gemm_reduce_scatter: impl='chunked' must have {lacking}. Take impl='auto' or "
    call = Call("gemm_reduce_scatter", rows, 8, 16, impl="chunked", **more)
    outcomes = ranks(4).run(_refusal, nodes, call)
    for kind, said, _ in outcomes:
        assert kind == "ArgumentError"
        assert said == f"{message}'unfused'."
    check_all([call], [[y] for *_, y in outcomes])


# Failures


@pytest.mark.parametrize(
    ("operator", "nodes"),
    [*((each, (0, 0, 1, 1)) for each in OPERATORS), (OPERATORS[1], (0, 1, 0, 1))],
)
def test_a_late_rank_is_named_by_all(ranks, operator, nodes):
    """Also by the ranks that have waited for another one, of their node or of their rail."""
    call = _calls(operator, 4)[0]
    outcomes = ranks(4).run(call_without_one, call, 3, nodes)
    for rank, (error, took_s, _) in enumerate(outcomes):
        if rank != 3:
            kind, message, fields = error
            assert (kind, fields["peer"], fields["node"]) == ("PeerTimeoutError", 3, 1)
            assert "in the exchange on the host" not in message
            assert took_s < 30
    check_all([call], [[y] for *_, y in outcomes])


def _other_call(calls):
    with process_group_of(2) as process_group:
        for call in calls:
            call.make(process_group)
        interlace.set_deadline(1.0, process_group)
        mine = calls[dist.get_rank() == 3]
        return error_of(mine.make, process_group)[0]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_rank_in_another_call_is_an_error_on_every_rank(ranks, operator):
    call = _calls(operator, 4)[0]
    others = [call, dataclasses.replace(call, bias=False)]
    assert ranks(4).run(_other_call, others) == ["PeerTimeoutError"] * 4


def _delayed(calls):
    with (
        mock.patch.object(network, "SLICE_BYTES", 400),
        mock.patch.object(product_costs, "_LATENCY_BYTES", -1 << 30),
        process_group_of(2) as process_group,
    ):
        results = []
        faults = interlace.Faults(seed=dist.get_rank(), max_delay_s=0.003, reorder_puts=True)
        with interlace.inject(faults):
            for turn, call in enumerate(calls):
                if turn % dist.get_world_size() == dist.get_rank():
                    time.sleep(0.3)
                results.append(call.make(process_group))
        return results


def test_delays_and_slow_ranks_change_nothing(ranks):
    """Many calls back to back, of operators in turn."""
    calls = [_calls(operator, 4)[0] for operator in OPERATORS] * 2
    check_all(calls, ranks(4).run(_delayed, calls))


def test_a_dead_rank_is_named_by_the_ranks_of_both_nodes(tmp_path):
    """Also by the rank that has waited for the one whose rail the dead rank was on."""
    make = _calls("gemm_reduce_scatter", 4)[0].make
    for kind, message, peer, node, took_s in errors_after_a_death(make, tmp_path):
        assert (kind, peer, node) == ("PeerTimeoutError", 3, 1), message
        assert took_s < 30
