"""The parts of a step: tasks in rows, and the kinds of work that a task can be.

A *row* is a stream: its tasks run one at a time, in the order of the list. A task also waits for
the tasks that it names. Three kinds of row exist on a real rank and overlap freely: ``compute``,
one per stream of the collective library, and ``copy engine``.

A **fused** task is one kernel that computes and communicates. Its output leaves slice by slice
while it goes on, in the order in which the kernels of this library compute: the peers' slices
first, from the next rank on, and this rank's own last. A **consuming** task is the mirror image: it
computes the slices that have arrived while later ones are on their way.
"""

from __future__ import annotations

import dataclasses

from interlace.costs.time import SizedCall

# Names of rows; a library's streams have the names of their collectives.
COMPUTE, COPY = "compute", "copy engine"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A computation.

    Attributes:
        flops: Multiplications and additions.
        memory_bytes: Bytes that this GPU's memory reads and writes.
        given_ns: Nanoseconds of the kernel, if they are known instead.
        product: Sizes of the matrix product that the kernel computes, by which a machine with a
            profile times it; None for all other kernels.
        products: Number of such products, each with its own operands.
    """

    flops: float = 0.0
    memory_bytes: float = 0.0
    given_ns: int | None = None
    product: SizedCall | None = None
    products: int = 1


def matrix_product(
    m: float, n: float, k: float, itemsize: float, *, products: int = 1, world_size: int = 1
) -> Kernel:
    """Return the kernel of [m, k] by [k, n] matrix products, whose operands and results are moved
    once.

    Elements of four bytes are multiplied without tensor cores, as PyTorch does by default; only a
    machine with a profile knows the difference.

    Args:
        itemsize: Bytes of an element of the operands and the result.
        products: Number of such products, each with its own operands.
        world_size: Number of ranks whose rows these are; no tile of a fused kernel has rows of two
            ranks.
    """
    # Models may give sizes that do not divide evenly over ranks, and tiles have whole ones.
    rows, columns, inner = (max(1, round(size)) for size in (m, n, k))
    call = SizedCall(rows, columns, inner, int(itemsize), world_size, is_exact=itemsize == 4)
    moved = products * itemsize * (m * k + n * k + m * n)
    return Kernel(products * 2 * m * n * k, moved, product=call, products=products)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A library's collective over a group.

    Attributes:
        kind, algorithm: See :data:`interlace_sim.collectives.ALGORITHMS`.
        size: Bytes per rank of the larger buffer.
        axes: Coordinates in which the group's ranks differ; None is all ranks.
    """

    kind: str
    algorithm: str
    size: int
    axes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Exchanging:
    """A kernel that exchanges slices with its peers while it computes.

    Attributes:
        kernel: The computation.
        kind: Name of the collective.
        size: Bytes per rank of the collective's buffer.
        axes: Coordinates in which the group's ranks differ; None is all ranks.
        slices: Slices in which the data of one rank travels.
    """

    kernel: Kernel
    kind: str
    size: int
    axes: tuple[int, ...] | None = None
    slices: int = 4


@dataclasses.dataclass(frozen=True)
class Fused(Exchanging):
    """A kernel whose output goes into an all-to-all, a reduce-scatter or an all-reduce.

    Attributes:
        receive_bytes: Memory traffic after the peers' slices have arrived, such as adding slots.
        waits: Whether the kernel waits for the peers' slices; otherwise a consuming task does.
        gather_size: Bytes of the sum that the owners of an all-reduce then send to every rank;
            ``size`` by default.
        shares: Relative sizes of the slices of an all-to-all; by default they are equal.
    """

    receive_bytes: float = 0.0
    waits: bool = True
    gather_size: int | None = None
    shares: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Consuming(Exchanging):
    """An all-to-all or all-gather whose output a kernel computes on slice by slice, as it arrives.

    Attributes:
        sent_by: Name of a fused task of equal sizes that does not wait; without one, every slice
            is sent when this task starts.
    """

    sent_by: str | None = None


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of ``size`` bytes to the next rank of a group by a copy engine.

    It crosses the group's outermost coordinate, which is the longest way.
    """

    axes: tuple[int, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """A copy of ``size`` bytes from the host by a copy engine."""

    size: int


Work = Kernel | Collective | Fused | Consuming | Message | HostCopy


@dataclasses.dataclass(frozen=True)
class Task:
    """Work in a row that begins after the tasks of this rank that ``deps`` names."""

    name: str
    row: str
    work: Work
    deps: tuple[str, ...] = ()
