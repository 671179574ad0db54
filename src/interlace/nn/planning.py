"""``make_plan``: a sharding plan that balances the ranks, within their memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from interlace.costs.machine import H200_NODE, Machine
from interlace.costs.sharding import NOTHING, ShardCost, shard_cost
from interlace.errors import ArgumentError
from interlace.nn.sharding import EmbeddingTable, Shard, ShardingPlan
from interlace.operators.embedding_all_to_all.config import MAX_WIDTH
from interlace.units import ceil_div, format_bytes

_VECTOR = 4  # columns: widths that are multiples of it run at full speed


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


def free_bytes(device: torch.device, ranks_on_machine: int) -> int:
    """Return the number of bytes that can still be allocated for one rank.

    On the CPU it is the rank's share of the machine's available memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024 // ranks_on_machine
    except (OSError, KeyError, ValueError):
        # The system does not say. The allocation itself will fail if there is too little.
        return 1 << 62


__all__ = ["free_bytes", "make_plan"]
