"""Calls of the two operators of Ulysses' sequence parallelism."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator, thin, whole_numbers

TO_COLUMNS, TO_ROWS = "gemm_all_to_all_columns", "all_to_all_gemm"
IMPLEMENTATIONS = dict.fromkeys((TO_COLUMNS, TO_ROWS), ("fused", "unfused"))

# Columns of a head, the other size of the product, dtype, whether there is a bias, whether rows are
# split unevenly. Few, because each one compiles kernels of its own.
_KINDS = (
    (16, 48, "float32", True, False),
    (24, 65, "bfloat16", True, True),
    (8, 130, "float16", False, True),
    (64, 256, "bfloat16", False, False),
)
_ROWS = (1, 7, 16, 33, 130)


@dataclasses.dataclass(frozen=True)
class SequenceCase(Case):
    """Two heads on each rank, or two in all for a product whose columns are those of a fused QKV
    product with a single key and value head.

    Attributes:
        rows: Rows of the sequence on each rank, or as ``splits`` say.
        head: Columns of a head.
        other: K of the product whose columns are heads', N of the product of heads.
        bias: Whether there is a bias.
        splits: Rows of each rank, or None.
    """

    rows: int = 16
    head: int = 16
    other: int = 32
    bias: bool = False
    splits: tuple[int, ...] | None = None

    @property
    def sizes(self) -> str:
        rows = self.rows if self.splits is None else f"given rows, {list(self.splits)},"
        return f"{rows} x {self.other}, heads of {self.head}{', bias' if self.bias else ''}"

    def _rows_by_rank(self, ranks: int) -> list[int]:
        return [self.rows] * ranks if self.splits is None else list(self.splits)

    def _column_ranges(self, ranks: int) -> list[list[tuple[int, int]]]:
        """Return the columns of each rank: two query heads, and the key and the value head."""
        return interlace.qkv_column_ranges(2 * ranks, 1, self.head, ranks)

    def _column_splits(self, ranks: int) -> list[int]:
        """Return the columns of x on each rank, of a product of heads: the last has one more."""
        return [2 * self.head] * (ranks - 1) + [2 * self.head + 1]

    def column_options(self, ranks: int) -> dict[str, Any]:
        """Return the columns of each rank as the operator takes them, by name."""
        if self.operator == TO_COLUMNS:
            return {"column_ranges": self._column_ranges(ranks)}
        return {"column_splits": self._column_splits(ranks)}

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, shared, dtype = generator(seed, rank), generator(seed, -1), DTYPES[self.dtype]
        rows, splits = self._rows_by_rank(ranks), self._column_splits(ranks)
        if self.operator == TO_COLUMNS:
            x, w = (rows[rank], self.other), ((2 * ranks + 2) * self.head, self.other)
            result = sum(rows), 4 * self.head
        else:
            x, w = (sum(rows), splits[rank]), (self.other, sum(splits))
            result = rows[rank], self.other
        tensors = {
            "x": whole_numbers(source, x, 2).to(dtype),
            "w": whole_numbers(shared, w, 1, thin(w[1])).to(dtype),
        }
        if self.bias:
            tensors["bias"] = whole_numbers(shared, (w[0],), 8).to(dtype)
        if self.backward:
            grad = whole_numbers(source, result, 1, thin(max(*result, 1), 48))
            tensors["grad"] = grad.to(dtype)
        return tensors

    def outputs(self, leaves: list[Tensors], inputs: list[Tensors]) -> list[torch.Tensor]:
        ranks = len(leaves)
        rows = self._rows_by_rank(ranks)
        # Each rank's weight and bias get the gradients of its own rows.
        if self.operator == TO_COLUMNS:
            parts = [_linear(leaf["x"], leaf) for leaf in leaves]
            return [
                torch.cat([torch.cat([part[:, a:b] for a, b in ranges], 1) for part in parts])
                for ranges in self._column_ranges(ranks)
            ]
        gathered = torch.cat([leaf["x"] for leaf in leaves], 1).split(rows)
        return [_linear(part, leaf) for part, leaf in zip(gathered, leaves, strict=True)]

    def open(self, group: dist.ProcessGroup | None) -> Make:
        ranks, spans_nodes = group_of(group).world_size, group_of(group).members.spans_nodes
        impl = "auto" if spans_nodes and self.impl == "fused" else self.impl
        options: dict[str, Any] = {"group": group, "impl": impl, "splits": self.splits}
        options |= self.column_options(ranks)
        return functools.partial(self.call, getattr(interlace, self.operator), options)


def _linear(x: torch.Tensor, leaf: Tensors) -> torch.Tensor:
    y = x @ leaf["w"].T
    return y + leaf["bias"] if "bias" in leaf else y


def every(operator: str, impl: str, ranks: int) -> list[SequenceCase]:
    """Return calls with even rows, and with uneven rows, of which a rank has none."""
    return [
        SequenceCase(operator, impl, "bfloat16", True, 17, 16, 40, True),
        SequenceCase(
            operator, impl, "float32", True, 0, 9, 33, False, _uneven(random.Random(1), ranks)
        ),
    ]


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> SequenceCase:
    """Return a random call; ``large`` allows one with many rows."""
    head, other_size, dtype, bias, is_uneven = source.choice(_KINDS)
    splits = _uneven(source, ranks) if is_uneven else None
    rows = 512 if large and source.random() < 0.1 else source.choice(_ROWS)
    backward = source.random() < 0.4
    return SequenceCase(operator, impl, dtype, backward, rows, head, other_size, bias, splits)


def _uneven(source: random.Random, ranks: int) -> tuple[int, ...]:
    """Return the rows of each rank, one of them without rows."""
    rows = [source.choice((1, 5, 17, 64, 129)) for _ in range(ranks)]
    if ranks > 1:
        rows[source.randrange(ranks)] = 0
    return tuple(rows)
