"""What a step is made of: tasks in rows, and the kinds of work that a task can be.

A *row* is a stream: its tasks run one at a time, in the order in which they were given. A task also
waits for the tasks that it names. Three kinds of row exist on a real rank, and nothing keeps them
from overlapping: ``compute``, one per collective library stream, and ``copy engine``.

A **fused** task is one kernel that computes and communicates. Its output leaves slice by slice
while it goes on, in the order in which the kernels of this library compute: what goes to others
first, from the neighbour on, what stays last. A **consuming** task is the mirror image: it starts
on what has arrived while the rest is on its way.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

COMPUTE, COPY = "compute", "copy engine"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Computation: FLOPs and bytes of this GPU's memory. ``seconds`` instead, where a time was
    given.
    """

    flops: float = 0.0
    memory_bytes: float = 0.0
    given_ns: int | None = None


@dataclasses.dataclass(frozen=True)
class Collective:
    """A library's collective over a group: ``size`` bytes a rank, see
    :mod:`interlace.sim.collectives`.
    """

    kind: str
    algorithm: str
    size: int
    axes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Fused:
    """A kernel whose output is an all-to-all, a reduce-scatter or an all-reduce of ``size`` bytes a
    rank.

    Attributes:
        slices: pieces in which what goes to one rank leaves.
        gather_size: bytes of the whole sum that the owners then send to everyone, in an all-reduce;
            ``size`` by default.
        receive_bytes: memory traffic after everything has arrived: the sum of the slots, say.
        waits: until the peers' slices are here; otherwise a consuming task does.
    """

    kernel: Kernel
    kind: Literal["all_to_all", "reduce_scatter", "all_reduce"]
    size: int
    axes: tuple[int, ...] | None = None
    slices: int = 4
    receive_bytes: float = 0.0
    waits: bool = True
    gather_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Consuming:
    """An all-to-all or all-gather whose output a kernel works on slice by slice, as it arrives.

    Attributes:
        sent_by: a fused task that does not wait and has the same sizes; without it, everything is
            sent when this one starts.
    """

    kernel: Kernel
    kind: Literal["all_to_all", "all_gather"]
    size: int
    axes: tuple[int, ...] | None = None
    slices: int = 4
    sent_by: str | None = None


@dataclasses.dataclass(frozen=True)
class Message:
    """``size`` bytes to the next rank of a group, by a copy engine; across its outermost
    coordinate, the longest way.
    """

    axes: tuple[int, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """``size`` bytes from the host, by a copy engine."""

    size: int


Work = Kernel | Collective | Fused | Consuming | Message | HostCopy


@dataclasses.dataclass(frozen=True)
class Task:
    """Work in a row, after other tasks of the same rank."""

    name: str
    row: str
    work: Work
    deps: tuple[str, ...] = ()
