"""Networks as ranks, links, and the way from one rank to another.

**Routing** is deterministic and minimal:

- ring and torus: dimension by dimension, the first one first; the shorter way around; a tie goes
  clockwise, or, with ``ties="split"``, half the message each way;
- switch: up to the switch and down; fully connected: the direct link;
- fat tree (two levels): up to the leaf, to the spine that belongs to the destination's position in
  its leaf (D-mod-k), down;
- hierarchical: inside a node by the inner network; between nodes from the GPU's network card to the
  destination's, through the outer network. Several GPUs may share a card.

:mod:`interlace_sim.symmetry` says what all networks have in common.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Literal

from interlace.errors import ConfigError
from interlace.units import GB
from interlace_sim.symmetry import Hop, LinkClass, Topology

__all__ = [
    "FatTree",
    "INSIDE",
    "FullyConnected",
    "Hierarchical",
    "Hop",
    "LinkClass",
    "Switch",
    "Topology",
    "Torus",
    "build",
]

INSIDE = "node "
"""First word of the names of links inside a node of several."""


class Torus(Topology):
    """Rings in every dimension; with one dimension, a ring."""

    def __init__(
        self,
        shape: Sequence[int],
        bytes_per_s: float,
        latency_ns: int,
        ties: Literal["clockwise", "split"] = "clockwise",
    ) -> None:
        self.shape = tuple(shape)
        self.ties = ties
        self._along_links = (True,) * len(self.shape)
        self.name = ("ring:" if len(self.shape) == 1 else "torus:") + "x".join(map(str, self.shape))
        # The names of link classes: x+ is the direction of growing first coordinates.
        axes = "xyzw" if len(self.shape) <= 4 else [f"d{i}" for i in range(len(self.shape))]
        self.classes = [
            LinkClass(f"{axes[dim]}{sign}", bytes_per_s, latency_ns, self.ranks)
            for dim in range(len(self.shape))
            for sign in "+-"
        ]

    def path(self, source: int, destination: int) -> list[Hop]:
        return self._around(source, destination, ties_back=False)

    def paths(self, source: int, destination: int) -> list[list[Hop]]:
        clockwise = self._around(source, destination, ties_back=False)
        if self.ties != "split":
            return [clockwise]
        back = self._around(source, destination, ties_back=True)
        return [clockwise] if clockwise == back else [clockwise, back]

    def _around(self, source: int, destination: int, *, ties_back: bool) -> list[Hop]:
        position, target = list(self.coordinates(source)), self.coordinates(destination)
        hops: list[Hop] = []
        stride = 1
        at = source
        for dim, count in enumerate(self.shape):
            forward = (target[dim] - position[dim]) % count
            back = 2 * forward > count or (ties_back and 2 * forward == count)
            step = -1 if back else 1
            for _ in range(count - forward if back else forward):
                hops.append((2 * dim + back, at))
                moved = (position[dim] + step) % count
                at += (moved - position[dim]) * stride
                position[dim] = moved
            stride *= count
        return hops

    def injection_bytes_per_s(self) -> float:
        """Count two links for each dimension; both links of a ring of two lead to one neighbour."""
        return sum(
            2 * self.classes[2 * dim].bytes_per_s
            for dim, count in enumerate(self.shape)
            if count > 1
        )

    def bisection_bytes_per_s(self) -> float:
        """Cut across the longest even dimension: twice through each of its rings."""
        # An odd ring has no two equal halves, so its cut gives no simple bound.
        even = [count for count in self.shape if count % 2 == 0]
        return math.inf if not even else 2 * self.ranks / max(even) * self.classes[0].bytes_per_s


class Switch(Topology):
    """Every rank has one port on one switch, which itself never blocks."""

    def __init__(self, ranks: int, bytes_per_s: float, latency_ns: int) -> None:
        self.shape = (ranks,)
        self.name = f"switch:{ranks}"
        self.classes = [LinkClass(name, bytes_per_s, latency_ns, ranks) for name in ("up", "down")]

    def path(self, source: int, destination: int) -> list[Hop]:
        return [] if source == destination else [(0, source), (1, destination)]

    def injection_bytes_per_s(self) -> float:
        return self.classes[0].bytes_per_s

    def bisection_bytes_per_s(self) -> float:
        return self.ranks // 2 * self.classes[0].bytes_per_s

    def diameter_ns(self) -> int:
        return 2 * self.classes[0].latency_ns if self.ranks > 1 else 0


class FullyConnected(Topology):
    """A link from every rank to every peer, of ``bytes_per_s`` each."""

    def __init__(self, ranks: int, bytes_per_s: float, latency_ns: int) -> None:
        self.shape = (ranks,)
        self._along_links = (True,)
        self.name = f"full:{ranks}"
        self.classes = [
            LinkClass(f"to +{d}", bytes_per_s, latency_ns, ranks) for d in range(1, ranks)
        ]

    def path(self, source: int, destination: int) -> list[Hop]:
        return [] if source == destination else [((destination - source) % self.ranks - 1, source)]

    def injection_bytes_per_s(self) -> float:
        return sum(link.bytes_per_s for link in self.classes)

    def bisection_bytes_per_s(self) -> float:
        return (
            (self.ranks // 2) * (self.ranks - self.ranks // 2) * self.classes[0].bytes_per_s
            if self.classes
            else math.inf
        )


class FatTree(Topology):
    """Leaves of ``down`` ranks with ``up`` links each to spines that never block; oversubscribed by
    ``down / up``.
    """

    def __init__(
        self, leaves: int, down: int, up: int, bytes_per_s: float, latency_ns: int
    ) -> None:
        if up < 1 or down % up:
            raise ConfigError(
                f"a fat tree's ranks per leaf must divide evenly over its uplinks; got {down} and "
                f"{up}. Change one of them."
            )
        self.shape = (down, leaves)
        self.down, self.leaves, self.up = down, leaves, up
        self.name = f"fattree:{leaves}x{down}/{up}"
        self.classes = [
            LinkClass("host up", bytes_per_s, latency_ns, self.ranks),
            LinkClass("leaf up", bytes_per_s, latency_ns, leaves * up),
            LinkClass("leaf down", bytes_per_s, latency_ns, leaves * up),
            LinkClass("host down", bytes_per_s, latency_ns, self.ranks),
        ]

    def path(self, source: int, destination: int) -> list[Hop]:
        if source == destination:
            return []
        down = self.down
        leaf, target = source // down, destination // down
        if leaf == target:
            return [(0, source), (3, destination)]
        # D-mod-k routing: the destination alone decides on the spine, so that a shift of all ranks
        # by full leaves permutes the uplinks.
        spine = destination % down % self.up
        return [
            (0, source),
            (1, leaf * self.up + spine),
            (2, target * self.up + spine),
            (3, destination),
        ]

    def injection_bytes_per_s(self) -> float:
        return self.classes[0].bytes_per_s

    def bisection_bytes_per_s(self) -> float:
        """Cut half of the leaves from the other half."""
        leaves = self.leaves
        if leaves == 1:
            return self.ranks // 2 * self.classes[0].bytes_per_s
        return leaves // 2 * self.up * self.classes[1].bytes_per_s if leaves % 2 == 0 else math.inf

    def diameter_ns(self) -> int:
        return (4 if self.leaves > 1 else 2 if self.ranks > 1 else 0) * self.classes[0].latency_ns


class Hierarchical(Topology):
    """Nodes of GPUs: an ``inner`` network in each node and an ``outer`` one whose ranks are the
    nodes' network cards.
    """

    def __init__(self, inner: Topology, outer: Topology, cards: int) -> None:
        gpus = inner.ranks
        if gpus % cards or outer.ranks % cards or len(inner.shape) != 1:
            raise ConfigError(
                "a node's GPUs and the outer network's ranks must divide evenly over the node's "
                f"network cards; got {gpus} GPUs, "
                f"{outer.ranks} ranks and {cards} cards. Change one of them."
            )
        self.inner, self.outer, self.cards = inner, outer, cards
        self.nodes = outer.ranks // cards
        # With one card per node, nodes are the outer ranks. Otherwise the outer network's first
        # coordinate counts cards, of which a node has several.
        if cards == 1:
            self.shape = (gpus, *outer.shape)
        elif outer.shape == (outer.ranks,):
            self.shape = (gpus, self.nodes)
        elif outer.shape[0] % cards == 0 and len(outer.shape) == 2:
            self.shape = (gpus, outer.shape[0] // cards, outer.shape[1])
        else:
            raise ConfigError(
                f"the outer network must hold whole nodes of {cards} cards, and a torus of nodes "
                "one card a node; got "
                f"{outer.name}. Choose leaves of a multiple of {cards}, or set cards to 1."
            )
        # Coordinates that run along links of either network must stay in one piece.
        outer_along_links = outer._along_links or (False,) * (len(self.shape) - 1)
        self._along_links = ((inner._along_links or (False,))[0], *outer_along_links)
        self.name = f"nodes:{self.nodes}x{gpus} ({inner.name}, {outer.name})"
        self.classes = [
            *(
                dataclasses.replace(
                    link, name=f"{INSIDE}{link.name}", count=link.count * self.nodes
                )
                for link in inner.classes
            ),
            *(dataclasses.replace(link, name=f"net {link.name}") for link in outer.classes),
        ]

    def path(self, source: int, destination: int) -> list[Hop]:
        gpus = self.inner.ranks
        node, target = source // gpus, destination // gpus
        if node == target:
            inner = self.inner.path(source % gpus, destination % gpus)
            return [(index, node * self.inner.classes[index].count + link) for index, link in inner]
        # Classes of the outer network are numbered after those of the inner one.
        first, per_card = len(self.inner.classes), gpus // self.cards
        outer = self.outer.path(
            node * self.cards + source % gpus // per_card,
            target * self.cards + destination % gpus // per_card,
        )
        return [(first + index, link) for index, link in outer]

    def injection_bytes_per_s(self) -> float:
        return self.inner.injection_bytes_per_s() + self.network_bytes_per_s()

    def network_bytes_per_s(self) -> float:
        """Return the bytes per second of a GPU's share of its network card."""
        return self.outer.injection_bytes_per_s() * self.cards / self.inner.ranks

    def bisection_bytes_per_s(self) -> float:
        return (
            self.outer.bisection_bytes_per_s()
            if self.nodes > 1
            else self.inner.bisection_bytes_per_s()
        )

    def diameter_ns(self) -> int:
        return self.outer.diameter_ns() if self.nodes > 1 else self.inner.diameter_ns()


NAME = re.compile(
    r"(ring|torus|torus2d|torus3d)(:\d{1,7}(x\d{1,7}){0,9})?"
    r"|(switch|full)(:\d{1,7})?|fattree(:\d{1,7}x\d{1,7}(/\d{1,7})?)?"
)
"""Short names of topologies, with sizes or without."""


def build(
    text: str,
    ranks: int,
    *,
    bytes_per_s: float,
    latency_ns: int,
    ties: Literal["clockwise", "split"] = "clockwise",
) -> Topology:
    """Build a topology from its short name: ``ring``, ``torus2d``, ``torus3d``, ``torus:8x16``,
    ``switch``, ``full``, ``fattree:LEAVESxDOWN/UP`` or ``fattree`` (leaves of 16 or less, not
    oversubscribed).

    Args:
        text: The short name, with sizes or without.
        ranks: Number of ranks that the topology must have.
        bytes_per_s: Bytes per second of a link, in one direction.
        latency_ns: Nanoseconds per hop.
        ties: Way of messages on a torus whose two ways are equally long.

    Raises:
        ConfigError: the name is unknown, or its sizes do not make ``ranks``.
    """
    if bytes_per_s <= 0 or latency_ns < 0:
        raise ConfigError(
            "a link's bandwidth must be positive and its latency not negative; got "
            f"{bytes_per_s / GB:g} GB/s, {latency_ns} ns."
        )
    name, _, sizes = text.partition(":")
    try:
        if name in ("ring", "torus", "torus2d", "torus3d"):
            shape = (
                tuple(int(part) for part in sizes.split("x"))
                if sizes
                else _balanced(ranks, {"torus2d": 2, "torus": 2, "torus3d": 3}.get(name, 1))
            )
            result: Topology = Torus(shape, bytes_per_s, latency_ns, ties)
        elif name == "switch":
            result = Switch(int(sizes or ranks), bytes_per_s, latency_ns)
        elif name == "full":
            result = FullyConnected(int(sizes or ranks), bytes_per_s, latency_ns)
        elif name == "fattree":
            leaf, _, up = sizes.partition("/")
            leaves, down = (int(part) for part in leaf.split("x")) if sizes else _leaves(ranks)
            result = FatTree(leaves, down, int(up or down), bytes_per_s, latency_ns)
        else:
            raise ConfigError(
                "topology must be ring, torus2d, torus3d, torus:AxB, switch, full or "
                f"fattree[:LEAVESxDOWN/UP]; got {text!r}."
            )
    except ValueError as error:
        # ConfigError is a ValueError; only those of int() and of unpacking are meant here.
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"topology must have sizes such as torus:8x16 or fattree:8x16/8; got {text!r}."
        ) from error
    if min(result.shape) < 1:
        raise ConfigError(f"topology must have sizes of at least 1; got {text!r}.")
    if result.ranks != ranks:
        raise ConfigError(
            f"topology {text} must have as many ranks as the run; got {result.ranks} for {ranks}. "
            f"Say --nodes {result.ranks}, or sizes whose product is {ranks}."
        )
    return result


def _leaves(ranks: int) -> tuple[int, int]:
    """Choose leaves of at most 16 ranks each, with full nodes of 8 if possible."""
    down = max(
        (size for size in range(1, min(16, ranks) + 1) if ranks % size == 0),
        key=lambda size: (size % 8 == 0, size),
    )
    return ranks // down, down


def _balanced(ranks: int, dimensions: int) -> tuple[int, ...]:
    """Factorise ``ranks`` as evenly as possible, ascending: 128 in two dimensions is 8 x 16."""
    if dimensions == 1:
        return (ranks,)
    # The largest factor up to the root, so that dimensions are as even as the number permits.
    root = round(ranks ** (1 / dimensions))
    first = next((size for size in range(root, 0, -1) if ranks % size == 0), 1)
    return tuple(sorted((first, *_balanced(ranks // first, dimensions - 1))))
