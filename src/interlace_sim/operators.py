"""Timelines of operators, fused and unfused, from the formulas of :mod:`interlace.costs`.

Unfused is the program that stock PyTorch runs: the computation, then the library's collective, then
a kernel that orders the result if one is needed. Fused is one kernel, whose slices leave in the
order in which it computes them.

Every operator around one matrix product is a function of this module under its own name, such as
``operators.gemm_all_reduce(rows=..., columns=..., inner=..., itemsize=..., world_size=...)``:
:func:`product_operator` builds it from the register of costs, and a newly declared one needs no
edit here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from interlace.costs import OPERATOR_COSTS, find_cost
from interlace.costs import gemv_all_reduce as gemv_costs
from interlace_sim.collectives import ALGORITHMS, TITLES
from interlace_sim.work import (
    COMPUTE,
    Collective,
    Consuming,
    Fused,
    Kernel,
    Task,
    Work,
    matrix_product,
)

Axes = tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator in both forms.

    Attributes:
        name: Title of the fused kernel in results.
        fused: Work of the fused kernel.
        unfused: Name, row and work of each task of the chain that the fused kernel replaces.
    """

    name: str
    fused: Fused | Consuming
    unfused: tuple[tuple[str, str, Work], ...]

    def tasks(self, fused: bool, prefix: str = "", deps: tuple[str, ...] = ()) -> list[Task]:
        """List the operator's tasks after ``deps``; later tasks wait for the last of them."""
        if fused:
            return [Task(prefix + self.name, COMPUTE, self.fused, deps)]
        tasks: list[Task] = []
        for name, row, work in self.unfused:
            tasks.append(Task(prefix + name, row, work, (tasks[-1].name,) if tasks else deps))
        return tasks


def product_operator(
    operator: str,
    *,
    axes: Axes = None,
    algorithm: str | None = None,
    slices: int = 8,
    **sizes: int,
) -> Operator:
    """Build the timelines of an operator around one matrix product.

    Args:
        operator: Name under which the operator's cost is declared.
        axes: Coordinates of the ranks that take part; None is all ranks.
        algorithm: The library's algorithm; by default the collective's first in
            :data:`interlace_sim.collectives.ALGORITHMS`.
        slices: Slices in which the fused kernel's output for one rank leaves.
        sizes: Arguments of the operator's cost formula: ``rows``, ``columns``, ``inner``,
            ``itemsize`` and ``world_size``.

    Raises:
        ArgumentError: no operator of that name has declared a cost.
    """
    declared = find_cost(operator)
    kind: Any = declared.collective
    title = TITLES[kind]
    cost = declared.formula(**sizes)
    # Fused and unfused compute alike, so that the results differ by the overlap alone.
    product = None
    if declared.computation == "GEMM":
        m, n, k = sizes["rows"], sizes["columns"], sizes["inner"]
        product = matrix_product(m, n, k, sizes["itemsize"], world_size=sizes["world_size"]).product
    kernel = Kernel(cost.flops, cost.memory_bytes, product=product)
    computation: tuple[str, str, Work] = (declared.computation, COMPUTE, kernel)
    exchange: tuple[str, str, Work] = (
        title,
        kind,
        Collective(kind, algorithm or ALGORITHMS[kind][0], cost.size, axes),
    )
    if declared.collective_first:
        fused: Fused | Consuming = Consuming(kernel, kind, cost.size, axes, slices)
        return Operator(f"{title} + {declared.computation}", fused, (exchange, computation))
    fused = Fused(kernel, kind, cost.size, axes, slices, cost.receive_bytes)
    return Operator(f"{declared.computation} + {title}", fused, (computation, exchange))


# Only operators around a single product: the others need sizes of their own, and have functions.
def __getattr__(name: str) -> Any:
    declared = OPERATOR_COSTS.get(name)
    if declared is None or declared.computation != "GEMM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.partial(product_operator, name)


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
    """Build the timelines of looking up rows of this rank's tables and sending the pooled rows to
    the owners of the samples.

    Args:
        bags: Bags of this rank's tables over the global batch.
        pooling_factor: Lookups per bag on average.
        dim: Columns of a table.
        itemsize: Bytes of an element of a table.
        exchange_itemsize: Bytes of an element that travels.
        index_itemsize: Bytes of an index and of an offset.
        axes: Coordinates of the ranks that take part; None is all ranks.
        algorithm: The library's All-to-All.
        unpack: Whether a kernel that orders its output follows the unfused exchange.
        slices: Slices in which the fused kernel's output for one rank leaves.
    """
    exchanged = round(bags * dim * exchange_itemsize)
    # The declared formula counts each table's own lookups; a workload knows their average only.
    # Read are the rows, the indices, and the offsets, which are one more than the bags.
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
    """Build the timelines of ``x [tokens, columns] @ w[rows, columns].T`` for few tokens, summed
    over ranks, on every rank.

    Args:
        columns: Columns of this rank's shard of w.
        itemsize: Bytes of an element of x, w and the result.
        protocol: Protocol of the fused kernel: ``"one_shot"`` (every rank sends its parts, as
            packed words, to every peer) or ``"two_phase"`` (parts go to the owner of a row, whose
            sum goes to every peer).
        axes: Coordinates of the ranks that take part; None is all ranks.
        algorithm: The library's AllReduce.
        slices: Slices in which the fused kernel's output for one rank leaves.
    """
    memory = gemv_costs.floor_memory_bytes(
        tokens=tokens, rows=rows, columns=columns, itemsize=itemsize
    )
    kernel = Kernel(2 * tokens * rows * columns, memory)
    size = tokens * rows * itemsize
    # Values travel packed with their epoch, so the fused kernel moves more bytes than the library.
    words = gemv_costs.part_bytes(tokens=tokens, rows=rows, itemsize=itemsize)
    call = gemv_costs.call_bytes(tokens=tokens, itemsize=itemsize)
    if protocol == "one_shot":
        # Every peer gets every word, so the exchange is an all-to-all of one part per rank.
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
