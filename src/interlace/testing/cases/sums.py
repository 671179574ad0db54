"""Calls of sums of products before a reduce-scatter, which the pass for ``torch.compile`` makes."""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.distributed as dist

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.comm import default_name
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator, thin, whole_numbers

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "gemm_sum_reduce_scatter": ("chunked",),  # the operator has no choice of implementations
}
_SECOND_INNER = 16  # of the second product

# Inner size of the first product, columns, dtype, whether w is contiguous along K.
_KINDS = (
    (32, 64, "float32", False),
    (65, 33, "bfloat16", True),
    (128, 96, "float16", False),
    (8, 130, "bfloat16", False),
)
_SHARES = (1, 5, 16, 33, 128)


@dataclasses.dataclass(frozen=True)
class SumCase(Case):
    """The sum of two products on each rank, with ``share`` rows for every rank."""

    share: int = 8
    inner: int = 16
    columns: int = 32
    along_k: bool = False

    @property
    def sizes(self) -> str:
        along = "K" if self.along_k else "N"
        rows = f"{self.share} rows for each rank"
        return f"{rows}, {self.columns} x ({self.inner} + {_SECOND_INNER}), w along {along}"

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, dtype = generator(seed, rank), DTYPES[self.dtype]
        tensors = {}
        for i, inner in enumerate((self.inner, _SECOND_INNER)):
            x = whole_numbers(source, (self.share * ranks, inner), 2)
            w = whole_numbers(source, (inner, self.columns), 1, thin(inner)).to(dtype)
            tensors[f"x{i}"] = x.to(dtype)
            tensors[f"w{i}"] = w.T.contiguous() if self.along_k else w.T
        return tensors

    def results(self, inputs: list[Tensors]) -> list[list[torch.Tensor]]:
        products = [call[f"x{i}"] @ call[f"w{i}"].T for call in inputs for i in range(2)]
        return [[chunk] for chunk in torch.stack(products).sum(0).chunk(len(inputs))]

    def open(self, group: dist.ProcessGroup | None) -> Make:
        operator, name = getattr(torch.ops.interlace, self.operator), default_name(group)

        def make(tensors: Tensors) -> list[torch.Tensor]:
            return [operator([tensors["x0"], tensors["x1"]], [tensors["w0"], tensors["w1"]], name)]

        return make


def every(operator: str, impl: str, ranks: int) -> list[SumCase]:
    """Return one small call; the operator has no gradient."""
    return [SumCase(operator, impl, "bfloat16", share=16, inner=32, columns=64)]


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> SumCase:
    """Return a random call."""
    inner, columns, dtype, along_k = source.choice(_KINDS)
    return SumCase(operator, impl, dtype, False, source.choice(_SHARES), inner, columns, along_k)
