"""The backward pass of ``embedding_all_to_all`` between nodes: the bits of one node, and costs."""

import dataclasses
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.costs.embedding_all_to_all import backward
from interlace.operators.embedding_all_to_all import gradients_between_nodes, network_choice
from tests.errors import error_of
from tests.nodes.groups import process_group_of
from tests.operators.embedding_all_to_all.calls import Call, run_one
from tests.operators.embedding_all_to_all.test_gradients import train, upstream

KINDS = ["dense", "sparse", "adagrad", "sgd"]
CALLS = {
    2: [
        Call(((4,), (4, 12)), 7),
        Call(((), (6, 3)), 5, mode="mean", output_dtype="float32"),
        Call(((8,), (1,)), 3, weighted=True, index_dtype=torch.int32, dtype="bfloat16"),
    ],
    4: [Call(((4, 4), (8,), (), (1,)), 10, mode="mean"), Call(((2,), (3,), (4,), (5,)), 3)],
}


def _trained(calls, kind, nodes):
    with process_group_of(nodes) as process_group:
        return [train(call, kind, 2, more={"group": process_group}) for call in calls]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_updates_have_the_bits_of_one_node(ranks, kind):
    """In slices; and in whole exchanges, by ``"pooled"`` and by ``"auto"``, which takes it where
    no time is predicted.
    """
    calls = CALLS[2]
    whole = [
        dataclasses.replace(call, impl=impl)
        for call, impl in zip(calls, ("pooled", "auto", "pooled"), strict=True)
    ]
    within = ranks(2).run(_trained, calls, kind, 1)
    for each in (calls, whole):
        _compare(each, ranks(2).run(_trained, each, kind, 2), within)


@pytest.mark.parametrize(("kind", "call"), zip(KINDS, CALLS[4] * 2, strict=True))
def test_gradients_of_several_ranks_per_node_have_the_bits_of_one_node(ranks, kind, call):
    between, within = (ranks(4).run(_trained, [call], kind, nodes) for nodes in (2, 1))
    _compare([call], between, within)


def _compare(calls, between, within):
    """Compare each rank's tables and states between nodes with those within one, bit by bit."""
    for one, other in zip(between, within, strict=True):
        for call, (tables, states), (expected, expected_states) in zip(
            calls, one, other, strict=True
        ):
            for results, exact in ((tables, expected), (states, expected_states)):
                for result, right in zip(results, exact, strict=True):
                    result, right = (
                        each.to_dense() if each.is_sparse else each for each in (result, right)
                    )
                    assert torch.equal(result, right), call


def _in_slices(call, count):
    """Train between nodes with so many slices of gradients; the tables, and how many were taken."""
    plan = network_choice.NetworkPlan("fused", (1, 1), count)
    with (
        process_group_of(2) as process_group,
        mock.patch.object(network_choice, "plan_of", return_value=plan),
        mock.patch.object(
            gradients_between_nodes, "StampedQueue", wraps=gradients_between_nodes.StampedQueue
        ) as queues,
    ):
        tables, _ = train(call, "adagrad", 2, more={"group": process_group})
        return tables, [len(each.args[3]) for each in queues.call_args_list]


@pytest.mark.parametrize(
    "call", [Call(((3, 1, 4, 1, 5), (9,)), 7), Call(((2, 6), (5, 3)), 9, hot=True, most=40)]
)
def test_any_number_of_slices_gives_the_same_bits(ranks, call):
    """Of five tables and of one, so that some slices are empty; every lookup of some hits one row,
    whose runs are those of one slice.
    """
    whole = ranks(2).run(_trained, [call], "adagrad", 1)
    for count in (1, 3, 4):
        for rank, (tables, slices) in enumerate(ranks(2).run(_in_slices, call, count)):
            assert slices == [count, count], "of two steps"
            expected, _ = whole[rank][0]
            assert len(tables) == len(expected)
            assert all(map(torch.equal, tables, expected))


def _counted(calls):
    with process_group_of(2) as process_group:
        traffic = interlace.group_of(process_group).traffic
        answers = []
        for call in calls:
            rank = dist.get_rank()
            indices, offsets, scale = call.lookups(rank)
            tables = [table.requires_grad_() for table in call.tables(rank)]
            y = run_one_trained(call, tables, indices, offsets, scale, process_group)
            traffic.reset()
            y.backward(upstream(call, rank))
            answers.append((traffic.message_bytes, traffic.messages, dict(traffic.bytes_to)))
        return answers


def run_one_trained(call, tables, indices, offsets, scale, process_group):
    return interlace.embedding_all_to_all(
        tables, indices, offsets, per_sample_weights=scale, mode=call.mode,
        batch_size=call.batch, name=f"trained {call.widths}", impl=call.impl, config=call.config,
        group=process_group,
    )  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_and_messages_are_those_of_the_costs(ranks, world_size):
    calls = [dataclasses.replace(call, output_dtype=None) for call in CALLS[world_size]]
    node_of_rank = [rank * 2 // world_size for rank in range(world_size)]
    for rank, answers in enumerate(ranks(world_size).run(_counted, calls)):
        for call, (nbytes, messages, bytes_to) in zip(calls, answers, strict=True):
            nothing = [0] * len(call.widths[rank])
            cost = backward(
                rank=rank, widths=call.widths, batch=call.batch, lookups=nothing,
                distinct_rows=nothing, itemsize=4, gradient_itemsize=call.out.itemsize,
                push_rows=4, node_of_rank=node_of_rank, slices=2,
            )  # fmt: skip
            assert (nbytes, messages) == (cost.link_bytes, cost.messages), call
            network = sum(
                sent for to, sent in bytes_to.items() if node_of_rank[to] != node_of_rank[rank]
            )
            assert network == cost.network_bytes, call


def _late(call, late):
    with process_group_of(2) as process_group:
        rank = dist.get_rank()
        indices, offsets, scale = call.lookups(rank)
        tables = [table.requires_grad_() for table in call.tables(rank)]
        update = interlace.optim.SGD(0.5)
        y = interlace.embedding_all_to_all(
            tables, indices, offsets, per_sample_weights=scale, mode=call.mode,
            batch_size=call.batch, name="late", impl=call.impl, config=call.config,
            group=process_group,
            gradient=update,
        )  # fmt: skip
        # The backward pass is agreed on before, so that the late rank is late for its slices.
        y.backward(upstream(call, rank), retain_graph=True)
        before = [table.detach().clone() for table in tables]
        interlace.set_deadline(4.0, process_group)
        start, error = time.monotonic(), None
        if rank != late:
            error = error_of(y.backward, upstream(call, rank))
        took_s = time.monotonic() - start
        dist.barrier()
        interlace.set_deadline(60.0, process_group)
        interlace.recover(process_group)
        y = run_one(call, process_group)
        return error, took_s, all(map(torch.equal, tables, before)), y.clone()


@pytest.mark.parametrize(("world_size", "late"), [(4, 2), (2, 1)])
def test_a_late_rank_is_named_and_no_table_is_updated(ranks, world_size, late):
    call = CALLS[world_size][0]
    outcomes = ranks(world_size).run(_late, call, late)
    for rank, (error, took_s, unchanged, _) in enumerate(outcomes):
        if rank != late:
            kind, _, fields = error
            assert (kind, fields["peer"], fields["node"]) == ("PeerTimeoutError", late, 1)
            assert took_s < 30
            assert unchanged
    call.check([y for *_, y in outcomes])
