"""``embedding_all_to_all`` between nodes: the bits of one node, bytes by the costs, and faults."""

import dataclasses

import pytest
import torch

from tests.nodes.groups import process_group_of
from tests.operators.embedding_all_to_all.calls import Call, check_all, run_one

SHAPES = [(4, 2), (2, 2)]

_WIDTHS = {
    2: [((8,), (8,)), ((7, 3), ()), ((16, 20), (4,)), ((), (5, 5, 5))],
    4: [((8,), (8,), (8,), (8,)), ((7,), (), (3, 5), (2,)), ((4, 4), (8,), (16,), (12, 4))],
}


def _calls(world_size):
    """Calls with several slices, uneven and empty chunks, other dtypes, modes and weights."""
    calls = [
        Call(widths, batch, seed=seed)
        for seed, widths in enumerate(_WIDTHS[world_size])
        for batch in (2, 37)
    ]
    first = calls[3]
    return [
        *calls,
        dataclasses.replace(first, dtype="bfloat16"),
        dataclasses.replace(first, dtype="float16", output_dtype="float32", mode="mean"),
        dataclasses.replace(first, weighted=True, index_dtype=torch.int32),
        dataclasses.replace(first, config=None, impl="auto"),
        dataclasses.replace(first, batch=0),
    ]


def _results(calls, nodes):
    with process_group_of(nodes) as process_group:
        # Twice: the second calls find counters, landings and signals of the first ones.
        for _ in range(2):
            results = [run_one(call, process_group).clone() for call in calls]
        return results


@pytest.mark.parametrize(("world_size", "nodes"), SHAPES)
def test_results_have_the_bits_of_one_node(ranks, world_size, nodes):
    calls = _calls(world_size)
    between = ranks(world_size).run(_results, calls, nodes)
    check_all(calls, between)
    within = ranks(world_size).run(_results, calls, 1)
    for one, other in zip(between, within, strict=True):
        for call, y, expected in zip(calls, one, other, strict=True):
            assert torch.equal(y, expected), call
