"""Which rank holds which table: the plan, and how it is made."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from interlace.costs.machine import H200_NODE, Machine
from interlace.costs.sharding import NOTHING, ShardCost, shard_cost
from interlace.errors import ArgumentError
from interlace.units import ceil_div, format_bytes, format_ns

if TYPE_CHECKING:
    from rich.table import Table

MAX_WIDTH = 2048
"""Columns that the operator takes; a wider table is split."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_VECTOR = 4  # columns: widths that are multiples of it run at full speed


@dataclasses.dataclass(frozen=True)
class EmbeddingTable:
    """One table, as a model describes it.

    Attributes:
        name: unique; the feature's name in a ``KeyedJaggedTensor``. No dots or colons.
        rows: embeddings.
        width: D, elements of an embedding.
        mode: ``"sum"`` or ``"mean"`` of a bag.
        dtype: of the table: float32, float16 or bfloat16. Sums are float32.
        bag_length: lookups of every bag, where that is fixed (1 for one-hot features); None where
            it varies.
        pooling_factor: lookups of a bag on average, for balancing; default: ``bag_length``, or 1.
        column_shards: split the columns into so many shards at least.

    Raises:
        ArgumentError: a name, size, mode or dtype that cannot be.
    """

    name: str
    rows: int
    width: int
    mode: str = "sum"
    dtype: torch.dtype = torch.float32
    bag_length: int | None = None
    pooling_factor: float | None = None
    column_shards: int = 1

    def __post_init__(self) -> None:
        what = f"EmbeddingTable {self.name!r}"
        if not self.name or set(self.name) & {".", ":"}:
            raise ArgumentError(f"{what}: name must not be empty and have neither dots nor colons.")
        if self.rows < 1 or self.width < 1:
            raise ArgumentError(
                f"{what}: rows and width must be positive; got {self.rows} and {self.width}."
            )
        if self.mode not in ("sum", "mean"):
            raise ArgumentError(f"{what}: mode must be sum or mean; got {self.mode!r}.")
        if self.dtype not in _DTYPES:
            raise ArgumentError(
                f"{what}: dtype must be float32, float16 or bfloat16; got {self.dtype}."
            )
        if self.bag_length is not None and self.bag_length < 1:
            raise ArgumentError(
                f"{what}: bag_length must be positive or None; got {self.bag_length}."
            )
        if not 1 <= self.column_shards <= self.width:
            raise ArgumentError(
                f"{what}: column_shards must be 1 to {self.width}; got {self.column_shards}."
            )

    @property
    def lookups(self) -> float:
        """Of a bag, on average."""
        if self.pooling_factor is not None:
            return self.pooling_factor
        return 1.0 if self.bag_length is None else float(self.bag_length)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Columns ``start`` to ``stop`` of a table, all its rows, and who holds them."""

    table: EmbeddingTable
    start: int
    stop: int
    rank: int
    cost: ShardCost

    @property
    def name(self) -> str:
        """``"user:0-64"``: unique in a plan, and all that a state dict need know."""
        return f"{self.table.name}:{self.start}-{self.stop}"

    @property
    def label(self) -> str:
        """The table's name, with the columns if they are not all."""
        return (
            self.table.name
            if self.width == self.table.width
            else f"{self.table.name}[{self.start}:{self.stop}]"
        )

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def kind(self) -> tuple[str, torch.dtype]:
        """Shards of one kind, mode and dtype, are pooled by one call of the operator."""
        return self.table.mode, self.table.dtype


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """Every shard and its rank; the same on every rank, as it is made from the same numbers.

    Attributes:
        tables: in the order of the model.
        shards: by rank, then by kind, then by table and column: a rank's part is the order of its
            operator calls.
        world_size: ranks.
    """

    tables: tuple[EmbeddingTable, ...]
    shards: tuple[Shard, ...]
    world_size: int
    machine: Machine = H200_NODE

    @functools.cached_property
    def kinds(self) -> tuple[tuple[str, torch.dtype], ...]:
        """Modes and dtypes that occur, one operator call each, in the order of the tables."""
        return tuple(dict.fromkeys((table.mode, table.dtype) for table in self.tables))

    def of_rank(self, rank: int, kind: tuple[str, torch.dtype] | None = None) -> list[Shard]:
        """A rank's shards in the order of their calls; of one kind if that is given."""
        return [shard for shard in self.shards if shard.rank == rank and kind in (None, shard.kind)]

    def in_output_order(self) -> list[Shard]:
        """Shards as the operators' outputs have them from left to right: kind by kind, and within
        one rank by rank.
        """
        return [shard for kind in self.kinds for shard in self.shards if shard.kind == kind]

    def stack_order(self) -> list[int]:
        """Which table each shard of the output is, where they can be stacked: all whole and equally
        wide; else 0, 1, 2 ...
        """
        if not self.stackable:
            return list(range(len(self.tables)))
        order = {table.name: i for i, table in enumerate(self.tables)}
        return [order[shard.table.name] for shard in self.in_output_order()]

    @functools.cached_property
    def stackable(self) -> bool:
        """Whether the operator's output is ``[n, T, D]`` as it is: no table is split, and all have
        the same width.
        """
        return (
            len(self.shards) == len(self.tables)
            and len({table.width for table in self.tables}) == 1
        )

    def cost(self, rank: int) -> ShardCost:
        """What a step costs a rank."""
        return sum((shard.cost for shard in self.of_rank(rank)), NOTHING)

    def floor_ns(self, rank: int) -> float:
        """The least time of a rank's part of a step on ``machine``."""
        cost = self.cost(rank)
        return self.machine.floor_ns(cost.memory_bytes, cost.link_bytes)

    def __str__(self) -> str:
        lines = [f"ShardingPlan of {len(self.tables)} tables over {self.world_size} ranks"]
        for rank in range(self.world_size):
            cost = self.cost(rank)
            names = ", ".join(shard.label for shard in self.of_rank(rank)) or "nothing"
            lines.append(
                f"  rank {rank}: {names} ({format_bytes(cost.storage_bytes)}, "
                f"{format_ns(self.floor_ns(rank))} a step)"
            )
        return "\n".join(lines)

    def __rich__(self) -> Table:
        """A row a shard, for ``rich.print``."""
        from rich import box
        from rich.table import Table

        table = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            caption=f"Least time of a step on {self.machine.name}, by rank.",
        )
        for heading in ("rank", "table", "rows", "columns", "pooled", "storage", "floor"):
            table.add_column(
                heading,
                justify="left" if heading in ("table", "pooled") else "right",
                no_wrap=heading != "table",
            )
        for rank in range(self.world_size):
            for i, shard in enumerate(self.of_rank(rank)):
                table.add_row(
                    str(rank) if i == 0 else "",
                    shard.table.name,
                    str(shard.table.rows),
                    f"{shard.start}-{shard.stop}",
                    f"{shard.table.mode} of {str(shard.table.dtype).removeprefix('torch.')}",
                    format_bytes(shard.cost.storage_bytes),
                    format_ns(self.floor_ns(rank)) if i == 0 else "",
                )
        return table


def make_plan(
    tables: Sequence[EmbeddingTable],
    world_size: int,
    *,
    batch: int = 8192,
    capacity_bytes: int | None = None,
    state_bytes_per_row: int = 0,
    copies: int = 1,
    machine: Machine = H200_NODE,
) -> ShardingPlan:
    """Give every table to a rank, so that the slowest rank's floor is low.

    Tables stay whole, but for three reasons to split columns: the table is wider than the operator
    takes; it does not fit on a rank; or there are fewer tables than ranks. Then greedily: the
    costliest shard first, each to the rank that is fastest with it (of those with room; of equally
    fast ones the one with the least memory traffic, then the lowest).

    Args:
        tables: with different names.
        world_size: ranks.
        batch: samples of the global batch, roughly; only ratios matter.
        capacity_bytes: for tables and optimizer states on each rank; default: no limit.
        state_bytes_per_row: of the optimizer, for each shard.
        copies: of a shard that a rank holds: 2 where there are dense gradients.
        machine: whose memory and links are weighed against each other.

    Raises:
        ArgumentError: no tables, two of one name, or tables that do not fit.
    """
    names = [table.name for table in tables]
    if not names or len(set(names)) != len(names):
        raise ArgumentError(
            f"ShardingPlan: there must be tables, each of another name; got {names}."
        )
    limit = _Limits(world_size, batch, capacity_bytes, state_bytes_per_row, copies, machine)
    parts = {table.name: _least_parts(table, limit) for table in tables}
    while sum(parts.values()) < world_size:
        splittable = [
            table for table in tables if parts[table.name] < ceil_div(table.width, _VECTOR)
        ]
        if not splittable:
            break
        costliest = max(
            splittable,
            key=lambda table: limit.time(limit.cost(table, table.width)) / parts[table.name],
        )
        parts[costliest.name] += 1
    pieces = [(table, *columns) for table in tables for columns in _cut(table, parts[table.name])]
    shards = _place(pieces, limit)
    order = {table.name: i for i, table in enumerate(tables)}
    kinds = list(dict.fromkeys((table.mode, table.dtype) for table in tables))
    shards.sort(key=lambda s: (s.rank, kinds.index(s.kind), order[s.table.name], s.start))
    return ShardingPlan(tuple(tables), tuple(shards), world_size, machine)


@dataclasses.dataclass(frozen=True)
class _Limits:
    """What :func:`make_plan` weighs."""

    world_size: int
    batch: int
    capacity_bytes: int | None
    state_bytes_per_row: int
    copies: int
    machine: Machine

    def cost(self, table: EmbeddingTable, width: int) -> ShardCost:
        return shard_cost(
            rows=table.rows,
            width=width,
            itemsize=table.dtype.itemsize,
            pooling_factor=table.lookups,
            batch=self.batch,
            world_size=self.world_size,
            state_bytes_per_row=self.state_bytes_per_row,
            copies=self.copies,
        )

    def time(self, cost: ShardCost) -> float:
        return self.machine.floor_ns(cost.memory_bytes, cost.link_bytes)

    def fits(self, cost: ShardCost) -> bool:
        return self.capacity_bytes is None or cost.storage_bytes <= self.capacity_bytes


def _least_parts(table: EmbeddingTable, limit: _Limits) -> int:
    """The fewest column shards that the operator takes and a rank can hold."""
    parts = max(table.column_shards, ceil_div(table.width, MAX_WIDTH))
    while not limit.fits(
        limit.cost(table, max(stop - start for start, stop in _cut(table, parts)))
    ):
        if parts >= ceil_div(table.width, _VECTOR):
            raise _too_large(
                f"table {table.name!r} of {table.rows} rows and {table.width} columns", limit, table
            )
        parts += 1
    return parts


def _cut(table: EmbeddingTable, parts: int) -> list[tuple[int, int]]:
    """``parts`` ranges of columns, of multiples of 4 where the width allows, at most one column
    group apart in size.
    """
    unit = _VECTOR if table.width >= parts * _VECTOR else 1
    groups = ceil_div(table.width, unit)
    edges = [min(table.width, unit * (groups * i // parts)) for i in range(parts + 1)]
    return list(itertools.pairwise(edges))


def _place(pieces: list[tuple[EmbeddingTable, int, int]], limit: _Limits) -> list[Shard]:
    loads = [NOTHING] * limit.world_size
    costs = [limit.cost(table, stop - start) for table, start, stop in pieces]
    shards = []
    for i in sorted(
        range(len(pieces)), key=lambda i: (-limit.time(costs[i]), -costs[i].storage_bytes, i)
    ):
        with_it = [load + costs[i] for load in loads]
        fitting = [rank for rank in range(limit.world_size) if limit.fits(with_it[rank])]
        table, start, stop = pieces[i]
        if not fitting:
            raise _too_large(
                f"columns {start}-{stop} of table {table.name!r}", limit, table, costs, loads
            )
        rank = min(
            fitting, key=lambda rank: (limit.time(with_it[rank]), with_it[rank].memory_bytes, rank)
        )
        loads[rank] = with_it[rank]
        shards.append(Shard(table, start, stop, rank, costs[i]))
    return shards


def _too_large(
    what: str,
    limit: _Limits,
    table: EmbeddingTable,
    costs: Sequence[ShardCost] = (),
    loads: Sequence[ShardCost] = (),
) -> ArgumentError:
    assert limit.capacity_bytes is not None
    if loads:
        held = ", ".join(format_bytes(load.storage_bytes) for load in loads)
        total = format_bytes(sum(cost.storage_bytes for cost in costs))
        need = f"all tables need {total}, and ranks hold {held} already"
    else:
        need = f"it needs {format_bytes(limit.cost(table, table.width).storage_bytes)}, and its columns cannot be split further"
    ranks = "1 rank has" if limit.world_size == 1 else f"{limit.world_size} ranks have"
    return ArgumentError(
        f"ShardingPlan: {what} must fit; got {ranks} room for "
        f"{format_bytes(limit.capacity_bytes)} each, while {need}. "
        f"Use more ranks, fewer rows, or a smaller dtype."
    )


def free_bytes(device: torch.device, ranks_on_machine: int) -> int:
    """What can still be allocated for one rank; on the CPU, its share of the machine's available
    memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024 // ranks_on_machine
    except (OSError, KeyError, ValueError):
        return 1 << 62  # no way to tell: the allocation itself will


__all__ = ["MAX_WIDTH", "EmbeddingTable", "Shard", "ShardingPlan", "free_bytes", "make_plan"]
