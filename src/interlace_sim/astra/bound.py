"""Physical bounds of ASTRA-sim's graphs, which its congestion-unaware network may undercut.

Such results are flagged. Bounds hold for every algorithm and every order of the same operators:
they count the bytes that must leave or reach an NPU, those that a group's members must send, and
the times that nodes need by themselves.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence

from interlace.units import GIB
from interlace_sim.astra.config import Network, System
from interlace_sim.astra.graph import Groups, Node, duration_ns
from interlace_sim.astra.network import ring_steps
from interlace_sim.astra.system import logical_axes, split
from interlace_sim.bounds import Bound, largest
from interlace_sim.symmetry import coordinates

LEFT_OUT = (
    "latency, endpoint delays and reductions within collectives",
    "links that messages of different NPUs share, other than an NPU's own and the bisection of an "
    "all-to-all",
    "what a receive waits for",
)
"""What takes time, and is not in the bound."""


def run_bound(
    network: Network,
    system: System,
    graphs: Sequence[Sequence[Node]],
    orders: Sequence[Sequence[int]],
    groups: Groups,
) -> Bound:
    """Return the time that a run needs at least, and the reason.

    Args:
        network, system: The hardware.
        graphs: The nodes of each NPU.
        orders: Ids of each NPU's nodes, every node after its dependencies.
        groups: Communicator groups.
    """
    bounds = _Bounds(network, system, groups)
    for rank, (graph, order) in enumerate(zip(graphs, orders, strict=True)):
        bounds.add(rank, graph, order)
    return largest(bounds.every())


class _Bounds:
    """The loads that the graphs of NPUs add up to."""

    def __init__(self, network: Network, system: System, groups: Groups) -> None:
        self._network, self._system, self._groups = network, system, groups
        self._bytes_per_ns = [value * GIB / 1e9 for value in network.bandwidth]
        self._ports = sum(
            _links(block, count) * rate
            for block, count, rate in zip(
                network.topology, network.shape, self._bytes_per_ns, strict=True
            )
            if count > 1
        )
        # Bounds of single NPUs, and loads that NPUs share.
        self._own: list[Bound] = []
        self._sent: dict[int, float] = collections.defaultdict(float)
        self._crossing = 0.0

    def add(self, rank: int, graph: Sequence[Node], order: Sequence[int]) -> None:
        """Add an NPU's nodes."""
        sent = received = 0.0
        times: dict[int, float] = {}
        units: dict[str, float] = collections.defaultdict(float)
        for node in graph:
            own_ns = duration_ns(node, self._system)
            if own_ns is not None:
                least_ns = self._least_ns(node, own_ns)
                times[node.id] = least_ns
                units["the host" if node.cpu else node.kind] += least_ns
            elif node.kind == "collective":
                least, average, least_received = self._collective(node)
                times[node.id] = least / self._ports if least else 0.0
                sent, received = sent + least, received + least_received
                self._sent[0] += average
                if node.group:
                    self._sent[node.group] += average
            elif node.kind == "send":
                times[node.id] = self._message_ns(rank, node.peer, node.size)
                sent += node.size
                self._sent[0] += node.size
            elif node.kind == "receive":
                received += node.size
        ends: dict[int, float] = {}
        nodes = {node.id: node for node in graph}
        for ident in order:
            before = max((ends[dep] for dep in nodes[ident].deps), default=0.0)
            ends[ident] = before + times.get(ident, 0.0)
        # The simplest reason comes first, which is named where several bind equally.
        if self._ports:
            self._own += [
                Bound(sent / self._ports, f"bytes that leave NPU {rank}"),
                Bound(received / self._ports, f"bytes that reach NPU {rank}"),
            ]
        self._own += [
            Bound(units["compute"], f"computation of NPU {rank}"),
            Bound(units["the host"], f"the host of NPU {rank}"),
            Bound(max(ends.values(), default=0.0), f"a chain of nodes of NPU {rank}"),
        ]

    def every(self) -> Iterator[Bound]:
        """List all bounds."""
        yield from self._own
        for number, sent in self._sent.items() if self._ports else ():
            count = len(self._groups[number]) if number else self._network.npus
            who = f"group {number}" if number else "all NPUs"
            yield Bound(sent / count / self._ports, f"bytes that {who} must send")
        if self._crossing:
            yield Bound(
                self._crossing / self._bisection(), "bytes of all-to-alls across the middle"
            )

    def _least_ns(self, node: Node, own_ns: int) -> float:
        """Return the nanoseconds that a node without communication needs.

        Under the roofline ASTRA-sim gives no time to FLOPs without bytes, which still need it.
        """
        roofline = self._system.roofline_enabled and not self._system.replay_only
        if node.kind == "compute" and roofline and not node.cpu:
            return max(own_ns, int(node.flops / (self._system.peak_perf * 1e3)))
        return own_ns

    def _collective(self, node: Node) -> tuple[float, float, float]:
        """Return the bytes that an NPU must send in a collective, that its members must send on
        average, and that an NPU must receive.
        """
        npus = self._network.npus
        chunk, chunks = split(
            node.collective, node.size, self._system.preferred_dataset_splits, npus
        )
        members = self._members(node)
        if members == 1:
            return 0.0, 0.0, 0.0
        # Bytes that a member has of every member, as ASTRA-sim rounds them.
        part = chunks * (chunk if node.collective == "all_gather" else chunk // members)
        others = part * (members - 1)
        if (
            node.collective == "all_to_all"
            and members == npus
            and max(self._network.shape) % 2 == 0
        ):
            # Across the longest dimension a quarter of all blocks crosses the middle in each
            # direction.
            self._crossing += part * members / 4
        return {
            "all_reduce": (part * members, 2 * others, part * members),
            "reduce_scatter": (others, others, part),
            "all_gather": (part, others, others),
            "all_to_all": (others, others, others),
        }[node.collective]

    def _members(self, node: Node) -> int:
        """Return the number of NPUs between which a collective moves bytes."""
        shape = self._network.shape
        if node.group:
            return len(self._groups[node.group])
        axes = logical_axes(self._system.algorithms(node.collective, len(shape)), shape)
        return math.prod(
            count for i, (count, _) in enumerate(axes) if node.dims is None or node.dims[i]
        )

    def _message_ns(self, source: int, destination: int, size: int) -> float:
        """Return the nanoseconds of a message on an idle network, rounded as ASTRA-sim does."""
        shape = self._network.shape
        latency, slowest = 0, math.inf
        for dim, (at, to) in enumerate(
            zip(coordinates(source, shape), coordinates(destination, shape), strict=True)
        ):
            if at != to:
                block = self._network.topology[dim]
                hops = (
                    ring_steps(at, to, shape[dim])[1]
                    if block == "Ring"
                    else 1 + (block == "Switch")
                )
                latency += hops * int(self._network.latency[dim])
                slowest = min(slowest, self._bytes_per_ns[dim])
        return latency + int(size / slowest)

    def _bisection(self) -> float:
        """Return the bytes per nanosecond that cross the middle of the longest dimension, in each
        direction.
        """
        shape = self._network.shape
        dim = max(range(len(shape)), key=lambda dim: shape[dim])
        count, block = shape[dim], self._network.topology[dim]
        links = {
            "Ring": min(2, count // 2),
            "Switch": count // 2,
            "FullyConnected": count * count // 4,
        }[block]
        return links * self._bytes_per_ns[dim] * self._network.npus / count


def _links(block: str, count: int) -> int:
    """Return the number of links out of an NPU in a dimension; a ring of two has one."""
    return {"Ring": min(2, count - 1), "Switch": 1, "FullyConnected": count - 1}[block]
