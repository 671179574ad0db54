"""Physical lower bounds: what no schedule, algorithm or overlap can undercut on this hardware.

They are computed from the workload and the machine alone, not from the simulation, and every run is
held against them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from interlace.errors import UnphysicalError
from interlace.sim.collectives import Group, least_sent_bytes
from interlace.sim.topology import Hierarchical, Topology

LATENCY = "latency"


@dataclasses.dataclass(frozen=True)
class Bound:
    """No result is below ``time_ns``, because of ``reason``."""

    time_ns: float
    reason: str

    def check(self, total_ns: float, what: str) -> None:
        """Raises:
        UnphysicalError: ``total_ns`` is below the bound.
        """
        if total_ns < self.time_ns * (1 - 1e-9):
            raise UnphysicalError(
                f"{what} must not be faster than physics; got {total_ns:.0f} ns, where "
                f"{self.reason} alone needs "
                f"{self.time_ns:.0f} ns. "
                f"Do not use the result; report it, unless the mode is known to be unphysical."
            )


def largest(bounds: Iterable[Bound]) -> Bound:
    """The one that binds; no bound at all is 0 ns."""
    return max(bounds, key=lambda bound: bound.time_ns, default=Bound(0.0, "nothing"))


def collective_bound(kind: str, size: float, group: Group) -> Bound:
    """The least time of a collective of ``size`` bytes a rank on an idle network."""
    if group.size == 1 or size == 0:
        return Bound(0.0, "nothing")
    return largest(collective_bounds(kind, size, group))


def collective_bounds(kind: str, size: float, group: Group) -> list[Bound]:
    """What each resource needs at least: the ports of a rank, those of a node, the bisection, all
    links, the latency.
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
        else:  # a node can reduce or spread inside
            leaving = least_sent_bytes(kind, size, topology.nodes) / inside
        bounds.append(Bound(1e9 * leaving / topology.network_bytes_per_s(), "leaving the node"))
    if everyone:
        half = group.size // 2
        # Of blocks from one half to the other, in blocks of the buffer
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
        topology.path_latency_ns(0, group.displacement(place)) for place in range(1, group.size)
    ]
    return max(values) if farthest else min(values)


@functools.lru_cache(maxsize=64)
def _hop_ns_per_byte(topology: Topology, axes: tuple[int, ...]) -> float:
    """For a byte to every member: the time that all links, perfectly shared, need for it."""
    group = Group(topology, axes)
    hops = sum(len(topology.path(0, group.displacement(place))) for place in range(1, group.size))
    used = {
        index
        for place in range(1, group.size)
        for index, _ in topology.path(0, group.displacement(place))
    }
    capacity = (
        sum(topology.classes[index].bytes_per_s * topology.classes[index].count for index in used)
        / topology.ranks
    )
    return 1e9 * hops / capacity
