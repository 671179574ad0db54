"""ASTRA-sim's two analytical networks, with its rounding.

Its ``bandwidth`` is per link and direction in units of 2**30 bytes per 10**9 ns, its ``latency`` is
per hop.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from interlace.sim.engine import Engine
from interlace.units import GIB

BLOCKS = ("Ring", "FullyConnected", "Switch")


def coordinates(npu: int, shape: tuple[int, ...]) -> list[int]:
    """``npu`` as one index per dimension; the first dimension varies fastest."""
    out = []
    for count in shape:
        out.append(npu % count)
        npu //= count
    return out


def ring_steps(source: int, destination: int, count: int) -> tuple[int, int]:
    """Direction (+1 or -1) and hops of the shorter way around a ring; ties go clockwise."""
    clockwise = (destination - source) % count
    return (-1, count - clockwise) if count - clockwise < clockwise else (1, clockwise)


class UnawareNetwork:
    """Every message has the network to itself: ``floor(hops * latency + bytes / bandwidth)``.

    Of a message that differs in several dimensions only the first is charged. Both are ASTRA-sim's;
    neither is physical.
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

    def send(self, source: int, destination: int, size: int, arrived: Callable[[], None]) -> None:
        """Call ``arrived()`` when ``size`` bytes are there."""
        self.sent_bytes += size
        here, there = coordinates(source, self.shape), coordinates(destination, self.shape)
        dim = next(i for i in range(len(here)) if here[i] != there[i])
        hops = {
            "Ring": ring_steps(here[dim], there[dim], self.shape[dim])[1],
            "FullyConnected": 1,
            "Switch": 2,
        }[self.blocks[dim]]
        self.engine.after(int(hops * self.latency[dim] + size / self.bytes_per_ns[dim]), arrived)


class _Link:
    """One direction of a link: sends one message at a time, the others wait in order."""

    __slots__ = ("busy", "bytes_per_ns", "engine", "latency", "waiting")

    def __init__(self, engine: Engine, bytes_per_ns: float, latency: float) -> None:
        self.engine = engine
        self.bytes_per_ns, self.latency = bytes_per_ns, latency
        self.busy = False
        self.waiting: deque[_Message] = deque()

    def send(self, message: _Message) -> None:
        if self.busy:
            self.waiting.append(message)
        else:
            self._start(message)

    def _start(self, message: _Message) -> None:
        self.busy = True
        serialization = message.size / self.bytes_per_ns
        self.engine.after(int(self.latency + serialization), message.arrive)
        self.engine.after(int(serialization), self._free)

    def _free(self) -> None:
        self.busy = False
        if self.waiting:
            self._start(self.waiting.popleft())


class _Message:
    """Bytes on their way, stored whole at every hop before they go on."""

    __slots__ = ("arrived", "hop", "route", "size")

    def __init__(self, size: int, route: list[_Link], arrived: Callable[[], None]) -> None:
        self.size, self.route, self.arrived = size, route, arrived
        self.hop = 0

    def arrive(self) -> None:
        self.hop += 1
        if self.hop == len(self.route):
            self.arrived()
        else:
            self.route[self.hop].send(self)


class AwareNetwork:
    """Every link is a FIFO; tori are crossed dimension by dimension; a ring is taken the shorter
    way, ties clockwise.
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
        self._links: dict[tuple[int, ...], _Link] = {}
        self._routes: dict[tuple[int, int], list[_Link]] = {}

    def send(self, source: int, destination: int, size: int, arrived: Callable[[], None]) -> None:
        """Call ``arrived()`` when the last byte of ``size`` is there."""
        self.sent_bytes += size
        route = self._routes.get((source, destination))
        if route is None:
            route = self._routes[source, destination] = self._find(source, destination)
        route[0].send(_Message(size, route, arrived))

    def _find(self, source: int, destination: int) -> list[_Link]:
        here, there = coordinates(source, self.shape), coordinates(destination, self.shape)
        route = []
        for dim, count in enumerate(self.shape):
            if here[dim] == there[dim]:
                continue
            # Which of the many rings or switches of this dimension
            group = (*here[:dim], -1, *here[dim + 1 :])
            if self.blocks[dim] == "Ring":
                step, hops = ring_steps(here[dim], there[dim], count)
                nodes = [(here[dim] + step * hop) % count for hop in range(hops + 1)]
            elif self.blocks[dim] == "Switch":
                nodes = [here[dim], count, there[dim]]
            else:
                nodes = [here[dim], there[dim]]
            route += [self._link(dim, *group, a, b) for a, b in itertools.pairwise(nodes)]
            here[dim] = there[dim]
        return route

    def _link(self, dim: int, *key: int) -> _Link:
        link = self._links.get((dim, *key))
        if link is None:
            link = self._links[dim, *key] = _Link(
                self.engine, self.bytes_per_ns[dim], self.latency[dim]
            )
        return link
