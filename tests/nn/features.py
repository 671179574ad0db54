"""Bags for ``ShardedEmbeddingBags``, and their expected embeddings in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from interlace.nn import EmbeddingTable, ShardedEmbeddingBags

TABLES = (
    EmbeddingTable("user", 11, 8),
    EmbeddingTable("item", 7, 4, mode="mean"),
    EmbeddingTable("word", 20, 12, column_shards=2),
    EmbeddingTable("city", 5, 8),
)
SUMS = (EmbeddingTable("user", 11, 8), EmbeddingTable("item", 7, 8), EmbeddingTable("word", 20, 8))


@dataclasses.dataclass(frozen=True)
class Features:
    """Bags of all ranks' samples.

    ``bags[t][b]`` holds the indices that sample b of the global batch looks up in table t.
    """

    tables: tuple[EmbeddingTable, ...]
    bags: list[list[torch.Tensor]]
    weights: list[list[torch.Tensor]]

    @classmethod
    def draw(
        cls,
        tables: tuple[EmbeddingTable, ...],
        samples: int,
        *,
        lengths: tuple[int, int] = (0, 3),
        seed: int = 0,
    ) -> Features:
        """Draw ``samples`` of the global batch.

        Bags may be empty, and a row may occur more than once.
        """
        generator = torch.Generator().manual_seed(seed)

        def bag(table: EmbeddingTable) -> torch.Tensor:
            low, high = (table.bag_length, table.bag_length) if table.bag_length else lengths
            length = int(torch.randint(low, high + 1, (1,), generator=generator))
            return torch.randint(0, table.rows, (length,), generator=generator)

        bags = [[bag(table) for _ in range(samples)] for table in tables]
        weights = [[torch.rand(len(bag), generator=generator) for bag in column] for column in bags]
        return cls(tables, bags, weights)

    def of_rank(
        self, rank: int, world_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return indices, offsets and weights of a rank's samples, table-major."""
        count = len(self.bags[0]) // world_size
        local_samples = slice(rank * count, (rank + 1) * count)
        bags = [bag for column in self.bags for bag in column[local_samples]]
        weights = [weight for column in self.weights for weight in column[local_samples]]
        lengths = torch.tensor([0, *map(len, bags)])
        no_indices = torch.zeros(0, dtype=torch.int64)
        return (
            torch.cat([no_indices, *bags]),
            lengths.cumsum(0),
            torch.cat([no_indices.float(), *weights]),
        )

    def expected(self, tables: dict[str, torch.Tensor], *, weighted: bool = False) -> torch.Tensor:
        """Compute ``[samples, sum of D]`` in float64 from full tables, differentiable in them."""
        columns = []
        for table, bags, weights in zip(self.tables, self.bags, self.weights, strict=True):
            rows = [torch.zeros(0, table.width, dtype=torch.float64)]
            for bag, weight in zip(bags, weights, strict=True):
                vectors = tables[table.name].double()[bag]
                if weighted:
                    vectors = vectors * weight.double()[:, None]
                total = vectors.sum(0)
                rows.append((total / max(1, len(bag)) if table.mode == "mean" else total)[None])
            columns.append(torch.cat(rows))
        return torch.cat(columns, 1)


def own(rows: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of the global batch."""
    return rows.tensor_split(dist.get_world_size())[dist.get_rank()]


def merged(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Merge all ranks' state dicts."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        gathered, {name: value.cpu().clone() for name, value in state_dict.items()}
    )
    return {name: value for part in gathered for name, value in part.items()}


def whole_tables(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Assemble all full tables from every rank's ``{"shards.<table>:<start>-<stop>.weight": ...}``.
    Collective.
    """
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, value in merged(values).items():
        table, _, columns = name.removeprefix("shards.").rpartition(".")[0].rpartition(":")
        parts.setdefault(table, []).append((int(columns.partition("-")[0]), value))
    return {
        name: torch.cat([part for _, part in sorted(parts_of_table, key=lambda p: p[0])], 1)
        for name, parts_of_table in parts.items()
    }


def weights_of(bags: ShardedEmbeddingBags) -> dict[str, torch.Tensor]:
    """Return the full tables by name, in the order of the model. Collective."""
    tables = whole_tables({name: parameter.detach() for name, parameter in bags.named_parameters()})
    return {table.name: tables[table.name] for table in bags.tables}


def gradients_of(bags: ShardedEmbeddingBags) -> dict[str, torch.Tensor]:
    """Return the gradients of full tables as dense tensors. Collective."""
    gradients = {}
    for name, parameter in bags.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return whole_tables(gradients)
