"""``embedding_all_to_all`` between nodes: the bits of one node, bytes by the costs, and faults."""

import dataclasses
import functools
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.costs.embedding_all_to_all import forward, slices_of
from interlace.operators.embedding_all_to_all import between_nodes, network_choice
from tests.errors import error_of
from tests.nodes.groups import errors_after_a_death, process_group_of
from tests.operators.embedding_all_to_all.calls import SMALL, Call, check_all, run_one

SHAPES = [(4, 2), (2, 2)]

_SIZES = {
    2: [(((8,), (8,)), 2), (((7, 3), ()), 2), (((7, 3), ()), 21), (((16, 20), (4,)), 21),
        (((), (5, 5, 5)), 21)],
    4: [(((8,), (8,), (8,), (8,)), 2), (((7,), (), (3, 5), (2,)), 2),
        (((7,), (), (3, 5), (2,)), 37), (((4, 4), (8,), (16,), (12, 4)), 13)],
}  # fmt: skip
"""The widths of each rank's tables, and the batch, of calls of each number of ranks."""


def _calls(world_size):
    """Calls with several slices, uneven and empty chunks, other dtypes, modes and weights."""
    calls = [
        Call(widths, batch, seed=seed) for seed, (widths, batch) in enumerate(_SIZES[world_size])
    ]
    first = dataclasses.replace(calls[2], batch=13)
    return [
        *calls,
        dataclasses.replace(first, dtype="bfloat16", weighted=True, index_dtype=torch.int32),
        dataclasses.replace(first, dtype="float16", output_dtype="float32", mode="mean"),
        dataclasses.replace(first, config=None, impl="auto"),
        dataclasses.replace(first, batch=0),
    ]


def _results(calls, nodes):
    """Each call's result and traffic: bytes, messages, signals, and bytes to each rank."""
    with process_group_of(nodes) as process_group:
        traffic = interlace.group_of(process_group).traffic
        results = []
        for call in calls:
            traffic.reset()
            y = run_one(call, process_group).clone()
            counts = traffic.message_bytes, traffic.messages, traffic.signals
            results.append((y, counts, dict(traffic.bytes_to)))
        return results


@pytest.mark.parametrize(("world_size", "nodes"), SHAPES)
def test_results_have_the_bits_of_one_node_and_traffic_is_that_of_the_costs(
    ranks, world_size, nodes
):
    # The last calls find counters, landings and signals of the first ones.
    calls = _calls(world_size)
    calls += calls[1:3]
    between = ranks(world_size).run(_results, calls, nodes)
    check_all(calls, [[y for y, *_ in results] for results in between])
    within = ranks(world_size).run(_results, calls, 1)
    node_of_rank = [rank * nodes // world_size for rank in range(world_size)]
    for rank, (one, other) in enumerate(zip(between, within, strict=True)):
        for call, (y, counts, bytes_to), (expected, *_) in zip(calls, one, other, strict=True):
            assert torch.equal(y, expected), call
            if call.config is None or not call.batch:
                continue
            cost = _cost(call, rank, node_of_rank)
            assert counts == (cost.link_bytes, cost.messages, cost.signals), call
            network = sum(
                sent for to, sent in bytes_to.items() if node_of_rank[to] != node_of_rank[rank]
            )
            assert network == cost.network_bytes, call
    _check_pooled(ranks(world_size), calls, node_of_rank, between)
    if world_size == 4:
        _check_pooled(ranks(world_size), calls, [0] * world_size, within)


def _in_slices(call, shares):
    """A call in slices of these sizes: the result, the bytes to each rank and of messages, and how
    many samples slices have.
    """
    cuts = []

    def cut_of(*arguments):
        cuts.append(of(*arguments))
        return cuts[-1]

    of, plan = between_nodes.Cut.of, network_choice.NetworkPlan("fused", shares)
    with (
        process_group_of(2) as process_group,
        mock.patch.object(network_choice, "plan_of", return_value=plan),
        mock.patch.object(between_nodes.Cut, "of", cut_of),
        mock.patch.object(between_nodes, "_SLICE_SAMPLES", 8),
    ):
        traffic = interlace.group_of(process_group).traffic
        traffic.reset()
        y = run_one(call, process_group).clone()
        return y, traffic.bytes_to, traffic.messages, (cuts[0].first_rows, cuts[0].rows)


@pytest.mark.parametrize(
    ("shares", "batch", "expected"),
    [
        ((1, 3), 75, (16, 48)),  # chunks of 38 and 37 samples: 16 and 22, 16 and 21
        ((1, 3), 31, (8, 24)),  # chunks of 16 and 15: 8 and 8, 8 and 7
        ((1, 3), 16, (8, 24)),  # one slice
        ((1, 1, 1, 1), 75, (16, 16)),  # 16, 16 and 6
    ],
)
def test_slices_of_several_sizes(ranks, shares, batch, expected):
    call = Call(((7, 3), (4,)), batch, config=None, weighted=True)
    within = ranks(2).run(_results, [call], 1)
    for rank, (y, bytes_to, messages, rows) in enumerate(ranks(2).run(_in_slices, call, shares)):
        assert rows == expected
        assert torch.equal(y, within[rank][0][0])
        peer = 1 - rank
        count = len(range(batch)[call.samples(peer)])
        sent = slices_of(count, 4 * sum(call.widths[rank]), *expected)
        assert bytes_to == {peer: sum(sent)}
        assert messages == len(sent)


def _whole(calls, nodes):
    """Each call's result by ``"pooled"``, and the bytes for each rank in torch's all-to-all."""
    counts = []

    def counted(received, sent, from_each=None, to_each=None, group=None):
        size = dist.get_world_size(group)
        to_each = to_each or [sent.numel() // size] * size
        counts.append([count * sent.element_size() for count in to_each])
        return all_to_all(received, sent, from_each, to_each, group=group)

    all_to_all = dist.all_to_all_single
    with (
        process_group_of(nodes) as process_group,
        mock.patch.object(dist, "all_to_all_single", counted),
    ):
        traffic = interlace.group_of(process_group).traffic
        traffic.reset()
        found = []
        for call in calls:
            y = run_one(dataclasses.replace(call, impl="pooled"), process_group)
            found.append((y, counts.pop() if counts else []))
        assert traffic.messages == 0, "kernels send nothing"
        return found


def _check_pooled(pool, calls, node_of_rank, results):
    """Compare ``"pooled"`` with the bits of fused kernels, and what it sends with the costs."""
    for rank, found in enumerate(pool.run(_whole, calls, 1 + max(node_of_rank))):
        for call, (y, sent), (expected, *_) in zip(calls, found, results[rank], strict=True):
            assert torch.equal(y, expected), call
            if not call.batch:
                assert not sent
                continue
            cost = _cost(call, rank, node_of_rank, "pooled")
            away = [nbytes for peer, nbytes in enumerate(sent) if peer != rank and nbytes]
            far = [
                nbytes
                for peer, nbytes in enumerate(sent)
                if node_of_rank[peer] != node_of_rank[rank] and nbytes
            ]
            assert (sum(away), len(away)) == (cost.link_bytes, cost.messages), call
            assert (sum(far), len(far)) == (cost.network_bytes, cost.network_messages), call


def _compiled(call):
    """Forward and backward of a compiled call, and of an eager one, without breaks of the graph."""
    rank = dist.get_rank()
    indices, offsets, _ = call.lookups(rank)
    with process_group_of(2) as process_group:

        def step(tables):
            return interlace.embedding_all_to_all(
                tables, indices, offsets, batch_size=call.batch, name="compiled", impl=call.impl,
                group=process_group,
            )  # fmt: skip

        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            tables = [table.requires_grad_() for table in call.tables(rank)]
            y = function(tables)
            y.square().sum().backward()
            results.append([y.detach(), *(table.grad for table in tables)])
        return all(map(torch.equal, *results))


@pytest.mark.parametrize("impl", ["pooled", "auto"])
def test_whole_exchanges_compile_into_one_graph(ranks, impl):
    assert ranks(2).run(_compiled, Call(((7, 3), ()), 21, impl=impl, config=None)) == [True] * 2


def _cost(call, rank, node_of_rank, impl="fused"):
    config = call.config or SMALL
    return forward(
        impl=impl,
        node_of_rank=node_of_rank,
        rank=rank,
        widths=call.widths,
        batch=call.batch,
        lookups=[0] * len(call.widths[rank]),
        itemsize=4,
        output_itemsize=call.out.itemsize,
        index_itemsize=8,
        block_bags=config.block_bags,
        slice_blocks=config.slice_blocks,
    )


# Faults


@torch.no_grad()  # else ranks ask each other on the host whether tables are trained
def _failing(call, kind, late):
    """Calls in which rank ``late`` does something else; what the others raise, and when."""
    with process_group_of(2) as process_group:
        group = interlace.group_of(process_group)
        other = dataclasses.replace(call, batch=call.batch + 4, name="other")
        # Without the exchange of the check, on the host, in which ranks would notice at once.
        unchecked = {"group": process_group, "check_indices": False}
        for each in (call, other):
            run_one(each, **unchecked)
        interlace.set_deadline(4.0, process_group)
        start, error = time.monotonic(), None
        if group.rank != late:
            error = error_of(run_one, call, **unchecked)
        elif kind == "other":
            error_of(run_one, other, **unchecked)
        took_s = time.monotonic() - start
        dist.barrier()
        interlace.set_deadline(60.0, process_group)
        interlace.recover(process_group)
        again = run_one(call, process_group).clone()
        return error, took_s, group.broken, again


@pytest.mark.parametrize("kind", ["absent", "other"])
@pytest.mark.parametrize(("world_size", "late"), [(4, 3), (2, 0)])
def test_a_rank_of_the_other_node_that_does_not_come(ranks, world_size, late, kind):
    """Ranks of both nodes name it, in time; all of them recover."""
    call = _calls(world_size)[2]
    outcomes = ranks(world_size).run(_failing, call, kind, late)
    for rank, (error, took_s, _, _) in enumerate(outcomes):
        if rank != late:
            name, _, fields = error
            assert name == "PeerTimeoutError"
            assert (fields["peer"], fields["node"]) == (late, late * 2 // world_size), rank
            assert took_s < 30
    assert not any(broken for _, _, broken, _ in outcomes)
    call.check([again for *_, again in outcomes])


def _delayed(call):
    """Calls under delays of this rank's own, with a rank that is slow; the results."""
    with process_group_of(2) as process_group:
        faults = interlace.Faults(seed=dist.get_rank(), max_delay_s=0.003, reorder_puts=True)
        results = []
        with interlace.inject(faults):
            for turn in range(4):
                if turn % dist.get_world_size() == dist.get_rank():
                    time.sleep(0.3)
                results.append(run_one(call, process_group).clone())
        return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_delays_and_slow_ranks_change_nothing(ranks, world_size):
    call = _calls(world_size)[2]
    outcomes = ranks(world_size).run(_delayed, call)
    for turn in range(4):
        call.check([results[turn] for results in outcomes])


def test_a_dead_rank_is_named_by_the_ranks_of_both_nodes(tmp_path):
    """The other node's ranks notice the closed connection at once, this node's by the deadline."""
    make = functools.partial(run_one, _calls(4)[2])
    for kind, message, peer, node, took_s in errors_after_a_death(make, tmp_path):
        assert (kind, peer, node) == ("PeerTimeoutError", 3, 1), message
        assert took_s < 30
