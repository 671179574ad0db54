"""Sharding plans: embedding tables, their shards, and the rank that holds each of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from interlace.costs.machine import H200_NODE, Machine
from interlace.costs.sharding import NOTHING, ShardCost
from interlace.errors import ArgumentError
from interlace.units import format_bytes, format_ns

if TYPE_CHECKING:
    from rich.table import Table

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
        subject = f"EmbeddingTable {self.name!r}"
        # Dots separate the parts of a state dict's keys, colons the columns in a shard's name.
        if not self.name or set(self.name) & {".", ":"}:
            raise ArgumentError(
                f"{subject}: name must not be empty and have neither dots nor colons."
            )
        if self.rows < 1 or self.width < 1:
            raise ArgumentError(
                f"{subject}: rows and width must be positive; got {self.rows} and {self.width}."
            )
        if self.mode not in ("sum", "mean"):
            raise ArgumentError(f"{subject}: mode must be sum or mean; got {self.mode!r}.")
        if self.dtype not in _DTYPES:
            raise ArgumentError(
                f"{subject}: dtype must be float32, float16 or bfloat16; got {self.dtype}."
            )
        if self.bag_length is not None and self.bag_length < 1:
            raise ArgumentError(
                f"{subject}: bag_length must be positive or None; got {self.bag_length}."
            )
        if not 1 <= self.column_shards <= self.width:
            raise ArgumentError(
                f"{subject}: column_shards must be 1 to {self.width}; got {self.column_shards}."
            )

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


__all__ = ["EmbeddingTable", "Shard", "ShardingPlan"]
