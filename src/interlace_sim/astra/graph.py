"""A workload as ASTRA-sim sees it: a graph of operators for each NPU, and its rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from interlace.errors import ConfigError
from interlace_sim.astra.config import COLLECTIVES, System

Kind = Literal["compute", "collective", "send", "receive", "none"]

Groups = Mapping[int, Sequence[int]]
"""Communicator groups: id -> members."""

_MOST = 2**60
"""Largest number of bytes, FLOPs or microseconds of a node; times of larger ones are not exact."""


@dataclasses.dataclass(frozen=True)
class Node:
    """An operator of one NPU.

    Attributes:
        id: Unique in the graph; ready nodes start in this order.
        deps: Ids of the nodes that must end before.
        kind: ``"compute"``, ``"collective"``, ``"send"``, ``"receive"`` or ``"none"`` (takes no
            time).
        duration_us: Microseconds of a compute node or a broadcast, and under ``replay-only`` of
            every node; 0 takes one nanosecond, as in ASTRA-sim.
        collective: Kind of a collective node: ``all_reduce``, ``all_gather``,
            ``reduce_scatter`` or ``all_to_all``; or ``broadcast``, which is not modelled, but takes
            ``duration_us`` on each NPU, as in ASTRA-sim.
        size: Bytes of a collective's buffer (of the shard for an all-gather), of a message, or of
            the tensors of a compute node.
        flops: FLOPs of a compute node, for the roofline.
        dims: For each dimension, whether a collective uses it; None is all.
        group: Id of a communicator group; 0 is all NPUs.
        priority: Priority of a collective under the ``EXPLICIT`` policy.
        peer, tag: Peer and tag of a send or receive.
        cpu: Whether the node runs on the host: one at a time, in parallel with the device.
        defines: Communicator groups, as pairs of id and members; no members are all NPUs. PyTorch's
            traces have them in a node of metadata.
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
    defines: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def replayed_ns(self) -> int:
        """Nanoseconds of a node that takes its own duration."""
        return self.duration_us * 1000 or 1


def duration_ns(node: Node, system: System) -> int | None:
    """Return the nanoseconds of a node by itself; None if they depend on the network."""
    if system.replay_only:
        return node.replayed_ns
    if node.kind == "compute":
        if not system.roofline_enabled or node.cpu:
            return node.replayed_ns
        if node.size == 0 or node.flops == 0:
            return 0
        # The roofline: FLOPs per byte times bytes per second, at most the peak.
        intensity = node.flops / node.size
        perf = min(system.local_mem_bw * 1e9 * intensity, system.peak_perf * 1e12)
        return int(node.flops / perf * 1e9)
    return node.replayed_ns if node.collective == "broadcast" else None


def all_groups(graphs: Sequence[Sequence[Node]], groups: Groups, npus: int) -> dict[int, list[int]]:
    """Return the communicator groups of a file, and those that the graphs define.

    Raises:
        ConfigError: members are no NPUs, or not all different; an id is not above 0, or is that of
            different groups.
    """
    found = {number: list(members) for number, members in groups.items()}
    for number in found:
        if number < 1:
            raise ConfigError(
                f"a communicator group's id must be above 0, which is all NPUs; got {number}. "
                "Number it anew."
            )
    # NPUs often share one graph, which is read once.
    different = {id(graph): (rank, graph) for rank, graph in reversed([*enumerate(graphs)])}
    for rank, graph in different.values():
        for node in graph:
            for number, given in node.defines:
                members = list(given or range(npus))
                known = list(range(npus)) if number == 0 else found.setdefault(number, members)
                if sorted(known) != sorted(members):
                    raise ConfigError(
                        f"the graph of NPU {rank}: node {node.id} ({node.name}) must define "
                        f"communicator group {number} as it is elsewhere, with NPUs "
                        f"{_some(known)}; got {_some(members)}. Give all NPUs the same groups, of "
                        "this network's NPUs."
                    )
    for number, members in found.items():
        if len(set(members)) != len(members) or not all(0 <= npu < npus for npu in members):
            raise ConfigError(
                f"communicator group {number} must have different NPUs below {npus}; got "
                f"{members[:8]}."
            )
    return found


def _some(members: Sequence[int]) -> str:
    return f"{', '.join(map(str, members[:8]))}{', ...' if len(members) > 8 else ''}"


def check_graph(
    graph: Sequence[Node],
    location: str,
    npus: int,
    groups: Groups,
    *,
    rank: int | None = None,
    replay_only: bool = False,
) -> list[int]:
    """Return the ids of a graph's nodes in an order in which every node follows its dependencies.

    Args:
        graph: The nodes.
        location: The graph's name, for errors.
        npus: Number of NPUs.
        groups: Communicator groups.
        rank: The NPU whose graph it is; None for a graph that several have.
        replay_only: Nodes only take their durations, so their communication is not checked.

    Raises:
        ConfigError: ids are given twice; dependencies are missing or form a cycle; numbers are
            negative or huge; collectives, groups or peers do not exist. The message names the node
            and the fix.
    """
    nodes: dict[int, Node] = {}
    for node in graph:
        if node.id in nodes:
            raise ConfigError(
                f"{location}: node ids must differ; got {node.id} twice. Renumber one."
            )
        nodes[node.id] = node
        for name, value in (
            ("duration", node.duration_us),
            ("FLOPs", node.flops),
            ("bytes", node.size),
        ):
            if not 0 <= value <= _MOST:
                rule = "not be negative" if value < 0 else "be at most 2^60"
                raise ConfigError(
                    f"{location}: node {node.id}'s {name} must {rule}; got {value}. Correct it."
                )
        if not replay_only:
            _check_communication(node, f"{location}: node {node.id}", npus, groups, rank)
    return _order(nodes, location)


def _check_communication(
    node: Node, location: str, npus: int, groups: Groups, rank: int | None
) -> None:
    """Refuse collectives, sends and receives that cannot run."""
    moves = node.kind in ("send", "receive")
    if node.kind == "collective":
        moves = node.collective in COLLECTIVES
        if not moves and not (node.collective == "broadcast" and node.duration_us):
            raise ConfigError(
                f"{location}'s collective must be one of {', '.join(COLLECTIVES)}, or a broadcast "
                f"with a duration, which is replayed; got {node.collective!r}."
            )
    if moves and node.size <= 0:
        raise ConfigError(f"{location} must move bytes; got {node.size}. Set its comm_size.")
    if node.kind in ("send", "receive"):
        if not 0 <= node.peer < npus:
            raise ConfigError(f"{location}'s peer must be an NPU below {npus}; got {node.peer}.")
        if node.kind == "send" and node.peer == rank:
            raise ConfigError(
                f"{location}'s peer must be another NPU; got its own, {rank}. Correct its "
                "comm_dst, or remove the node and its receive."
            )
    if node.group:
        if node.group not in groups:
            raise ConfigError(
                f"{location}'s communicator group must be defined; got {node.group}. Define it."
            )
        if rank is not None and rank not in groups[node.group]:
            raise ConfigError(
                f"{location}'s communicator group must have NPU {rank} in it; "
                f"group {node.group} has not. Add it, or remove the node."
            )
        if node.dims is not None and not all(node.dims):
            raise ConfigError(
                f"{location} must have a communicator group or involved_dim; got both. ASTRA-sim "
                "lets a group use all dimensions; remove one of them."
            )


def _order(nodes: Mapping[int, Node], location: str) -> list[int]:
    """Sort nodes by their dependencies."""
    left = {}
    children: dict[int, list[int]] = {}
    for node in nodes.values():
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
    order = []
    while free:
        order.append(free.pop())
        for child in children.get(order[-1], ()):
            left[child] -= 1
            if left[child] == 0:
                free.append(child)
    cycle = sorted(ident for ident, count in left.items() if count > 0)
    if cycle:
        raise ConfigError(
            f"{location}: dependencies must not form a cycle; nodes "
            f"{', '.join(map(str, cycle[:6]))} do. Remove one of their dependencies."
        )
    return order
