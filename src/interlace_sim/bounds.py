"""Physical lower bounds that no schedule, algorithm or overlap can undercut on the hardware.

They are computed from the workload and the machine alone, not from the simulation, and every run is
held against them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

from interlace_sim.collectives import Group, least_sent_bytes
from interlace_sim.errors import UnphysicalError
from interlace_sim.machine import Machine
from interlace_sim.topology import Hierarchical, Topology
from interlace_sim.work import COMPUTE, Collective, Consuming, Fused, HostCopy, Kernel, Task, Work

LATENCY = "latency"


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound: no result is below ``time_ns`` nanoseconds, because of ``reason``."""

    time_ns: float
    reason: str

    def check(self, total_ns: float, name: str) -> None:
        """Refuse a result that is faster than physics.

        Args:
            total_ns: The result's time in nanoseconds.
            name: The result's name, for the message.

        Raises:
            UnphysicalError: ``total_ns`` is below the bound.
        """
        # Both times are sums of rounded floats, so a result may undercut its bound by their last
        # bits.
        if total_ns < self.time_ns * (1 - 1e-9):
            raise UnphysicalError(
                f"{name} must not be faster than physics; got {total_ns:.0f} ns, where "
                f"{self.reason} alone needs {self.time_ns:.0f} ns. Do not use the result; report "
                "it, unless the mode is known to be unphysical."
            )


def largest(bounds: Iterable[Bound]) -> Bound:
    """Return the bound that binds; without any bound, 0 ns."""
    return max(bounds, key=lambda bound: bound.time_ns, default=Bound(0.0, "nothing"))


def collective_bounds(kind: str, size: float, group: Group) -> list[Bound]:
    """List the least time of each resource: the ports of a rank, the ports of a node, the
    bisection, all links together, and the latency.
    """
    topology = group.topology
    sent = least_sent_bytes(kind, size, group.size)
    bounds = [
        Bound(1e9 * sent / topology.injection_bytes_per_s(), "leaving the rank"),
        Bound(float(_latency_ns(topology, group.axes, farthest=kind == "all_to_all")), LATENCY),
    ]
    everyone = group.size == topology.ranks
    if everyone and isinstance(topology, Hierarchical) and topology.nodes > 1:
        inside = topology.inner.ranks
        if kind == "all_to_all":
            leaving = sent * (group.size - inside) / (group.size - 1)
        else:
            # A node can reduce or spread inside, so only one copy per node must cross its ports.
            leaving = least_sent_bytes(kind, size, topology.nodes) / inside
        bounds.append(Bound(1e9 * leaving / topology.network_bytes_per_s(), "leaving the node"))
    if everyone:
        half = group.size // 2
        # Blocks that cross from one half to the other, each the size of the buffer over the ranks.
        pairs = half * (group.size - half) / group.size
        crossing = size * {"all_to_all": pairs, "all_reduce": 1.0}.get(kind, half / group.size)
        bounds.append(Bound(1e9 * crossing / topology.bisection_bytes_per_s(), "the bisection"))
    if kind == "all_to_all":
        bounds.append(
            Bound(size / group.size * _hop_ns_per_byte(topology, group.axes), "all links together")
        )
    return bounds


@functools.lru_cache(maxsize=64)
def _latency_ns(topology: Topology, axes: tuple[int, ...], *, farthest: bool) -> int:
    group = Group(topology, axes)
    values = [
        topology.path_latency_ns(0, group.displacement(index)) for index in range(1, group.size)
    ]
    return max(values) if farthest else min(values)


@functools.lru_cache(maxsize=64)
def _hop_ns_per_byte(topology: Topology, axes: tuple[int, ...]) -> float:
    """Return the nanoseconds that all links, perfectly shared, need for a byte to every member."""
    group = Group(topology, axes)
    hops = 0.0
    used: set[int] = set()
    for member in range(1, group.size):
        # A tie that is split takes links in both directions, and may be the only way back.
        paths = topology.paths(0, group.displacement(member))
        hops += sum(len(path) for path in paths) / len(paths)
        used.update(index for path in paths for index, _ in path)
    capacity = (
        sum(topology.classes[index].bytes_per_s * topology.classes[index].count for index in used)
        / topology.ranks
    )
    return 1e9 * hops / capacity


def step_bound(machine: Machine, topology: Topology, tasks: Sequence[Task]) -> Bound:
    """Return the physical bound of a step.

    It is the larger of the time that each resource needs for all tasks, and of the longest chain of
    tasks, each at its own bound.
    """
    gpu = machine.gpu
    resources: collections.defaultdict[str, float] = collections.defaultdict(float)
    ends: dict[str, float] = {}
    rows: dict[str, float] = {}
    for task in tasks:
        work = task.work
        floor = 0.0
        if isinstance(work, Collective | Fused | Consuming) and not sent_before(work):
            group = Group(topology, work.axes)
            gathered = work.gather_size if isinstance(work, Fused) else None
            size = work.size if gathered is None else min(work.size, gathered)
            bounds = collective_bounds(work.kind, size, group) if group.size > 1 and size else []
            floor = largest(bounds).time_ns
            # Latencies overlap, and groups of some ranks may use different links, so neither adds
            # up over tasks.
            if group.size == topology.ranks:
                for bound in bounds:
                    if bound.reason != LATENCY:
                        resources[bound.reason] += bound.time_ns
        if isinstance(work, HostCopy):
            floor = 1e9 * work.size / gpu.host_link_bytes_per_s.value
        kernel = work if isinstance(work, Kernel) else getattr(work, "kernel", None)
        if kernel is not None:
            alone = (
                float(kernel.given_ns)
                if kernel.given_ns is not None
                else gpu.floor_ns(kernel.flops, kernel.memory_bytes)
            )
            resources[COMPUTE] += alone
            # A kernel that does not wait for its slices bounds the chain by its computation alone;
            # the task that consumes the slices has their time.
            waits = not isinstance(work, Fused) or work.waits
            floor = max(alone, floor if waits else 0.0)
        start = max([rows.get(task.row, 0.0), *(ends[dep] for dep in task.deps)])
        ends[task.name] = rows[task.row] = start + floor
    longest = Bound(max(ends.values(), default=0.0), "the longest chain of tasks")
    return largest([*(Bound(time, reason) for reason, time in resources.items()), longest])


def sent_before(work: Work) -> bool:
    """Tell whether another task sent this one's input, and counts for the traffic."""
    return isinstance(work, Consuming) and work.sent_by is not None
