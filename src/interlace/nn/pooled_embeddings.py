"""``PooledEmbeddings``: pooled embeddings in the order of the plan, and by table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from interlace.nn.sharding import EmbeddingTable, Shard, ShardingPlan


@dataclasses.dataclass(frozen=True)
class PooledEmbeddings:
    """Pooled embeddings of this rank's n samples, in the order in which the operator stores them.

    Attributes:
        values: ``[n, sum of D]`` of the module's output dtype: shards side by side in the order of
            ``shards``, which is by kind and rank, not by table.
        shards: The shards that the columns of ``values`` belong to, from left to right.
        plan: The plan that the shards are of.
    """

    values: torch.Tensor
    shards: list[Shard]
    plan: ShardingPlan

    def tables(self) -> dict[str, torch.Tensor]:
        """Return every table's ``[n, D]`` by the table's name, in the order of the model.

        They are views of ``values``, except for a table whose columns are not side by side there.
        """
        by_table: dict[str, list[tuple[int, torch.Tensor]]] = {
            table.name: [] for table in self.plan.tables
        }
        # One split instead of one slice per table, because its backward pass is one concatenation,
        # where slices would each fill a gradient of full width with zeros.
        for shard, part in zip(self.shards, self._runs(), strict=True):
            if part is not None:
                by_table[shard.table.name].append((shard.start, part))
        return {
            name: parts[0][1]
            if len(parts) == 1
            else torch.cat([part for _, part in sorted(parts, key=lambda p: p[0])], 1)
            for name, parts in by_table.items()
        }

    def ordered(self) -> torch.Tensor:
        """Return ``[n, sum of D]`` in the order of the model's tables.

        It is ``values`` itself if the columns are in that order already, and a copy otherwise.
        """
        model_order = [
            (table.name, start) for table in self.plan.tables for start in self._starts(table)
        ]
        # With one rank, or with whole tables dealt out in order, no copy is needed.
        if [(shard.table.name, shard.start) for shard in self.shards] == model_order:
            return self.values
        return torch.cat(list(self.tables().values()), 1)

    def stacked(self) -> torch.Tensor:
        """Return ``[n, T, D]`` of T tables of one width D, in the order of ``plan.stack_order()``.

        It is a view of ``values``, unless a table is split by columns: then it is a copy, in the
        order of the model.
        """
        values = self.values if self.plan.stackable else self.ordered()
        return values.view(len(values), len(self.plan.tables), self.plan.tables[0].width)

    def _starts(self, table: EmbeddingTable) -> list[int]:
        return sorted(shard.start for shard in self.shards if shard.table.name == table.name)

    def _runs(self) -> Iterator[torch.Tensor | None]:
        """Yield, for every shard, the columns of the run of neighbouring shards that it begins.

        A run is of one table. A shard that continues a run yields None.
        """
        lengths: list[int] = []
        first: list[bool] = []
        for before, shard in zip([None, *self.shards], self.shards, strict=False):
            joined = (
                before is not None
                and before.table.name == shard.table.name
                and before.stop == shard.start
            )
            first.append(not joined)
            if joined:
                lengths[-1] += shard.width
            else:
                lengths.append(shard.width)
        parts = iter(torch.split(self.values, lengths, dim=1))
        return (next(parts) if begins else None for begins in first)


__all__ = ["PooledEmbeddings"]
