"""Calls of ``linear_top_k``."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator, whole_numbers

OPERATOR = "linear_top_k"
IMPLEMENTATIONS = {OPERATOR: ("fused", "unfused")}

# Rows, width, columns of a rank, k, dtype, bias.
_KINDS = (
    (1, 16, 40, 1, "float32", True),
    (5, 24, 60, 3, "bfloat16", False),
    (9, 16, 33, 1, "float16", False),
    (3, 8, 64, 20, "float32", True),
    (17, 64, 9000, 1, "float32", False),
)


@dataclasses.dataclass(frozen=True)
class TopKCase(Case):
    """The highest logits of rows, all of which are other whole numbers; of the last rank the last
    column is none of the vocabulary's.

    Attributes:
        rows: Rows of x.
        hidden: The width of x.
        columns: Rows of w on each rank.
        k: Columns that are chosen.
        bias: Whether logits have a bias.
    """

    rows: int = 3
    hidden: int = 8
    columns: int = 24
    k: int = 1
    bias: bool = False

    @property
    def sizes(self) -> str:
        return (
            f"{self.rows} x {self.columns} x {self.hidden}, k = {self.k}"
            f"{', bias' if self.bias else ''}"
        )

    def dtypes(self, results: int) -> list[torch.dtype]:
        return [torch.float32, torch.int64]

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, shared, dtype = generator(seed, rank), generator(seed, -1), DTYPES[self.dtype]
        total, own_columns = (
            ranks * self.columns,
            slice(rank * self.columns, (rank + 1) * self.columns),
        )
        # Half of the logits are below 0, and a row may turn them all around.
        order = torch.randperm(total, generator=shared).float() - total // 2
        x = torch.zeros(self.rows, self.hidden)
        x[:, 0] = torch.randint(0, 2, (self.rows,), generator=shared) * 2.0 - 1
        w = whole_numbers(source, (self.columns, self.hidden), 3)
        w[:, 0] = order[own_columns]
        if rank == ranks - 1:
            w[-1, 0] = total  # the padding's, which would be chosen by many rows
        tensors = {"x": x.to(dtype), "w": w.to(dtype)}
        if self.bias:
            tensors["bias"] = torch.ones(self.columns, dtype=dtype)
        return tensors

    def expected(self, rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, float]]:
        inputs = [self.tensors(rank, ranks, seed) for rank in range(ranks)]
        w = torch.cat([call["w"].double() for call in inputs])[:-1]
        logits = inputs[0]["x"].double() @ w.T + (1 if self.bias else 0)
        values, columns = logits.topk(self.k, 1)
        return [(values.float(), 0.0), (columns, 0.0)]

    def open(self, group: dist.ProcessGroup | None) -> Make:
        vocabulary = interlace.group_of(group).world_size * self.columns - 1
        options: dict[str, Any] = {
            "k": self.k, "vocabulary": vocabulary, "group": group, "impl": self.impl_name,
        }  # fmt: skip

        def call(tensors: Tensors) -> list[torch.Tensor]:
            function: Any = interlace.linear_top_k
            return list(function(**tensors, **options))

        return call


def every(operator: str, impl: str, ranks: int) -> list[TopKCase]:
    """Return a greedy choice, and the best of several columns."""
    return [
        TopKCase(OPERATOR, impl, "bfloat16", False, 5, 32, 60, 1, True),
        TopKCase(OPERATOR, impl, "float32", False, 3, 16, 33, 5),
    ]


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> TopKCase:
    """Return a random call; ``large`` allows one with many columns."""
    rows, hidden, columns, k, dtype, bias = source.choice(_KINDS if large else _KINDS[:-1])
    # 16 bits tell no more than some hundred logits apart.
    dtype = "float32" if ranks * columns > 240 else dtype
    return TopKCase(OPERATOR, impl, dtype, False, rows, hidden, columns, k, bias)
