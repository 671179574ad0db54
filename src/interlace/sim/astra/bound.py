"""Physical bounds of ASTRA-sim's graphs, which its congestion-unaware network may undercut.

Such results are flagged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from interlace.sim.astra.config import Network
from interlace.units import GIB

if TYPE_CHECKING:
    from interlace.sim.astra.workload import Node


def graph_bound(network: Network, graph: Sequence[Node]) -> float:
    """Return the nanoseconds that an NPU needs at least.

    They are those of its computation, or of its collectives of all NPUs, one after the other.
    """
    compute = sum(
        1000.0 * node.duration_us
        for node in graph
        if node.kind == "compute" and not node.cpu and not node.flops
    )
    # Collectives of some NPUs may run next to one another, so only those of all NPUs add up.
    everyone = [
        node
        for node in graph
        if node.kind == "collective" and not node.group and (node.dims is None or all(node.dims))
    ]
    return max(
        compute, sum(network_bound(network, node.collective, node.size) for node in everyone)
    )


def network_bound(network: Network, collective: str, size: int) -> float:
    """Return the nanoseconds in which the fewest bytes can leave an NPU and cross the network's
    middle.
    """
    n = network.npus
    if n == 1:
        return 0.0
    per_ns = [value * GIB / 1e9 for value in network.bandwidth]
    # The ports of all dimensions work at the same time; a dimension of one NPU has none.
    ports = 0.0
    for block, count, rate in zip(network.topology, network.shape, per_ns, strict=True):
        ports += (
            {"Ring": 2, "Switch": 1, "FullyConnected": count - 1}[block] * rate
            if count > 1
            else 0.0
        )
    # ASTRA-sim's size of an all-gather is that of a shard.
    buffer = size * n if collective == "all_gather" else size
    factor = 2 if collective == "all_reduce" else 1
    bounds = [factor * buffer * (n - 1) / n / ports]
    block, count, rate = max(
        zip(network.topology, network.shape, per_ns, strict=True), key=lambda dim: dim[1]
    )
    if collective == "all_to_all" and count % 2 == 0:
        # Across the longest dimension a quarter of all blocks crosses the middle in each direction.
        cut = (
            {"Ring": 2, "Switch": count // 2, "FullyConnected": count * count // 4}[block]
            * rate
            * n
            / count
        )
        bounds.append(n * buffer / 4 / cut)
    return max(bounds)
