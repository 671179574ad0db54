"""Networks as ranks, links, and the way from one rank to another.

Every topology here looks the same from each of its ranks. Ranks are coordinates in a *shape*,
adding a displacement to all of them maps the network onto itself, and links fall into *classes*
that such a shift permutes (all links of a torus in direction +x, say). A message from rank r to r +
d therefore uses the same classes in the same order whatever r is. That is what lets one rank stand
for all of them (:mod:`interlace.sim.fabric`), and the tests check it for every topology.

**Routing**, which is deterministic and minimal:

- ring and torus: dimension by dimension, the first one first; the shorter way around; a tie goes
  clockwise, or, with ``ties="split"``, half the message each way;
- switch: up to the switch and down; fully connected: the direct link;
- fat tree (two levels): up to the leaf, to the spine that belongs to the destination's place in its
  leaf (D-mod-k), down;
- hierarchical: inside a node by the inner network; between nodes from the GPU's network card to the
  destination's, through the outer network. Several GPUs may share a card.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from interlace.errors import ConfigError
from interlace.units import GB

LinkKind = Literal["link", "nic"]


@dataclasses.dataclass(frozen=True)
class LinkClass:
    """Links that a shift of ranks permutes.

    Attributes:
        name: as in results.
        kind: ``"nic"`` for the port by which a rank or node enters a network, else ``"link"``.
        bytes_per_s: of one link, in this direction.
        latency_ns: from the first byte in to the first byte out.
        count: how many links there are.
    """

    name: str
    kind: LinkKind
    bytes_per_s: float
    latency_ns: int
    count: int


Hop = tuple[int, int]
"""Index of a link's class, and of the link in its class."""


class Topology(abc.ABC):
    """A network of ``ranks``.

    Attributes:
        name: as a user writes it, ``"torus:8x16"``.
        shape: the number of ranks along each coordinate, the first varying fastest.
        classes: the kinds of links.
    """

    name: str
    shape: tuple[int, ...]
    classes: list[LinkClass]
    # Coordinates that must not be split into several; None: all may be
    _whole: tuple[bool, ...] | None = None

    def split(self, sizes: Sequence[int]) -> tuple[Topology, list[tuple[int, ...]]]:
        """The same network with coordinates split for groups of ranks, and each group's
        coordinates.

        A switch of 16 for sizes 8 and 2 becomes 8 x 2, with groups (0,) and (1,); groups of size 1
        have none.

        Raises:
            ConfigError: a group would be a piece of a ring, sizes do not fit together, or do not
                make all ranks.
        """
        dims, whole = list(self.shape), list(self.whole())
        shape: list[int] = []
        uncut: list[bool] = []
        groups: list[tuple[int, ...]] = []
        for size in sizes:
            mine: list[int] = []
            left = size
            while left > 1:
                while dims and dims[0] == 1:
                    del dims[0], whole[0]
                piece = math.gcd(left, dims[0]) if dims else 1
                if (
                    piece == 1
                    or (whole[0] and piece != dims[0])
                    or (piece != left and piece != dims[0])
                ):
                    raise ConfigError(
                        f"parallel groups must fill dimensions of {self.name}; got sizes "
                        f"{'x'.join(map(str, sizes))} for "
                        f"dimensions {'x'.join(map(str, self.shape))}. Choose sizes that divide "
                        "or are divided by those "
                        "dimensions, in this "
                        f"order{', rings undivided' if any(self.whole()) else ''}."
                    )
                mine.append(len(shape))
                shape.append(piece)
                uncut.append(whole[0])
                left //= piece
                dims[0] //= piece
            groups.append(tuple(mine))
        if math.prod(sizes) != self.ranks:
            raise ConfigError(
                f"parallel groups must make {self.ranks} ranks; got {'x'.join(map(str, sizes))}. "
                "Change one of them."
            )
        result = copy.copy(self)
        result.shape = tuple(shape) or (1,)
        result._whole = tuple(uncut) if any(uncut) else None
        return result, groups

    def whole(self) -> tuple[bool, ...]:
        """Of each coordinate, whether it runs along links, so that only all of it is symmetric."""
        return self._whole or (False,) * len(self.shape)

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)

    @abc.abstractmethod
    def path(self, source: int, destination: int) -> list[Hop]:
        """The links from one rank to another, in order; empty for a rank to itself."""

    def paths(self, source: int, destination: int) -> list[list[Hop]]:
        """The ways that a message takes, in equal parts; one, but for ties on a torus that splits
        them.
        """
        return [self.path(source, destination)]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        out = []
        for count in self.shape:
            out.append(rank % count)
            rank //= count
        return tuple(out)

    def rank(self, coordinates: Sequence[int]) -> int:
        """The rank at these coordinates, each taken modulo its size."""
        rank, stride = 0, 1
        for value, count in zip(coordinates, self.shape, strict=True):
            rank += value % count * stride
            stride *= count
        return rank

    def shift(self, rank: int, displacement: int) -> int:
        """The rank that lies a displacement from ``rank``; a displacement is the rank that rank 0
        is mapped to.
        """
        return self.rank(
            [
                a + b
                for a, b in zip(self.coordinates(rank), self.coordinates(displacement), strict=True)
            ]
        )

    def difference(self, rank: int, other: int) -> int:
        """The displacement that maps ``other`` to ``rank``."""
        return self.rank(
            [a - b for a, b in zip(self.coordinates(rank), self.coordinates(other), strict=True)]
        )

    def sharing(self, index: int) -> float:
        """How many ranks share a link of this class; below 1 where a rank has several."""
        return self.ranks / self.classes[index].count

    @abc.abstractmethod
    def injection_bytes_per_s(self) -> float:
        """The most that can leave a rank, through all links that start at it."""

    def bisection_bytes_per_s(self) -> float:
        """The least capacity, in one direction, between two halves of the ranks that the topology
        suggests; inf if none counts.
        """
        return math.inf

    def diameter_ns(self) -> int:
        """Latency between the two ranks that are farthest apart."""
        return max((self.path_latency_ns(0, rank) for rank in range(1, self.ranks)), default=0)

    def path_latency_ns(self, source: int, destination: int) -> int:
        return sum(self.classes[index].latency_ns for index, _ in self.path(source, destination))


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
        self._whole = (True,) * len(self.shape)
        self.name = ("ring:" if len(self.shape) == 1 else "torus:") + "x".join(map(str, self.shape))
        axes = "xyzw" if len(self.shape) <= 4 else [f"d{i}" for i in range(len(self.shape))]
        self.classes = [
            LinkClass(f"{axes[dim]}{sign}", "link", bytes_per_s, latency_ns, self.ranks)
            for dim in range(len(self.shape))
            for sign in "+-"
        ]

    def path(self, source: int, destination: int) -> list[Hop]:
        return self._around(source, destination, ties_back=False)

    def paths(self, source: int, destination: int) -> list[list[Hop]]:
        one = self._around(source, destination, ties_back=False)
        other = self._around(source, destination, ties_back=True) if self.ties == "split" else one
        return [one] if one == other else [one, other]

    def _around(self, source: int, destination: int, *, ties_back: bool) -> list[Hop]:
        here, there = list(self.coordinates(source)), self.coordinates(destination)
        hops: list[Hop] = []
        stride = 1
        at = source
        for dim, count in enumerate(self.shape):
            forward = (there[dim] - here[dim]) % count
            back = 2 * forward > count or (ties_back and 2 * forward == count)
            step = -1 if back else 1
            for _ in range(count - forward if back else forward):
                hops.append((2 * dim + back, at))
                at += ((here[dim] + step) % count - here[dim]) * stride
                here[dim] = (here[dim] + step) % count
            stride *= count
        return hops

    def injection_bytes_per_s(self) -> float:
        """Two links for each dimension of more than two; a ring of two has the two links between
        the same ranks.
        """
        return sum(
            2 * self.classes[2 * dim].bytes_per_s
            for dim, count in enumerate(self.shape)
            if count > 1
        )

    def bisection_bytes_per_s(self) -> float:
        """Across the longest even dimension: two cuts of each of its rings."""
        even = [count for count in self.shape if count % 2 == 0]
        return math.inf if not even else 2 * self.ranks / max(even) * self.classes[0].bytes_per_s


class Switch(Topology):
    """Every rank has one port on one switch, which itself never blocks."""

    def __init__(self, ranks: int, bytes_per_s: float, latency_ns: int) -> None:
        self.shape = (ranks,)
        self.name = f"switch:{ranks}"
        self.classes = [
            LinkClass(name, "nic", bytes_per_s, latency_ns, ranks) for name in ("up", "down")
        ]

    def path(self, source: int, destination: int) -> list[Hop]:
        return [] if source == destination else [(0, source), (1, destination)]

    def injection_bytes_per_s(self) -> float:
        return self.classes[0].bytes_per_s

    def bisection_bytes_per_s(self) -> float:
        return self.ranks // 2 * self.classes[0].bytes_per_s

    def diameter_ns(self) -> int:
        return 2 * self.classes[0].latency_ns if self.ranks > 1 else 0


class FullyConnected(Topology):
    """A link from every rank to every other one. ``bytes_per_s`` is of one such link."""

    def __init__(self, ranks: int, bytes_per_s: float, latency_ns: int) -> None:
        self.shape = (ranks,)
        self._whole = (True,)
        self.name = f"full:{ranks}"
        self.classes = [
            LinkClass(f"to +{d}", "link", bytes_per_s, latency_ns, ranks) for d in range(1, ranks)
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
        if down % up:
            raise ConfigError(
                f"a fat tree's ranks per leaf must divide evenly over its uplinks; got {down} and "
                f"{up}. Change one of them."
            )
        self.shape = (down, leaves)
        self.down, self.leaves, self.up = down, leaves, up
        self.name = f"fattree:{leaves}x{down}/{up}"
        self.classes = [
            LinkClass("host up", "nic", bytes_per_s, latency_ns, self.ranks),
            LinkClass("leaf up", "link", bytes_per_s, latency_ns, leaves * up),
            LinkClass("leaf down", "link", bytes_per_s, latency_ns, leaves * up),
            LinkClass("host down", "nic", bytes_per_s, latency_ns, self.ranks),
        ]

    def path(self, source: int, destination: int) -> list[Hop]:
        if source == destination:
            return []
        down = self.down
        here, there = source // down, destination // down
        if here == there:
            return [(0, source), (3, destination)]
        spine = destination % down % self.up
        return [
            (0, source),
            (1, here * self.up + spine),
            (2, there * self.up + spine),
            (3, destination),
        ]

    def injection_bytes_per_s(self) -> float:
        return self.classes[0].bytes_per_s

    def bisection_bytes_per_s(self) -> float:
        """Half the leaves against the other half."""
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
        outer_whole = outer._whole or (False,) * (len(self.shape) - 1)
        self._whole = ((inner._whole or (False,))[0], *outer_whole)
        self.name = f"nodes:{self.nodes}x{gpus} ({inner.name}, {outer.name})"
        self.classes = [
            *(
                dataclasses.replace(
                    link, name=f"node {link.name}", kind="link", count=link.count * self.nodes
                )
                for link in inner.classes
            ),
            *(dataclasses.replace(link, name=f"net {link.name}") for link in outer.classes),
        ]

    def path(self, source: int, destination: int) -> list[Hop]:
        gpus = self.inner.ranks
        here, there = source // gpus, destination // gpus
        if here == there:
            inner = self.inner.path(source % gpus, destination % gpus)
            return [(index, here * self.inner.classes[index].count + link) for index, link in inner]
        first, per_card = len(self.inner.classes), gpus // self.cards
        outer = self.outer.path(
            here * self.cards + source % gpus // per_card,
            there * self.cards + destination % gpus // per_card,
        )
        return [(first + index, link) for index, link in outer]

    def injection_bytes_per_s(self) -> float:
        return self.inner.injection_bytes_per_s() + self.network_bytes_per_s()

    def network_bytes_per_s(self) -> float:
        """A GPU's share of its network card."""
        return self.outer.injection_bytes_per_s() * self.cards / self.inner.ranks

    def bisection_bytes_per_s(self) -> float:
        return (
            self.outer.bisection_bytes_per_s()
            if self.nodes > 1
            else self.inner.bisection_bytes_per_s()
        )

    def diameter_ns(self) -> int:
        return self.outer.diameter_ns() if self.nodes > 1 else self.inner.diameter_ns()


def build(
    text: str,
    ranks: int,
    *,
    bytes_per_s: float,
    latency_ns: int,
    ties: Literal["clockwise", "split"] = "clockwise",
) -> Topology:
    """A topology from its short name: ``ring``, ``torus2d``, ``torus3d``, ``torus:8x16``,
    ``switch``, ``full``, ``fattree:LEAVESxDOWN/UP`` or ``fattree`` (leaves of 16 or less, not
    oversubscribed).

    Args:
        ranks: how many it must have.
        bytes_per_s: of a link, in one direction.

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
                "--topology must be ring, torus2d, torus3d, torus:AxB, switch, full or "
                f"fattree[:LEAVESxDOWN/UP]; got {text!r}."
            )
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--topology must have sizes such as torus:8x16 or fattree:8x16/8; got {text!r}."
        ) from error
    if min(result.shape) < 1 or result.ranks != ranks:
        raise ConfigError(
            f"topology {text} must have as many ranks as the run; got {result.ranks} for {ranks}. "
            f"Say --nodes {result.ranks}, or sizes whose product is {ranks}."
        )
    return result


def _leaves(ranks: int) -> tuple[int, int]:
    """Leaves of at most 16 ranks each; of whole nodes of 8 where that can be."""
    down = max(
        (size for size in range(1, min(16, ranks) + 1) if ranks % size == 0),
        key=lambda size: (size % 8 == 0, size),
    )
    return ranks // down, down


def _balanced(ranks: int, dimensions: int) -> tuple[int, ...]:
    """Factors of ``ranks`` as equal as can be, ascending: 128 in two dimensions is 8 x 16."""
    if dimensions == 1:
        return (ranks,)
    root = round(ranks ** (1 / dimensions))
    first = next((size for size in range(root, 0, -1) if ranks % size == 0), 1)
    return tuple(sorted((first, *_balanced(ranks // first, dimensions - 1))))
