"""ASTRA-sim's workload layer: a graph of operators per NPU, and its run."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from interlace.errors import ConfigError
from interlace.sim.astra.bound import graph_bound
from interlace.sim.astra.config import COLLECTIVES, Network, System
from interlace.sim.astra.network import AwareNetwork, UnawareNetwork
from interlace.sim.astra.system import Mailbox, Npu
from interlace.sim.engine import Engine

Kind = Literal["compute", "collective", "send", "receive", "none"]

# Group of single sends and receives, whose tags must not match those of collectives.
_P2P_GROUP = -1


@dataclasses.dataclass(frozen=True)
class Node:
    """An operator of one NPU.

    Attributes:
        id: unique in the graph; ready nodes start in this order.
        deps: ids of the nodes that must end before.
        kind: ``"compute"``, ``"collective"``, ``"send"``, ``"receive"`` or ``"none"`` (takes no
            time).
        duration_us: microseconds of a compute node; 0 takes one nanosecond, as in ASTRA-sim.
        collective: kind of a collective node: ``all_reduce``, ``all_gather``,
            ``reduce_scatter`` or ``all_to_all``.
        size: bytes of a collective's buffer (of the shard for an all-gather), of a message, or of
            the tensors of a compute node.
        flops: FLOPs of a compute node, for the roofline.
        dims: for each dimension, whether a collective uses it; None is all.
        group: id of a communicator group; 0 is all NPUs.
        priority: priority of a collective under the ``EXPLICIT`` policy.
        peer, tag: peer and tag of a send or receive.
        cpu: whether the node runs on the host: one at a time, in parallel with the device.
    """

    id: int
    name: str
    deps: tuple[int, ...] = ()
    kind: Kind = "compute"
    duration_us: int = 0
    collective: str = ""
    size: int = 0
    flops: int = 0
    dims: tuple[bool, ...] | None = None
    group: int = 0
    priority: int = 0
    peer: int = -1
    tag: int = 0
    cpu: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcome of a run.

    Attributes:
        end_ns: end of each NPU in nanoseconds.
        exposed_ns: nanoseconds of each NPU without device computation.
        events: number of events that the engine called.
        sent_bytes: bytes that all NPUs sent.
        spans: per NPU, (node id, start, end) in order of ending.
        bound_ns: the largest physical bound of any NPU.
    """

    end_ns: list[int]
    exposed_ns: list[int]
    events: int
    sent_bytes: int
    spans: list[list[tuple[int, int, int]]]
    bound_ns: float

    @property
    def total_ns(self) -> int:
        return max(self.end_ns)

    @property
    def unphysical(self) -> bool:
        """True if the run lies under its bound.

        The congestion-unaware network lets messages share links for nothing.
        """
        return self.total_ns < self.bound_ns


class _Runner:
    """A run of one NPU's graph.

    At a time there is one device computation, one collective or send, and one host operator.
    """

    def __init__(self, npu: Npu, graph: Sequence[Node], groups: Mapping[int, list[int]]) -> None:
        self.npu, self.groups = npu, groups
        self.nodes = {node.id: node for node in graph}
        self.waits = {node.id: len(set(node.deps)) for node in graph}
        self.children: dict[int, list[int]] = {}
        for node in graph:
            for dep in set(node.deps):
                self.children.setdefault(dep, []).append(node.id)
        self.ready = sorted(node for node, count in self.waits.items() if count == 0)
        self.busy: set[str] = set()
        self.compute_ns = 0
        self.end_ns: int | None = None
        self.spans: list[tuple[int, int, int]] = []

    def start_ready(self) -> None:
        """Start every ready node whose unit is free, in the order of ids."""
        # A copy, because issuing a node of no time may call this method again.
        for ident in list(self.ready):
            node = self.nodes[ident]
            unit = self._unit(node)
            if unit is not None and unit in self.busy:
                continue
            self.ready.remove(ident)
            if unit is not None:
                self.busy.add(unit)
            self._issue(node, self.npu.engine.now)
        if not self.ready and not self.busy and len(self.spans) == len(self.nodes):
            self.end_ns = self.npu.engine.now

    @staticmethod
    def _unit(node: Node) -> str | None:
        if node.kind in ("receive", "none"):
            return None
        if node.cpu:
            return "cpu"
        return "compute" if node.kind == "compute" else "comm"

    def _issue(self, node: Node, start: int) -> None:
        npu = self.npu

        def done() -> None:
            self._finish(node, start)

        if node.kind == "compute":
            duration = self._duration(node)
            if not node.cpu:
                self.compute_ns += duration
            npu.after(duration, done)
        elif node.kind == "collective":
            group = (node.group, self.groups[node.group]) if node.group else None
            npu.collective(node.collective, node.size, node.dims, group, node.priority, done)
        elif node.kind == "send":
            npu.mailbox.send((_P2P_GROUP, node.tag), npu.id, node.peer, node.size, done)
        elif node.kind == "receive":
            npu.mailbox.receive((_P2P_GROUP, node.tag), node.peer, npu.id, node.size, done)
        else:
            npu.after(0, done)

    def _duration(self, node: Node) -> int:
        system = self.npu.system
        if system.roofline_enabled and not node.cpu:
            if node.size == 0:
                return 0
            # The roofline: FLOPs per byte times bytes per second, at most the peak.
            intensity = node.flops / node.size
            perf = min(system.local_mem_bw * 1e9 * intensity, system.peak_perf * 1e12)
            return int(node.flops / perf * 1e9) if node.flops else 0
        return node.duration_us * 1000 or 1

    def _finish(self, node: Node, start: int) -> None:
        unit = self._unit(node)
        if unit is not None:
            self.busy.discard(unit)
        self.spans.append((node.id, start, self.npu.engine.now))
        # Nodes become ready in the order of their ids, which is ASTRA-sim's order of issue.
        for child in self.children.get(node.id, ()):
            self.waits[child] -= 1
            if self.waits[child] == 0:
                bisect.insort(self.ready, child)
        self.start_ready()


def run(
    network: Network,
    system: System,
    graphs: Sequence[Sequence[Node]],
    *,
    congestion_aware: bool = True,
    groups: Mapping[int, list[int]] | None = None,
) -> Report:
    """Run one graph per NPU with ASTRA-sim's semantics.

    Args:
        network: the network.
        system: the system layer.
        graphs: one per NPU.
        congestion_aware: whether links are FIFOs; otherwise every message has the network to
            itself, which can undercut physics.
        groups: communicator groups, id -> members.

    Raises:
        ConfigError: the graphs or groups do not fit the network, or graphs have cycles, or wait for
            messages that are never sent.
    """
    if len(graphs) != network.npus:
        raise ConfigError(
            f"there must be one graph per NPU; got {len(graphs)} for {network.npus} NPUs. Change "
            "npus_count, or the graphs."
        )
    _check_groups(groups or {}, network.npus)
    for rank, graph in enumerate(graphs):
        location = f"the graph of NPU {rank}"
        check_graph(graph, location, network.npus, groups or {})
        for node in graph:
            if node.group and rank not in (groups or {})[node.group]:
                raise ConfigError(
                    f"{location}: node {node.id}'s communicator group must have NPU {rank} in it; "
                    f"group {node.group} has not. Add it, or remove the node."
                )
    for kind in sorted(
        {
            node.collective
            for graph in graphs
            for node in graph
            if node.kind == "collective" and not node.group
        }
    ):
        names = system.algorithms(kind, len(network.shape))
        if len(names) > len(network.shape):
            raise ConfigError(
                f"{kind.replace('_', '-')}-implementation must name at most one algorithm per "
                f"dimension; got {names} for {len(network.shape)} dimensions. Remove some."
            )
    engine = Engine()
    # The two networks differ in physics only; the layers above them are alike.
    make = AwareNetwork if congestion_aware else UnawareNetwork
    fabric = make(engine, list(network.topology), network.shape, network.bandwidth, network.latency)
    mailbox = Mailbox(engine, fabric)
    runners = [
        _Runner(Npu(rank, engine, mailbox, system, network.shape), graph, groups or {})
        for rank, graph in enumerate(graphs)
    ]
    for runner in runners:
        runner.start_ready()
    engine.run()
    # The engine ran out of events, so an NPU that has not ended never will.
    stuck = [rank for rank, runner in enumerate(runners) if runner.end_ns is None]
    if stuck:
        runner = runners[stuck[0]]
        done = {span[0] for span in runner.spans}
        waiting = next((node for node in runner.nodes.values() if node.id not in done), None)
        raise ConfigError(
            f"every node must end; NPU {stuck[0]} (of {len(stuck)}) still waits in node "
            f"{waiting.id if waiting else '?'} ({waiting.name if waiting else '?'}). Give all NPUs "
            "the same collectives in the same order, and every receive a send of its size and tag."
        )
    ends = [runner.end_ns or 0 for runner in runners]
    exposed = [end - runner.compute_ns for end, runner in zip(ends, runners, strict=True)]
    # NPUs often share one graph, whose bound is computed once.
    bounds = {id(graph): graph for graph in graphs}
    bound = (
        0.0
        if system.roofline_enabled
        else max(graph_bound(network, graph) for graph in bounds.values())
    )
    return Report(
        ends, exposed, engine.events, fabric.sent_bytes, [runner.spans for runner in runners], bound
    )


def _check_groups(groups: Mapping[int, list[int]], npus: int) -> None:
    """Refuse groups whose members are no NPUs of the network, or not all different."""
    for number, members in groups.items():
        if len(set(members)) != len(members) or not all(0 <= npu < npus for npu in members):
            raise ConfigError(
                f"communicator group {number} must have different NPUs below {npus}; got "
                f"{members[:8]}."
            )


def check_graph(
    graph: Sequence[Node], location: str, npus: int, groups: Mapping[int, list[int]]
) -> None:
    """Refuse duplicate ids, missing or cyclic dependencies, and collectives, groups and peers that
    do not exist.

    Raises:
        ConfigError: the graph cannot be run; the message names the node and the fix.
    """
    nodes: dict[int, Node] = {}
    for node in graph:
        if node.id in nodes:
            raise ConfigError(
                f"{location}: node ids must differ; got {node.id} twice. Renumber one."
            )
        nodes[node.id] = node
        if node.kind == "collective" and node.collective not in COLLECTIVES:
            raise ConfigError(
                f"{location}: node {node.id}'s collective must be one of {', '.join(COLLECTIVES)}; "
                f"got {node.collective!r}."
            )
        if node.kind in ("collective", "send", "receive") and node.size <= 0:
            raise ConfigError(
                f"{location}: node {node.id} must move bytes; got {node.size}. Set its comm_size."
            )
        if node.kind in ("send", "receive") and not 0 <= node.peer < npus:
            raise ConfigError(
                f"{location}: node {node.id}'s peer must be an NPU below {npus}; got {node.peer}."
            )
        if node.group and node.group not in groups:
            raise ConfigError(
                f"{location}: node {node.id}'s communicator group must be defined; got "
                f"{node.group}. Define it."
            )
    left = {}
    children: dict[int, list[int]] = {}
    for node in graph:
        for dep in node.deps:
            if dep not in nodes:
                raise ConfigError(
                    f"{location}: node {node.id} must depend on nodes of the graph; got {dep}. The "
                    "graph is cut short, or the id is wrong."
                )
            children.setdefault(dep, []).append(node.id)
        left[node.id] = len(node.deps)
    # Kahn's algorithm: nodes that never become free are on a cycle, or after one.
    free = [ident for ident, count in left.items() if count == 0]
    while free:
        for child in children.get(free.pop(), ()):
            left[child] -= 1
            if left[child] == 0:
                free.append(child)
    cycle = sorted(ident for ident, count in left.items() if count > 0)
    if cycle:
        raise ConfigError(
            f"{location}: dependencies must not form a cycle; nodes "
            f"{', '.join(map(str, cycle[:6]))} do. Remove one of their dependencies."
        )
