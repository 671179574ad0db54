"""ASTRA-sim's workload layer: the run of a graph of operators per NPU."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

from interlace.errors import ConfigError
from interlace_sim.astra.bound import run_bound
from interlace_sim.astra.config import COLLECTIVES, Network, System
from interlace_sim.astra.graph import Groups, Node, all_groups, check_graph, duration_ns
from interlace_sim.astra.network import AwareNetwork, UnawareNetwork
from interlace_sim.astra.system import Mailbox, Npu, logical_axes, split
from interlace_sim.engine import Engine

# Group of single sends and receives, whose tags must not match those of collectives.
_P2P_GROUP = -1

_MOST_MESSAGES = 2 * 10**7
"""Messages of a run; a million of them takes some 20 s, and they fit into memory."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcome of a run.

    Attributes:
        end_ns: End of each NPU in nanoseconds.
        exposed_ns: Nanoseconds of each NPU without device computation.
        events: Number of events that the engine called.
        sent_bytes: Bytes that all NPUs sent.
        spans: Per NPU, (node id, start, end) in order of ending.
        bound_ns: The physical bound, see :mod:`interlace_sim.astra.bound`.
        bound_reason: What needs that time.
        rounding_ns: Nanoseconds by which ASTRA-sim's rounding may undercut the bound: less than one
            for each message of an NPU.
        warnings: Sentences about inputs that ASTRA-sim takes in another way than one may expect.
    """

    end_ns: list[int]
    exposed_ns: list[int]
    events: int
    sent_bytes: int
    spans: list[list[tuple[int, int, int]]]
    bound_ns: float
    bound_reason: str
    rounding_ns: int
    warnings: tuple[str, ...]

    @property
    def total_ns(self) -> int:
        return max(self.end_ns)

    @property
    def unphysical(self) -> bool:
        """True if the run lies under its bound.

        The congestion-unaware network lets messages share links for nothing.
        """
        return self.total_ns + self.rounding_ns < self.bound_ns


class _Runner:
    """A run of one NPU's graph.

    At a time there is one device computation, one collective or send, and one host operator.
    """

    def __init__(self, npu: Npu, graph: Sequence[Node], groups: Groups) -> None:
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

    def _unit(self, node: Node) -> str | None:
        # Nodes of no time occupy a unit only where they are replayed, and do take time.
        if node.kind == "receive" or (node.kind == "none" and not self.npu.system.replay_only):
            return None
        if node.cpu:
            return "cpu"
        return "compute" if node.kind == "compute" else "comm"

    def _issue(self, node: Node, start: int) -> None:
        npu = self.npu

        def done() -> None:
            self._finish(node, start)

        duration = duration_ns(node, npu.system)
        if duration is not None:
            if node.kind == "compute" and not node.cpu:
                self.compute_ns += duration
            npu.after(duration, done)
        elif node.kind == "collective":
            group = (node.group, list(self.groups[node.group])) if node.group else None
            try:
                npu.collective(node.collective, node.size, node.dims, group, node.priority, done)
            except ConfigError as error:
                raise ConfigError(
                    f"the graph of NPU {npu.id}: node {node.id} ({node.name}): {error}"
                ) from error
        elif node.kind == "send":
            npu.mailbox.send((_P2P_GROUP, node.tag), npu.id, node.peer, node.size, done)
        elif node.kind == "receive":
            npu.mailbox.receive((_P2P_GROUP, node.tag), node.peer, npu.id, node.size, done)
        else:
            npu.after(0, done)

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
    groups: Groups | None = None,
) -> Report:
    """Run one graph per NPU with ASTRA-sim's semantics.

    Args:
        network: The network.
        system: The system layer.
        graphs: One per NPU.
        congestion_aware: Whether links are FIFOs; otherwise every message has the network to
            itself, which can undercut physics.
        groups: Communicator groups, id -> members, beside those that the graphs define.

    Raises:
        ConfigError: the graphs or groups do not fit the network, or graphs have cycles, or wait for
            messages that are never sent; or the run has more messages than fit into memory.
    """
    if len(graphs) != network.npus:
        raise ConfigError(
            f"there must be one graph per NPU; got {len(graphs)} for {network.npus} NPUs. Change "
            "npus_count, or the graphs."
        )
    members = all_groups(graphs, groups or {}, network.npus)
    orders = []
    for rank, graph in enumerate(graphs):
        location = f"the graph of NPU {rank}"
        orders.append(
            check_graph(
                graph,
                location,
                network.npus,
                members,
                rank=rank,
                replay_only=system.replay_only,
            )
        )
        _check_dimensions(graph, location, network, system)
    warnings = _check_algorithms(network, system, graphs)
    _check_messages(network, system, graphs, members)
    engine = Engine()
    # The two networks differ in physics only; the layers above them are alike.
    make = AwareNetwork if congestion_aware else UnawareNetwork
    fabric = make(engine, list(network.topology), network.shape, network.bandwidth, network.latency)
    mailbox = Mailbox(engine, fabric)
    runners = [
        _Runner(Npu(rank, engine, mailbox, system, network.shape), graph, members)
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
    bound = run_bound(network, system, graphs, orders, members)
    return Report(
        ends,
        exposed,
        engine.events,
        fabric.sent_bytes,
        [runner.spans for runner in runners],
        bound.time_ns,
        bound.reason,
        max(fabric.messages),
        warnings,
    )


def _collectives(graph: Sequence[Node]) -> list[Node]:
    """List the collectives of a graph that move bytes."""
    return [n for n in graph if n.kind == "collective" and n.collective in COLLECTIVES]


def _check_dimensions(
    graph: Sequence[Node], location: str, network: Network, system: System
) -> None:
    """Refuse collectives that do not say for every dimension whether they use it."""
    for node in [] if system.replay_only else _collectives(graph):
        names = system.algorithms(node.collective, len(network.shape))
        axes = logical_axes(names, network.shape)
        if node.dims is not None and len(node.dims) < len(axes):
            raise ConfigError(
                f"{location}: node {node.id} ({node.name})'s involved_dim must be said for all "
                f"{len(axes)} dimensions; got {list(node.dims)}. Add the others."
            )


def _check_algorithms(
    network: Network, system: System, graphs: Sequence[Sequence[Node]]
) -> tuple[str, ...]:
    """Refuse more algorithms than dimensions; return a warning for fewer."""
    kinds = {
        node.collective
        for graph in {id(graph): graph for graph in graphs}.values()
        for node in _collectives(graph)
    }
    dimensions = len(network.shape)
    warnings = []
    for kind in sorted(kinds) if not system.replay_only else ():
        names = system.algorithms(kind, dimensions)
        key = f"{kind.replace('_', '-')}-implementation"
        if len(names) > dimensions:
            raise ConfigError(
                f"{key} must name at most one algorithm per "
                f"dimension; got {names} for {dimensions} dimensions. Remove some."
            )
        idle = math.prod(network.shape[len(names) :])
        if not names[0].startswith("one") and idle > 1:
            warnings.append(
                f"{key} names {len(names)} of {dimensions} dimensions. As in ASTRA-sim the others "
                f"take no part: the NPUs of all collectives without a group are in {idle} parts "
                "that never meet."
            )
    return tuple(warnings)


def _check_messages(
    network: Network, system: System, graphs: Sequence[Sequence[Node]], groups: Groups
) -> None:
    """Refuse a run that would not end in any reasonable time."""
    counts: dict[int, int] = {}
    total = 0
    for graph in graphs:
        # NPUs often share one graph, which is counted once.
        if id(graph) not in counts:
            counts[id(graph)] = sum(_messages(node, network, system, groups) for node in graph)
        total += counts[id(graph)]
    if total > _MOST_MESSAGES and not system.replay_only:
        raise ConfigError(
            f"a run must have at most {_MOST_MESSAGES:,} messages; it would have some {total:.2g}. "
            "Take fewer NPUs, fewer preferred-dataset-splits or fewer collectives."
        )


def _messages(node: Node, network: Network, system: System, groups: Groups) -> int:
    """Return about how many messages an NPU sends in a node."""
    if node.kind != "collective" or node.collective not in COLLECTIVES:
        return int(node.kind == "send")
    kind = node.collective
    chunks = split(kind, node.size, system.preferred_dataset_splits, network.npus)[1]
    names = system.algorithms(kind, len(network.shape))
    counts = [count for count, _ in logical_axes(names, network.shape)]
    if node.group and len(groups[node.group]) < network.npus:
        names, counts = names[:1], [len(groups[node.group])]
    # A relayed all-to-all sends every block on hop by hop.
    return chunks * sum(
        count * (count - 1) // 2
        if kind == "all_to_all" and name.lower().endswith("ring")
        else 2 * (count - 1)
        for name, count in zip(names, counts, strict=False)
    )
