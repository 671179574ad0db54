"""Collectives as rounds of messages.

In a round every rank of a group sends some messages and waits for as many; then it reduces them, if
the round requires it, and goes on. A message's destination is a displacement in the group, so one
schedule serves every rank. A group may span several dimensions of a network. For a buffer of S
bytes on each of n ranks, the algorithms do:

``all_to_all``

- ``one_shot``: all n - 1 blocks of S/n at once, each straight to its owner;
- ``direct``: the blocks one after the other, the nearest first (a pairwise exchange);
- ``per_dimension``: in each dimension in turn, direct and at once, with all S bytes: fewer, larger
  messages;
- ``ring``: in each dimension in turn, passed from neighbour to neighbour in one direction.

``all_reduce``

- ``ring``: in each dimension but the last a ring reduce-scatter, a ring all-reduce in the last
  one, all-gathers back;
- ``direct``: S/n to each owner, who adds them and sends the sum to all: two rounds;
- ``halving_doubling``: halves with the rank 1 away, quarters with the rank 2 away, and so on, then
  back; n must be a power of two;
- ``double_binary_tree``: two trees, half of S each, in pieces one after another; not the same for
  all ranks.

``reduce_scatter`` and ``all_gather`` have ``ring``, ``direct`` and ``halving_doubling``.

S is the size of the larger buffer: the input of a reduce-scatter, the output of an all-gather.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from interlace.errors import ConfigError
from interlace.units import ceil_div
from interlace_sim.topology import Topology

ALGORITHMS = {
    "all_to_all": ("one_shot", "direct", "per_dimension", "ring"),
    "all_reduce": ("ring", "direct", "halving_doubling", "double_binary_tree"),
    "reduce_scatter": ("ring", "direct", "halving_doubling"),
    "all_gather": ("ring", "direct", "halving_doubling"),
}
"""Algorithms of each collective; the first is the default of :mod:`interlace_sim.operators`."""

TITLES = {
    "all_to_all": "All-to-All",
    "all_reduce": "AllReduce",
    "reduce_scatter": "ReduceScatter",
    "all_gather": "AllGather",
}
"""Each collective's name in tables and pictures."""


@dataclasses.dataclass(frozen=True)
class Round:
    """The messages that every rank sends before it goes on.

    Attributes:
        sends: (displacement, bytes) of each message; the displacement is the destination's within
            the group.
        reduced: Bytes that each rank adds to its own when all messages have arrived.
        exchange: Whether displacements are the bits in which the destination's index in the group
            differs from the sender's, instead of distances.
    """

    sends: tuple[tuple[int, int], ...]
    reduced: int = 0
    exchange: bool = False


class Group:
    """Ranks that differ in some coordinates of a topology only: its rows, its planes, or all of it.

    Args:
        topology: The network.
        axes: The coordinates; None is all of them.

    Attributes:
        axes: The coordinates in which members differ.
        size: How many ranks a group has.
    """

    def __init__(self, topology: Topology, axes: Sequence[int] | None = None) -> None:
        self.topology = topology
        self.axes = tuple(range(len(topology.shape)) if axes is None else axes)
        self.sizes = tuple(topology.shape[axis] for axis in self.axes)
        self.size = math.prod(self.sizes)

    def displacement(self, index: int) -> int:
        """Return the topology's displacement for a displacement within the group."""
        coordinates = [0] * len(self.topology.shape)
        for axis, count in zip(self.axes, self.sizes, strict=True):
            coordinates[axis] = index % count
            index //= count
        return self.topology.rank(coordinates)

    def index(self, rank: int) -> int:
        """Return a rank's number within its group."""
        coordinates = self.topology.coordinates(rank)
        index, stride = 0, 1
        for axis, count in zip(self.axes, self.sizes, strict=True):
            index += coordinates[axis] * stride
            stride *= count
        return index

    def members(self, rank: int) -> list[int]:
        """List all ranks of ``rank``'s group by their index."""
        # Shifting back by the rank's own index gives the group's first member.
        first = self.topology.shift(
            rank, self.topology.difference(0, self.displacement(self.index(rank)))
        )
        return [self.topology.shift(first, self.displacement(index)) for index in range(self.size)]

    def strides(self) -> list[tuple[int, int]]:
        """List (count, stride) of the group's dimensions that have more than one rank."""
        out, stride = [], 1
        for count in self.sizes:
            if count > 1:
                out.append((count, stride))
            stride *= count
        return out

    def exchanges_symmetrically(self) -> bool:
        """Tell whether exchanges by bits of the index keep the symmetry of the network."""
        along_links = self.topology.along_links()
        return not any(along_links[axis] for axis in self.axes)


def schedule(kind: str, algorithm: str, size: int, group: Group) -> list[Round]:
    """List the rounds of a collective.

    Args:
        kind: Key of :data:`ALGORITHMS`.
        algorithm: One of the kind's algorithms.
        size: Bytes of the larger buffer: the input of a reduce-scatter, the output of an
            all-gather.
        group: The ranks that take part.

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
    # A group of one, and an empty buffer, send nothing and take no rounds.
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
    """Return the bytes of the largest of ``parts`` equal parts."""
    return ceil_div(size, parts)


def _all_to_all(algorithm: str, size: int, group: Group) -> list[Round]:
    if algorithm in ("one_shot", "direct"):
        sends = [(to, _share(size, group.size)) for to in range(1, group.size)]
        return (
            [Round(tuple(sends))] if algorithm == "one_shot" else [Round((send,)) for send in sends]
        )
    rounds = []
    for count, stride in group.strides():
        block = _share(size, count)
        if algorithm == "per_dimension":
            # Each dimension exchanges the full buffer, since blocks for other dimensions travel
            # along.
            rounds.append(Round(tuple((step * stride, block) for step in range(1, count))))
        else:
            # After k steps the k nearest ranks have their blocks, and the other blocks go on.
            rounds += [Round(((stride, block * (count - step)),)) for step in range(1, count)]
    return rounds


def _direct(kind: str, size: int, group: Group) -> list[Round]:
    block = _share(size, group.size)
    everyone = tuple((to, block) for to in range(1, group.size))
    # After the first round each owner adds up the blocks of all peers.
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
    # The way back gathers by the same exchanges in reverse, without reducing.
    gather = [dataclasses.replace(step, reduced=0) for step in reversed(scatter)]
    return {"all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": gather}[kind]


def _rings(kind: str, size: int, group: Group) -> list[Round]:
    scatter: list[Round] = []
    gather: list[Round] = []
    part = size
    # All-gathers go back through the dimensions in reverse, with parts that grow as they shrank.
    for count, stride in group.strides():
        part = _share(part, count)
        scatter += [Round(((stride, part),), reduced=part)] * (count - 1)
        gather = [Round(((stride, part),))] * (count - 1) + gather
    return {"all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": gather}[kind]


def least_sent_bytes(kind: str, size: float, ranks: int) -> float:
    """Return the fewest bytes that leave each rank in any algorithm.

    With nodes for ranks they are the bytes that leave each node.
    """
    if ranks == 1:
        return 0.0
    return {"all_reduce": 2.0}.get(kind, 1.0) * size * (ranks - 1) / ranks
