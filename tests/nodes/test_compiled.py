"""The pass for ``torch.compile`` on groups of several nodes: it fuses where a measured network says
that slices take less time, and says else why it does not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from interlace.compile import fuse
from interlace.costs.network import NetworkRates
from tests.compile.programs import operators, tensors, traced
from tests.nodes.groups import measured_network, process_group_of

c10d = torch.ops._c10d_functional
M, N, K = 192, 12, 8

# A message takes 1 us, a collective 1 ms; and the other way round.
QUICK = NetworkRates("wire", "made up", 2, 2, [(1, 1.0), (9999, 1.0)], [(9999, 1000.0)])
SLOW = NetworkRates("wire", "made up", 2, 2, [(1, 1000.0), (9999, 1000.0)], [(9999, 1.0)])


def _programs(group: str) -> dict[str, tuple[Any, list[tuple[int, ...]]]]:
    """Programs of x and a weight by the operator that takes their place, and x's shape."""
    ranks, wait = dist.get_world_size(), c10d.wait_tensor
    even = [M // ranks] * ranks
    return {
        "gemm_reduce_scatter": (
            lambda x, w: wait(c10d.reduce_scatter_tensor(x @ w.t(), "sum", ranks, group)),
            [(M, K), (N, K)],
        ),
        "gemm_all_reduce": (
            lambda x, w: wait(c10d.all_reduce(x @ w.t(), "sum", group)),
            [(M, K), (N, K)],
        ),
        "all_gather_gemm": (
            lambda x, w: wait(c10d.all_gather_into_tensor(x, ranks, group)) @ w.t(),
            [(M // ranks, K), (N, K)],
        ),
        "gemm_all_to_all": (
            lambda x, w: wait(c10d.all_to_all_single(x @ w.t(), even, even, group)),
            [(M, K), (N, K)],
        ),
    }


def _fused(network: NetworkRates | None) -> dict[str, tuple[list[str], str, float]]:
    """The operators in each program's graph, the pass's reason, and the error of its result."""
    found = {}
    with process_group_of(2) as process_group, measured_network(network):
        for name, (program, shapes) in _programs(process_group.group_name).items():
            arguments = tensors(*shapes)
            module = traced(program, arguments)
            expected = module(*arguments)
            (finding,) = fuse(module.graph)
            module.recompile()
            error = (module(*arguments) - expected).norm() / expected.norm()
            found[name] = operators(module), finding.reason, float(error)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_slices_where_they_take_less_time(ranks: Any, world_size: int) -> None:
    for found in ranks(world_size).run(_fused, QUICK):
        for name, (fused, reason, error) in found.items():
            assert fused == [name]
            assert reason.startswith("predicted between 2 nodes over wire: chunked "), reason
            assert error < 1e-5


@pytest.mark.parametrize(
    ("network", "reason"),
    [(SLOW, "predicted between 2 nodes over wire: "), (None, "no network between the 2 nodes")],
    ids=["slow", "not measured"],
)
def test_the_pair_else(ranks: Any, network: NetworkRates | None, reason: str) -> None:
    for found in ranks(2).run(_fused, network):
        for name, (fused, said, error) in found.items():
            assert fused == []
            assert said.startswith(f"{name} is not faster between 2 nodes: {reason}"), said
            assert error == 0
