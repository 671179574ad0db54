"""Collectives as rounds of messages.

In a round every rank of a group sends some messages and waits for as many; then it reduces what it
must and goes on. A message's destination is a displacement in the group, so one schedule serves
every rank. What the algorithms do, for a buffer of S bytes on each of n ranks, where a group may
span several dimensions of a network:

====================
==========================================================================================
all_to_all
  one_shot            all n - 1 blocks of S/n at once, each straight to its owner
  direct              the same blocks, one after the other, the nearest first (a pairwise exchange)
  per_dimension       in each dimension in turn, direct and at once, with the whole buffer: fewer, larger messages
  ring                in each dimension in turn, passed from neighbour to neighbour in one direction
all_reduce
  ring                in each dimension but the last a ring reduce-scatter, a ring all-reduce there, all-gathers back
  direct              S/n to each owner, who adds them and sends the sum to all: two rounds
  halving_doubling    halves with the rank 1 away, quarters with the one 2 away, ... and back; n a power of two
  double_binary_tree  two trees, half of S each, in pieces that follow one another; not the same for
  all ranks
reduce_scatter        ring, direct, halving_doubling
all_gather            ring, direct, halving_doubling
====================
==========================================================================================

S is the whole buffer: of reduce-scatter the input, of all-gather the output.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from interlace.errors import ConfigError
from interlace.sim.topology import Topology

ALGORITHMS = {
    "all_to_all": ("one_shot", "direct", "per_dimension", "ring"),
    "all_reduce": ("ring", "direct", "halving_doubling", "double_binary_tree"),
    "reduce_scatter": ("ring", "direct", "halving_doubling"),
    "all_gather": ("ring", "direct", "halving_doubling"),
}
"""Algorithms of each collective; the first is the default of :mod:`interlace.sim.operators`."""

TITLES = {
    "all_to_all": "All-to-All",
    "all_reduce": "AllReduce",
    "reduce_scatter": "ReduceScatter",
    "all_gather": "AllGather",
}
"""Each collective's name in tables and pictures."""


@dataclasses.dataclass(frozen=True)
class Round:
    """What every rank sends before it goes on.

    Attributes:
        sends: (place, bytes): the destination's displacement within the group; with ``exchange``
            the bits in which its place differs from the sender's.
        reduced: bytes that each rank adds to others when all has come.
    """

    sends: tuple[tuple[int, int], ...]
    reduced: int = 0
    exchange: bool = False


class Group:
    """Ranks that differ in some coordinates of a topology only: its rows, its planes, or all of it.

    Attributes:
        axes: the coordinates in which members differ.
        size: how many ranks a group has.
    """

    def __init__(self, topology: Topology, axes: Sequence[int] | None = None) -> None:
        self.topology = topology
        self.axes = tuple(range(len(topology.shape)) if axes is None else axes)
        self.sizes = tuple(topology.shape[axis] for axis in self.axes)
        self.size = math.prod(self.sizes)

    def displacement(self, place: int) -> int:
        """The topology's displacement for one within the group."""
        coordinates = [0] * len(self.topology.shape)
        for axis, count in zip(self.axes, self.sizes, strict=True):
            coordinates[axis] = place % count
            place //= count
        return self.topology.rank(coordinates)

    def place(self, rank: int) -> int:
        """A rank's number within its group."""
        coordinates = self.topology.coordinates(rank)
        place, stride = 0, 1
        for axis, count in zip(self.axes, self.sizes, strict=True):
            place += coordinates[axis] * stride
            stride *= count
        return place

    def members(self, rank: int) -> list[int]:
        """All ranks of ``rank``'s group, by place."""
        first = self.topology.shift(
            rank, self.topology.difference(0, self.displacement(self.place(rank)))
        )
        return [self.topology.shift(first, self.displacement(place)) for place in range(self.size)]

    def strides(self) -> list[tuple[int, int]]:
        """(count, stride) of the group's dimensions that have more than one rank."""
        out, stride = [], 1
        for count in self.sizes:
            if count > 1:
                out.append((count, stride))
            stride *= count
        return out

    def rings_uncut(self) -> bool:
        """Whether its ranks can be exchanged by bits without leaving the symmetry of the network."""
        whole = self.topology.whole()
        return not any(whole[axis] for axis in self.axes)


def schedule(kind: str, algorithm: str, size: int, group: Group) -> list[Round]:
    """The rounds of a collective.

    Args:
        size: bytes of the whole buffer, see above.

    Raises:
        ConfigError: no such collective or algorithm, or the group does not fit it.
    """
    if kind not in ALGORITHMS:
        raise ConfigError(f"a collective must be one of {', '.join(ALGORITHMS)}; got {kind!r}.")
    if algorithm not in ALGORITHMS[kind]:
        raise ConfigError(
            f"{kind}'s algorithm must be one of {', '.join(ALGORITHMS[kind])}; got {algorithm!r}."
        )
    if size < 0:
        raise ConfigError(f"a collective's bytes must not be negative; got {size}.")
    if group.size == 1 or size == 0:
        return []
    if algorithm == "double_binary_tree":
        raise ConfigError(
            "double_binary_tree must be run on every rank; it is not the same for all. Ask for "
            "all ranks."
        )
    if kind == "all_to_all":
        return _all_to_all(algorithm, size, group)
    if algorithm == "direct":
        return _direct(kind, size, group)
    if algorithm == "halving_doubling":
        return _halving_doubling(kind, size, group)
    return _rings(kind, size, group)


def _share(size: int, parts: int) -> int:
    """Bytes of the largest of equal parts."""
    return -(-size // parts)


def _all_to_all(algorithm: str, size: int, group: Group) -> list[Round]:
    if algorithm in ("one_shot", "direct"):
        sends = [(place, _share(size, group.size)) for place in range(1, group.size)]
        return (
            [Round(tuple(sends))] if algorithm == "one_shot" else [Round((send,)) for send in sends]
        )
    rounds = []
    for count, stride in group.strides():
        block = _share(size, count)
        if algorithm == "per_dimension":
            rounds.append(Round(tuple((step * stride, block) for step in range(1, count))))
        else:  # after k steps the k nearest have their blocks, and the rest goes on
            rounds += [Round(((stride, block * (count - step)),)) for step in range(1, count)]
    return rounds


def _direct(kind: str, size: int, group: Group) -> list[Round]:
    block = _share(size, group.size)
    everyone = tuple((place, block) for place in range(1, group.size))
    scatter, gather = Round(everyone, reduced=block * (group.size - 1)), Round(everyone)
    return {"all_reduce": [scatter, gather], "reduce_scatter": [scatter], "all_gather": [gather]}[
        kind
    ]


def _halving_doubling(kind: str, size: int, group: Group) -> list[Round]:
    if group.size & (group.size - 1):
        raise ConfigError(
            f"halving_doubling must have a power of two of ranks; got {group.size}. Use ring or "
            "direct."
        )
    scatter = []
    part, mask = size, 1
    while mask < group.size:
        part = _share(part, 2)
        scatter.append(Round(((mask, part),), reduced=part, exchange=True))
        mask *= 2
    gather = [dataclasses.replace(step, reduced=0) for step in reversed(scatter)]
    return {"all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": gather}[kind]


def _rings(kind: str, size: int, group: Group) -> list[Round]:
    scatter: list[Round] = []
    gather: list[Round] = []
    part = size
    for count, stride in group.strides():
        part = _share(part, count)
        scatter += [Round(((stride, part),), reduced=part)] * (count - 1)
        gather = [Round(((stride, part),))] * (count - 1) + gather
    return {"all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": gather}[kind]


def least_sent_bytes(kind: str, size: float, ranks: int) -> float:
    """The least that must leave each of ``ranks`` in any algorithm; with nodes for ranks, each
    node.
    """
    if ranks == 1:
        return 0.0
    return {"all_reduce": 2.0}.get(kind, 1.0) * size * (ranks - 1) / ranks
