"""ASTRA-sim's two analytical networks, with ASTRA-sim's rounding.

``bandwidth`` is per link and direction, in units of 2**30 bytes per 10**9 ns; ``latency`` is per
hop, in nanoseconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from interlace.units import GIB
from interlace_sim.engine import Engine
from interlace_sim.symmetry import coordinates


def ring_steps(source: int, destination: int, count: int) -> tuple[int, int]:
    """Return direction (+1 or -1) and hops of the shorter way around a ring; ties go clockwise."""
    clockwise = (destination - source) % count
    return (-1, count - clockwise) if count - clockwise < clockwise else (1, clockwise)


class Network:
    """A network of blocks, one per dimension.

    Args:
        engine: The clock.
        blocks: ``"Ring"``, ``"FullyConnected"`` or ``"Switch"`` of each dimension.
        shape: NPUs along each dimension.
        bandwidth: Of each dimension, per link and direction, in 2**30 bytes per second.
        latency: Nanoseconds per hop of each dimension.

    Attributes:
        sent_bytes: Bytes that all NPUs sent.
        messages: Number of messages that each NPU sent.
    """

    def __init__(
        self,
        engine: Engine,
        blocks: list[str],
        shape: tuple[int, ...],
        bandwidth: list[float],
        latency: list[float],
    ) -> None:
        self.engine = engine
        self.blocks, self.shape, self.latency = blocks, shape, latency
        self.bytes_per_ns = [value * GIB / 1e9 for value in bandwidth]
        self.sent_bytes = 0
        self.messages = [0] * math.prod(shape)


class UnawareNetwork(Network):
    """A network that every message has to itself: ``floor(hops * latency + bytes / bandwidth)``.

    A message that differs in several dimensions is charged for the first of them only. Both are
    ASTRA-sim's rules; neither is physical.
    """

    def send(self, source: int, destination: int, size: int, arrived: Callable[[], None]) -> None:
        """Call ``arrived()`` when ``size`` bytes are there."""
        self.sent_bytes += size
        self.messages[source] += 1
        at, target = coordinates(source, self.shape), coordinates(destination, self.shape)
        # Coordinates differ in at least one dimension, since a message to oneself is refused.
        dim = next(i for i in range(len(at)) if at[i] != target[i])
        hops = {
            "Ring": ring_steps(at[dim], target[dim], self.shape[dim])[1],
            "FullyConnected": 1,
            "Switch": 2,
        }[self.blocks[dim]]
        self.engine.after(int(hops * self.latency[dim] + size / self.bytes_per_ns[dim]), arrived)


@dataclasses.dataclass(slots=True, eq=False)
class _Link:
    """One direction of a link, which sends one message at a time; later ones wait in order."""

    engine: Engine
    bytes_per_ns: float
    latency: float
    busy: bool = False
    waiting: deque[_Message] = dataclasses.field(default_factory=deque)

    def send(self, message: _Message) -> None:
        if self.busy:
            self.waiting.append(message)
        else:
            self._start(message)

    def _start(self, message: _Message) -> None:
        self.busy = True
        serialization = message.size / self.bytes_per_ns
        # Truncated separately, as ASTRA-sim does, so that results match it to the nanosecond.
        self.engine.after(int(self.latency + serialization), message.arrive)
        self.engine.after(int(serialization), self._free)

    def _free(self) -> None:
        self.busy = False
        if self.waiting:
            self._start(self.waiting.popleft())


@dataclasses.dataclass(slots=True, eq=False)
class _Message:
    """Bytes on their way, which are stored completely at every hop before they go on."""

    size: int
    route: list[_Link]
    arrived: Callable[[], None]
    hop: int = 0

    def arrive(self) -> None:
        self.hop += 1
        if self.hop == len(self.route):
            self.arrived()
        else:
            self.route[self.hop].send(self)


class AwareNetwork(Network):
    """A network whose links are FIFOs.

    Tori are crossed dimension by dimension; a ring is crossed the shorter way, ties clockwise.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._links: dict[tuple[int, ...], _Link] = {}
        self._routes: dict[tuple[int, int], list[_Link]] = {}

    def send(self, source: int, destination: int, size: int, arrived: Callable[[], None]) -> None:
        """Call ``arrived()`` when the last byte of ``size`` is there."""
        self.sent_bytes += size
        self.messages[source] += 1
        route = self._routes.get((source, destination))
        if route is None:
            route = self._routes[source, destination] = self._find(source, destination)
        # Links queue messages, so a message needs its own position on the shared route.
        route[0].send(_Message(size, route, arrived))

    def _find(self, source: int, destination: int) -> list[_Link]:
        at, target = list(coordinates(source, self.shape)), coordinates(destination, self.shape)
        route = []
        for dim, count in enumerate(self.shape):
            if at[dim] == target[dim]:
                continue
            # The other dimensions' coordinates tell this dimension's rings and switches apart.
            group = (*at[:dim], -1, *at[dim + 1 :])
            if self.blocks[dim] == "Ring":
                step, hops = ring_steps(at[dim], target[dim], count)
                nodes = [(at[dim] + step * hop) % count for hop in range(hops + 1)]
            # The switch is a node of its own, numbered after the NPUs of the dimension.
            elif self.blocks[dim] == "Switch":
                nodes = [at[dim], count, target[dim]]
            else:
                nodes = [at[dim], target[dim]]
            route += [self._link(dim, *group, a, b) for a, b in itertools.pairwise(nodes)]
            at[dim] = target[dim]
        return route

    def _link(self, dim: int, *key: int) -> _Link:
        link = self._links.get((dim, *key))
        if link is None:
            link = self._links[dim, *key] = _Link(
                self.engine, self.bytes_per_ns[dim], self.latency[dim]
            )
        return link
