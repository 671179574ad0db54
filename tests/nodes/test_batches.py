"""Batches of products between nodes in slices: results, bytes by the costs, a late rank."""

import dataclasses
from unittest import mock

import pytest
import torch

import interlace
from interlace.costs import find_cost
from interlace.costs.known_profiles import profile_of
from interlace.costs.network import NetworkRates
from interlace.costs.time import SizedCall
from interlace.gemm.between_nodes import predicted_times
from interlace.gemm.implementations import network
from interlace.registry import operators
from interlace.testing.cases.batches import BatchCase
from tests.nodes.groups import call_without_one, check_late, check_traffic, process_group_of

OPERATORS = ["bmm_all_to_all", "all_to_all_bmm"]


def _cases(operator):
    """Slices that begin and end within products, and with them; a single product."""
    return [
        BatchCase(operator, "chunked", "float32", count=3, share=5, inner=24, columns=20),
        BatchCase(operator, "chunked", "bfloat16", count=4, share=2, inner=16, columns=8),
        BatchCase(
            operator, "chunked", "float32", count=1, share=7, inner=8, columns=12, along_k=True
        ),
    ]


def _results(cases, nodes, slice_bytes):
    with (
        mock.patch.object(network, "SLICE_BYTES", slice_bytes),
        process_group_of(nodes) as process_group,
    ):
        traffic = interlace.group_of(process_group).traffic
        results = []
        for case in (*cases, cases[0]):  # the last call finds what the first one has left
            prepared = case.prepare(process_group)
            traffic.reset()
            results.append((prepared.check(), dict(traffic.bytes_to), traffic.messages))
        return results


@pytest.mark.parametrize(
    ("world_size", "nodes", "slice_bytes"), [(4, 2, 1 << 20), (4, 2, 300), (2, 2, 100)]
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_results_and_traffic(ranks, operator, world_size, nodes, slice_bytes):
    cases = _cases(operator)
    node_of_rank = tuple(rank * nodes // world_size for rank in range(world_size))
    outcomes = ranks(world_size).run(_results, cases, nodes, slice_bytes)
    for rank, outcome in enumerate(outcomes):
        for case, (wrong, bytes_to, messages) in zip((*cases, cases[0]), outcome, strict=True):
            assert not any(wrong), case
            itemsize = 4 if case.dtype == "float32" else 2
            width = case.inner if operator == "all_to_all_bmm" else case.columns
            rows = case.count * case.share
            cost = find_cost(operator).between_nodes["chunked"](
                rows=rows * world_size, columns=case.columns, inner=case.inner, itemsize=itemsize,
                world_size=world_size, rank=rank, node_of_rank=node_of_rank,
                slices=max(1, min(8, rows * width * itemsize // slice_bytes)),
            )  # fmt: skip
            expected = cost.network_bytes, cost.network_messages
            check_traffic(bytes_to, messages, rank, node_of_rank, expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_slices_are_predicted_where_they_hide_the_exchange(operator):
    """A message takes 1 us, and an all-to-all 1 ms."""
    quick = NetworkRates("wire", "made up", 2, 2, [(1, 1.0), (9999, 1.0)], [(9999, 1000.0)])
    profile = dataclasses.replace(profile_of("NVIDIA H200"), network=quick)
    times = predicted_times(profile, operator, 2, SizedCall(8192, 4096, 4096, 2, 2))
    assert times.order(operators()[operator]) == ["chunked", "unfused"]


class _Call:
    """A call as the helpers of this folder take it."""

    def __init__(self, operator):
        self.case = _cases(operator)[0]

    def make(self, process_group):
        prepared = self.case.prepare(process_group)
        results = [result.clone() for result in prepared.run()]
        found = torch.zeros(prepared.result_count, dtype=torch.int64)
        prepared.count_wrong(results, 0, found)
        return found.tolist()


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_late_rank_is_named(ranks, operator):
    outcomes = ranks(4).run(call_without_one, _Call(operator), 3)
    check_late(outcomes, 3)
    assert not any(any(wrong) for *_, wrong in outcomes)
