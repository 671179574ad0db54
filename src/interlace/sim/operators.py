"""The operators as timelines, fused and unfused, from the formulas in :mod:`interlace.costs`.

Unfused is what stock PyTorch does: the computation, then the library's collective, then a kernel
that puts the result in order where one is needed. Fused is one kernel; its slices leave in the
order in which it computes them.
"""

from __future__ import annotations

import dataclasses

from interlace.costs import all_gather_gemm as all_gather_gemm_cost
from interlace.costs import gemm_all_reduce as gemm_all_reduce_cost
from interlace.costs import gemm_all_to_all as gemm_all_to_all_cost
from interlace.costs import gemm_reduce_scatter as gemm_reduce_scatter_cost
from interlace.costs import gemv_all_reduce as gemv_all_reduce_cost
from interlace.sim.work import COMPUTE, Collective, Consuming, Fused, Kernel, Task, Work

Axes = tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator both ways: what the fused kernel does, and the chain of works that it replaces."""

    name: str
    fused: Fused | Consuming
    unfused: tuple[tuple[str, str, Work], ...]

    def tasks(self, fused: bool, prefix: str = "", deps: tuple[str, ...] = ()) -> list[Task]:
        """The operator after ``deps``; its last task is the one to wait for."""
        if fused:
            return [Task(prefix + self.name, COMPUTE, self.fused, deps)]
        tasks: list[Task] = []
        for name, row, work in self.unfused:
            tasks.append(Task(prefix + name, row, work, (tasks[-1].name,) if tasks else deps))
        return tasks


def embedding_all_to_all(
    *,
    bags: float,
    pooling_factor: float,
    dim: int,
    itemsize: int,
    exchange_itemsize: int,
    index_itemsize: int = 8,
    axes: Axes = None,
    algorithm: str = "one_shot",
    unpack: bool = False,
    slices: int = 4,
) -> Operator:
    """Pooled rows of this rank's tables to the owners of the samples.

    Args:
        bags: of this rank's tables over the whole batch.
        unpack: whether the unfused exchange is followed by a kernel that orders its output.
    """
    exchanged = round(bags * dim * exchange_itemsize)
    # Rows, indices, offsets
    read = bags * pooling_factor * dim * itemsize + index_itemsize * (
        bags * pooling_factor + bags + 1
    )
    lookup = Kernel(bags * pooling_factor * dim, read + exchanged)
    unfused: list[tuple[str, str, Work]] = [
        ("embedding", COMPUTE, lookup),
        ("All-to-All", "all_to_all", Collective("all_to_all", algorithm, exchanged, axes)),
    ]
    if unpack:
        unfused.append(("unpack", COMPUTE, Kernel(0, 2 * exchanged)))
    return Operator(
        "embedding + All-to-All",
        Fused(lookup, "all_to_all", exchanged, axes, slices),
        tuple(unfused),
    )


def gemm_all_to_all(
    *,
    rows: int,
    columns: int,
    inner: int,
    itemsize: int,
    world_size: int,
    axes: Axes = None,
    algorithm: str = "one_shot",
    slices: int = 8,
) -> Operator:
    """``x [rows, inner] @ w[columns, inner].T``; its rows to their owners."""
    cost = gemm_all_to_all_cost.fused(
        rows=rows, columns=columns, inner=inner, itemsize=itemsize, world_size=world_size
    )
    kernel = Kernel(cost.flops, cost.memory_bytes)
    collective = Collective("all_to_all", algorithm, cost.size, axes)
    return Operator(
        "GEMM + All-to-All",
        Fused(kernel, "all_to_all", cost.size, axes, slices),
        (("GEMM", COMPUTE, kernel), ("All-to-All", "all_to_all", collective)),
    )


def gemm_reduce_scatter(
    *,
    rows: int,
    columns: int,
    inner: int,
    itemsize: int,
    world_size: int,
    axes: Axes = None,
    algorithm: str = "ring",
    slices: int = 8,
) -> Operator:
    """``x [rows, inner] @ w[columns, inner].T`` summed over ranks, its rows split over them."""
    cost = gemm_reduce_scatter_cost.fused(
        rows=rows, columns=columns, inner=inner, itemsize=itemsize, world_size=world_size
    )
    kernel = Kernel(cost.flops, cost.memory_bytes)
    collective = Collective("reduce_scatter", algorithm, cost.size, axes)
    return Operator(
        "GEMM + ReduceScatter",
        Fused(kernel, "reduce_scatter", cost.size, axes, slices, cost.receive_bytes),
        (("GEMM", COMPUTE, kernel), ("ReduceScatter", "reduce_scatter", collective)),
    )


def gemm_all_reduce(
    *,
    rows: int,
    columns: int,
    inner: int,
    itemsize: int,
    world_size: int,
    axes: Axes = None,
    algorithm: str = "ring",
    slices: int = 8,
) -> Operator:
    """``x [rows, inner] @ w[columns, inner].T`` summed over ranks, on every rank."""
    cost = gemm_all_reduce_cost.fused(
        rows=rows, columns=columns, inner=inner, itemsize=itemsize, world_size=world_size
    )
    kernel = Kernel(cost.flops, cost.memory_bytes)
    collective = Collective("all_reduce", algorithm, cost.size, axes)
    return Operator(
        "GEMM + AllReduce",
        Fused(kernel, "all_reduce", cost.size, axes, slices, cost.receive_bytes),
        (("GEMM", COMPUTE, kernel), ("AllReduce", "all_reduce", collective)),
    )


def gemv_all_reduce(
    *,
    tokens: int,
    rows: int,
    columns: int,
    itemsize: int,
    world_size: int,
    protocol: str = "two_phase",
    axes: Axes = None,
    algorithm: str = "ring",
    slices: int = 4,
) -> Operator:
    """``x [tokens, columns] @ w[rows, columns].T`` for few tokens, summed over ranks, on every
    rank; columns are the rank's.

    Args:
        protocol: of the fused kernel: ``"one_shot"`` (everyone's parts, as packed words, to
            everyone) or ``"two_phase"`` (parts to the owner of a row, its sum to everyone).
    """
    memory = gemv_all_reduce_cost.floor_memory_bytes(
        tokens=tokens, rows=rows, columns=columns, itemsize=itemsize
    )
    kernel = Kernel(2 * tokens * rows * columns, memory)
    size = tokens * rows * itemsize
    words = gemv_all_reduce_cost.part_bytes(tokens=tokens, rows=rows, itemsize=itemsize)
    call = gemv_all_reduce_cost.call_bytes(tokens=tokens, itemsize=itemsize)
    if protocol == "one_shot":
        fused = Fused(kernel, "all_to_all", (words + call) * world_size, axes, slices)
    else:
        fused = Fused(
            kernel, "all_reduce", words + call * world_size, axes, slices, gather_size=words
        )
    return Operator(
        "GEMV + AllReduce",
        fused,
        (
            ("GEMV", COMPUTE, kernel),
            ("AllReduce", "all_reduce", Collective("all_reduce", algorithm, size, axes)),
        ),
    )


def all_gather_gemm(
    *,
    rows: int,
    columns: int,
    inner: int,
    itemsize: int,
    world_size: int,
    axes: Axes = None,
    algorithm: str = "ring",
    slices: int = 8,
) -> Operator:
    """``x [rows, inner]``, gathered, times this rank's ``w[columns, inner].T``."""
    cost = all_gather_gemm_cost.fused(
        rows=rows, columns=columns, inner=inner, itemsize=itemsize, world_size=world_size
    )
    kernel = Kernel(cost.flops, cost.memory_bytes)
    collective = Collective("all_gather", algorithm, cost.size, axes)
    return Operator(
        "AllGather + GEMM",
        Consuming(kernel, "all_gather", cost.size, axes, slices),
        (("AllGather", "all_gather", collective), ("GEMM", COMPUTE, kernel)),
    )
