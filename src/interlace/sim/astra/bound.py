"""What physics needs at least for ASTRA-sim's graphs: its congestion-unaware network undercuts it,
and must be flagged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from interlace.sim.astra.config import Network
from interlace.units import GIB

if TYPE_CHECKING:
    from interlace.sim.astra.workload import Node


def graph_bound(network: Network, graph: Sequence[Node]) -> float:
    """Nanoseconds that an NPU needs at least: for its computation, or for its collectives of all
    NPUs, one after the other.
    """
    compute = sum(
        1000.0 * node.duration_us
        for node in graph
        if node.kind == "compute" and not node.cpu and not node.flops
    )
    everyone = [
        node
        for node in graph
        if node.kind == "collective" and not node.group and (node.dims is None or all(node.dims))
    ]
    return max(
        compute, sum(network_bound(network, node.collective, node.size) for node in everyone)
    )


def network_bound(network: Network, collective: str, size: int) -> float:
    """The least time for what must leave an NPU, and cross the middle of the network; in
    nanoseconds.
    """
    n = network.npus
    if n == 1:
        return 0.0
    per_ns = [value * GIB / 1e9 for value in network.bandwidth]
    ports = 0.0
    for block, count, rate in zip(network.topology, network.shape, per_ns, strict=True):
        ports += (
            {"Ring": 2, "Switch": 1, "FullyConnected": count - 1}[block] * rate
            if count > 1
            else 0.0
        )
    whole = size * n if collective == "all_gather" else size
    factor = 2 if collective == "all_reduce" else 1
    bounds = [factor * whole * (n - 1) / n / ports]  # leaving the NPU
    block, count, rate = max(
        zip(network.topology, network.shape, per_ns, strict=True), key=lambda dim: dim[1]
    )
    if collective == "all_to_all" and count % 2 == 0:
        cut = (
            {"Ring": 2, "Switch": count // 2, "FullyConnected": count * count // 4}[block]
            * rate
            * n
            / count
        )
        bounds.append(n * whole / 4 / cut)  # the bisection
    return max(bounds)
