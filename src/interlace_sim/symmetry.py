"""The symmetry that all networks share: ranks as coordinates, shifts of them, and classes of links.

Every network of :mod:`interlace_sim.topology` looks alike from each of its ranks. Ranks are
coordinates in a *shape*; adding a displacement to all of them maps the network onto itself, and
links fall into *classes* that such a shift permutes (all links of a torus in direction +x, say). A
message from rank r to r + d therefore uses the same classes in the same order for every r. This
lets one rank stand for all of them (:mod:`interlace_sim.fabric`), and the tests check it for every
network.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import math
from collections.abc import Sequence

from interlace.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LinkClass:
    """Links that a shift of ranks permutes.

    Attributes:
        name: Name in results.
        bytes_per_s: Bytes per second of one link, in this direction.
        latency_ns: Nanoseconds from the first byte in to the first byte out.
        count: Number of links.
    """

    name: str
    bytes_per_s: float
    latency_ns: int
    count: int


Hop = tuple[int, int]
"""A link: the index of its class, and its index in the class."""


def coordinates(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a rank as one index per dimension of ``shape``; the first varies fastest."""
    out = []
    for count in shape:
        rank, index = divmod(rank, count)
        out.append(index)
    return tuple(out)


class Topology(abc.ABC):
    """A network of ``ranks``.

    Attributes:
        name: Name as a user writes it, ``"torus:8x16"``.
        shape: The number of ranks along each coordinate, the first varying fastest.
        classes: The kinds of links.
    """

    name: str
    shape: tuple[int, ...]
    classes: list[LinkClass]
    # Coordinates that run along links and so must not be split; None if all may be split.
    _along_links: tuple[bool, ...] | None = None

    def split(self, sizes: Sequence[int]) -> tuple[Topology, list[tuple[int, ...]]]:
        """Split the network's coordinates for groups of ranks.

        Returns:
            The network with split coordinates, and each group's coordinates.

        Example: a switch of 16 for sizes 8 and 2 becomes 8 x 2, with groups (0,) and (1,). Groups
        of size 1 have no coordinates.

        Raises:
            ConfigError: a group would be a piece of a ring, sizes do not fit together, or do not
                make all ranks.
        """
        dims, along_links = list(self.shape), list(self.along_links())
        shape: list[int] = []
        uncut: list[bool] = []
        groups: list[tuple[int, ...]] = []
        for size in sizes:
            axes: list[int] = []
            left = size
            while left > 1:
                # Dimensions are used up in order, and those that are used up are dropped.
                while dims and dims[0] == 1:
                    del dims[0], along_links[0]
                piece = math.gcd(left, dims[0]) if dims else 1
                if (
                    piece == 1
                    or (along_links[0] and piece != dims[0])
                    or (piece != left and piece != dims[0])
                ):
                    raise ConfigError(
                        f"parallel groups must fill dimensions of {self.name}; got sizes "
                        f"{'x'.join(map(str, sizes))} for dimensions "
                        f"{'x'.join(map(str, self.shape))}. Choose sizes that divide or are "
                        "divided by those dimensions, in this "
                        f"order{', rings undivided' if any(self.along_links()) else ''}."
                    )
                axes.append(len(shape))
                shape.append(piece)
                uncut.append(along_links[0])
                left //= piece
                dims[0] //= piece
            groups.append(tuple(axes))
        if math.prod(sizes) != self.ranks:
            raise ConfigError(
                f"parallel groups must make {self.ranks} ranks; got {'x'.join(map(str, sizes))}. "
                "Change one of them."
            )
        # The links are the same: only the coordinates by which ranks are numbered are finer.
        result = copy.copy(self)
        result.shape = tuple(shape) or (1,)
        result._along_links = tuple(uncut) if any(uncut) else None
        return result, groups

    def along_links(self) -> tuple[bool, ...]:
        """Tell for each coordinate whether it runs along links, so that it must not be split.

        A piece of a ring is no ring: its ends have no link between them.
        """
        return self._along_links or (False,) * len(self.shape)

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)

    @abc.abstractmethod
    def path(self, source: int, destination: int) -> list[Hop]:
        """List the links from one rank to another in order; empty for a rank to itself."""

    def paths(self, source: int, destination: int) -> list[list[Hop]]:
        """List the paths that a message takes in equal parts.

        There is one path, except for ties on a torus that splits them.
        """
        return [self.path(source, destination)]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return a rank's coordinates."""
        return coordinates(rank, self.shape)

    def rank(self, coordinates: Sequence[int]) -> int:
        """Return the rank at these coordinates, each taken modulo its size."""
        rank, stride = 0, 1
        for value, count in zip(coordinates, self.shape, strict=True):
            rank += value % count * stride
            stride *= count
        return rank

    def shift(self, rank: int, displacement: int) -> int:
        """Return the rank that lies a displacement from ``rank``.

        A displacement is written as the rank that it maps rank 0 to.
        """
        return self.rank(
            [
                a + b
                for a, b in zip(self.coordinates(rank), self.coordinates(displacement), strict=True)
            ]
        )

    def difference(self, rank: int, origin: int) -> int:
        """Return the displacement that maps ``origin`` to ``rank``."""
        return self.rank(
            [a - b for a, b in zip(self.coordinates(rank), self.coordinates(origin), strict=True)]
        )

    def sharing(self, index: int) -> float:
        """Return how many ranks share a link of this class; below 1 if a rank has several."""
        return self.ranks / self.classes[index].count

    @abc.abstractmethod
    def injection_bytes_per_s(self) -> float:
        """Return the bytes per second that can leave a rank through all links that start at it."""

    def bisection_bytes_per_s(self) -> float:
        """Return the bytes per second, in one direction, between two halves of the ranks.

        The halves are those that the topology suggests; infinity if no such cut bounds anything.
        """
        return math.inf

    def diameter_ns(self) -> int:
        """Return the nanoseconds of latency between the two ranks that are farthest apart."""
        return max((self.path_latency_ns(0, rank) for rank in range(1, self.ranks)), default=0)

    def path_latency_ns(self, source: int, destination: int) -> int:
        """Return the nanoseconds of latency from one rank to another."""
        return sum(self.classes[index].latency_ns for index, _ in self.path(source, destination))
