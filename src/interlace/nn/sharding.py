"""Sharding plans: embedding tables, their shards, the rank that holds each of them, and
``make_plan``, which balances the ranks within their memory.
"""

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
from interlace.gemm.operands import integer
from interlace.operators.embedding_all_to_all.config import MAX_WIDTH
from interlace.units import ceil_div, format_bytes, format_ns

if TYPE_CHECKING:
    from rich.table import Table

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_VECTOR = 4  # columns: widths that are multiples of it run at full speed


@dataclasses.dataclass(frozen=True)
class EmbeddingTable:
    """Description of one embedding table of a model.

    Attributes:
        name: Unique name; the feature's name in a ``KeyedJaggedTensor``. No dots or colons.
        rows: Number of embeddings.
        width: D, number of elements of an embedding.
        mode: Pooling of a bag, ``"sum"`` or ``"mean"``.
        dtype: dtype of the table: float32, float16 or bfloat16. Sums are float32.
        bag_length: Number of lookups of every bag if it is fixed (1 for one-hot features); None if
            it varies.
        pooling_factor: Average number of lookups per bag, for balancing; default: ``bag_length``,
            or 1.
        column_shards: Minimum number of shards that the columns are split into.

    Raises:
        ArgumentError: a name, size, mode or dtype is not allowed.
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
        for name in ("rows", "width", "bag_length", "column_shards"):
            value = getattr(self, name)
            if name != "bag_length" or value is not None:
                rule = f"EmbeddingTable {self.name!r}: {name} must be an integer"
                object.__setattr__(self, name, integer(rule, value))
        length = self.bag_length
        rules = {
            # Dots separate the parts of a state dict's keys, colons the columns in a shard's name.
            "name must not be empty and have neither dots nor colons": (
                bool(self.name) and not set(self.name) & {".", ":"}
            ),
            f"rows and width must be positive; got {self.rows} and {self.width}": (
                self.rows > 0 and self.width > 0
            ),
            f"mode must be sum or mean; got {self.mode!r}": self.mode in ("sum", "mean"),
            f"dtype must be float32, float16 or bfloat16; got {self.dtype}": self.dtype in _DTYPES,
            f"bag_length must be positive or None; got {length}": length is None or length > 0,
            f"column_shards must be 1 to {self.width}; got {self.column_shards}": (
                1 <= self.column_shards <= self.width
            ),
        }
        for rule, is_kept in rules.items():
            if not is_kept:
                raise ArgumentError(f"EmbeddingTable {self.name!r}: {rule}.")

    @property
    def lookups(self) -> float:
        """The average number of lookups per bag."""
        if self.pooling_factor is not None:
            return self.pooling_factor
        return 1.0 if self.bag_length is None else float(self.bag_length)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Columns ``start`` to ``stop`` of a table, with all its rows, and the rank that holds them.

    Attributes:
        table: The table.
        start, stop: The first column, and the first column after the shard.
        rank: The rank that holds the shard.
        cost: Bytes that the shard stores, and moves per step.
    """

    table: EmbeddingTable
    start: int
    stop: int
    rank: int
    cost: ShardCost

    @property
    def name(self) -> str:
        """The shard's name in state dicts, unique in a plan: ``"user:0-64"``."""
        return f"{self.table.name}:{self.start}-{self.stop}"

    @property
    def label(self) -> str:
        """The table's name, with the columns if the table is split: ``"user[0:64]"``."""
        return (
            self.table.name
            if self.width == self.table.width
            else f"{self.table.name}[{self.start}:{self.stop}]"
        )

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.stop - self.start

    @property
    def kind(self) -> tuple[str, torch.dtype]:
        """The table's mode and dtype: one call of the operator pools all shards of one kind."""
        return self.table.mode, self.table.dtype


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """The shards of a model's tables and the rank of each; the same plan on every rank.

    Attributes:
        tables: The tables in the order of the model.
        shards: The shards by rank, then by kind, then by table and column, which is the order of
            each rank's operator calls.
        world_size: Number of ranks.
        machine: Machine whose memory and links give the floors.
    """

    tables: tuple[EmbeddingTable, ...]
    shards: tuple[Shard, ...]
    world_size: int
    machine: Machine = H200_NODE

    @functools.cached_property
    def kinds(self) -> tuple[tuple[str, torch.dtype], ...]:
        """The kinds (mode and dtype) of all tables, in their order; each is one operator call."""
        return tuple(dict.fromkeys((table.mode, table.dtype) for table in self.tables))

    def of_rank(self, rank: int, kind: tuple[str, torch.dtype] | None = None) -> list[Shard]:
        """Return a rank's shards in the order of its operator calls; with ``kind``, those of it."""
        return [shard for shard in self.shards if shard.rank == rank and kind in (None, shard.kind)]

    def in_output_order(self) -> list[Shard]:
        """Return the shards in the order of the outputs' columns: by kind, and then by rank."""
        return [shard for kind in self.kinds for shard in self.shards if shard.kind == kind]

    def stack_order(self) -> list[int]:
        """Return the index of the table at each position of the stacked output ``[n, T, D]``.

        Without a stackable output it is ``[0, 1, 2, ...]``, the order of the model.
        """
        if not self.stackable:
            return list(range(len(self.tables)))
        order = {table.name: i for i, table in enumerate(self.tables)}
        return [order[shard.table.name] for shard in self.in_output_order()]

    @functools.cached_property
    def stackable(self) -> bool:
        """True if a view of the output is ``[n, T, D]``: all tables unsplit, and of one width."""
        return (
            len(self.shards) == len(self.tables)
            and len({table.width for table in self.tables}) == 1
        )

    def cost(self, rank: int) -> ShardCost:
        """Return the bytes that a rank stores, and moves in one step."""
        return sum((shard.cost for shard in self.of_rank(rank)), NOTHING)

    def floor_ns(self, rank: int) -> float:
        """Return the least time of a rank's part of a step on ``machine``, in ns."""
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
        """Return a table with one row per shard, for ``rich.print``."""
        # Imported here, because only a program that prints a plan needs it.
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
    """Assign every table to a rank, so that the slowest rank's least time is low.

    Columns of a table are split for three reasons only: the table is wider than the operator takes;
    it does not fit on a rank; or there are fewer tables than ranks. The assignment is greedy: the
    costliest shard first, each to the rank that is fastest with it (of ranks with room; of equally
    fast ranks, the one with the least memory traffic, then the lowest).

    Args:
        tables: Tables with different names, in the order of the model.
        world_size: Number of ranks.
        batch: Approximate number of samples in the global batch; only ratios matter.
        capacity_bytes: Memory for tables and optimizer states on each rank; default: no limit.
        state_bytes_per_row: Size of the optimizer's state, per row of each shard.
        copies: Number of copies of a shard that a rank holds: 2 with dense gradients.
        machine: Machine whose memory and links are weighed against each other.

    Returns:
        The plan: a function of the arguments alone, so it is the same on every rank.

    Raises:
        ArgumentError: there are no tables, one is no ``EmbeddingTable``, two have one name, or they
            do not fit.
    """
    for table in tables:
        if not isinstance(table, EmbeddingTable):
            raise ArgumentError(
                f"ShardingPlan: tables must be of interlace.nn.EmbeddingTable; got {table!r}. Say "
                'EmbeddingTable("user", rows=1000, width=64).'
            )
    names = [table.name for table in tables]
    if not names or len(set(names)) != len(names):
        raise ArgumentError(
            f"ShardingPlan: there must be tables, each of another name; got {names}."
        )
    limit = _Limits(world_size, batch, capacity_bytes, state_bytes_per_row, copies, machine)
    parts = {table.name: _least_parts(table, limit) for table in tables}
    # A rank without a shard would do nothing, so the costliest table is split until every rank can
    # have one.
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
    shards = _assign(pieces, limit)
    order = {table.name: i for i, table in enumerate(tables)}
    kinds = list(dict.fromkeys((table.mode, table.dtype) for table in tables))
    shards.sort(key=lambda s: (s.rank, kinds.index(s.kind), order[s.table.name], s.start))
    return ShardingPlan(tuple(tables), tuple(shards), world_size, machine)


@dataclasses.dataclass(frozen=True)
class _Limits:
    """The limits and weights of :func:`make_plan`, which has them as arguments."""

    world_size: int
    batch: int
    capacity_bytes: int | None
    state_bytes_per_row: int
    copies: int
    machine: Machine

    def cost(self, table: EmbeddingTable, width: int) -> ShardCost:
        """Return the cost of ``width`` columns of a table."""
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
        """Return the least time of a step of this cost, in ns."""
        return self.machine.floor_ns(cost.memory_bytes, cost.link_bytes)

    def fits(self, cost: ShardCost) -> bool:
        """Tell if a rank has room for shards of this cost."""
        return self.capacity_bytes is None or cost.storage_bytes <= self.capacity_bytes


def _least_parts(table: EmbeddingTable, limit: _Limits) -> int:
    """Return the least number of column shards that the operator takes and a rank can hold.

    Raises:
        ArgumentError: the smallest possible shard does not fit.
    """
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
    """Cut a table's columns into ``parts`` ranges, at most one column group apart in size.

    A column group is 4 columns, or 1 if the table has fewer than 4 per part.
    """
    # Edges at multiples of 4 columns keep rows aligned for vector loads.
    unit = _VECTOR if table.width >= parts * _VECTOR else 1
    groups = ceil_div(table.width, unit)
    edges = [min(table.width, unit * (groups * i // parts)) for i in range(parts + 1)]
    return list(itertools.pairwise(edges))


def _assign(pieces: list[tuple[EmbeddingTable, int, int]], limit: _Limits) -> list[Shard]:
    """Assign ranges of columns to ranks, the costliest first.

    Raises:
        ArgumentError: no rank has room for a range.
    """
    loads = [NOTHING] * limit.world_size
    costs = [limit.cost(table, stop - start) for table, start, stop in pieces]
    shards = []
    # Large pieces first: small ones can fill the gaps that they leave. The index as a last key
    # makes the order, and so the plan, the same on every rank.
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
    subject: str,
    limit: _Limits,
    table: EmbeddingTable,
    costs: Sequence[ShardCost] = (),
    loads: Sequence[ShardCost] = (),
) -> ArgumentError:
    """Return the error for columns that do not fit.

    Args:
        subject: The columns, for the message.
        limit: The limits.
        table: The table of the columns.
        costs: Costs of all ranges, once tables have been cut.
        loads: Costs that each rank has been assigned so far.
    """
    assert limit.capacity_bytes is not None
    if loads:
        held = ", ".join(format_bytes(load.storage_bytes) for load in loads)
        total = format_bytes(sum(cost.storage_bytes for cost in costs))
        need = f"all tables need {total}, and ranks hold {held} already"
    else:
        size = format_bytes(limit.cost(table, table.width).storage_bytes)
        need = f"it needs {size}, and its columns cannot be split further"
    ranks = "1 rank has" if limit.world_size == 1 else f"{limit.world_size} ranks have"
    return ArgumentError(
        f"ShardingPlan: {subject} must fit; got {ranks} room for "
        f"{format_bytes(limit.capacity_bytes)} each, while {need}. "
        f"Use more ranks, fewer rows, or a smaller dtype."
    )
