"""Calls of batches of products before and after an all-to-all, which the pass for ``torch.compile``
makes.
"""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.distributed as dist

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.comm import default_name
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator, thin, whole_numbers

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "bmm_all_to_all": ("fused", "chunked", "unfused"),
    "bmm_sum_all_to_all": ("chunked",),  # the operator has no choice of implementations
    "all_to_all_bmm": ("chunked", "pushed", "unfused"),
    "gemm_sum_reduce_scatter": ("chunked",),  # neither has this one
}
_SUMS = ("bmm_sum_all_to_all", "gemm_sum_reduce_scatter")
_SECOND_INNER = 16  # of the second product of a sum

# Products, inner size, columns, dtype, whether w is contiguous along K.
_KINDS = (
    (2, 32, 64, "float32", False),
    (3, 65, 33, "bfloat16", True),
    (1, 128, 96, "float16", False),
    (4, 8, 130, "bfloat16", False),
)
_SHARES = (1, 5, 16, 33, 128)


@dataclasses.dataclass(frozen=True)
class BatchCase(Case):
    """``count`` products on each rank, each with ``share`` rows to or from every rank."""

    count: int = 2
    share: int = 8
    inner: int = 16
    columns: int = 32
    along_k: bool = False

    @property
    def sizes(self) -> str:
        along = "K" if self.along_k else "N"
        rows = f"{self.share} rows for each rank"
        return f"{self.count} products, {rows}, {self.columns} x {self.inner}, w along {along}"

    def _inners(self) -> tuple[int, ...]:
        return (self.inner, _SECOND_INNER) if self.operator in _SUMS else (self.inner,)

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, dtype = generator(seed, rank), DTYPES[self.dtype]
        tensors = {}
        for i, inner in enumerate(self._inners()):
            x = whole_numbers(source, (self.count, self.share * ranks, inner), 2).to(dtype)
            w = whole_numbers(source, (self.count, inner, self.columns), 1, thin(inner)).to(dtype)
            tensors[f"x{i}"] = x.flatten(0, 1) if self.operator == "all_to_all_bmm" else x
            tensors[f"w{i}"] = w.mT.contiguous().mT if self.along_k else w
        if self.operator == "gemm_sum_reduce_scatter":  # of matrices, and w as in nn.Linear
            tensors = {
                name: tensor[0].mT if name.startswith("w") else tensor[0]
                for name, tensor in tensors.items()
            }
        return tensors

    def results(self, inputs: list[Tensors]) -> list[list[torch.Tensor]]:
        ranks = len(inputs)
        if self.operator == "all_to_all_bmm":
            sent = [call["x0"].view(ranks, self.count, self.share, -1) for call in inputs]
            received = [
                torch.stack([rows[rank] for rows in sent], 1).flatten(1, 2) for rank in range(ranks)
            ]
            return [[rows @ call["w0"], rows] for rows, call in zip(received, inputs, strict=True)]
        if self.operator == "gemm_sum_reduce_scatter":
            pairs = [
                (call[f"x{i}"], call[f"w{i}"])
                for call in inputs
                for i in range(len(self._inners()))
            ]
            total = torch.stack([x @ w.T for x, w in pairs]).sum(0)
            return [[chunk] for chunk in total.chunk(ranks)]
        products = []
        for call in inputs:
            total = sum(
                (call[f"x{i}"] @ call[f"w{i}"] for i in range(len(self._inners()))),
                start=torch.zeros(1),
            )
            products.append(total.unflatten(1, (ranks, self.share)))
        return [
            [torch.cat([rows[:, rank].flatten(0, 1) for rows in products])] for rank in range(ranks)
        ]

    def open(self, group: dist.ProcessGroup | None) -> Make:
        operator, name = getattr(torch.ops.interlace, self.operator), default_name(group)

        def make(tensors: Tensors) -> list[torch.Tensor]:
            if self.operator in _SUMS:
                return [
                    operator([tensors["x0"], tensors["x1"]], [tensors["w0"], tensors["w1"]], name)
                ]
            result = operator(tensors["x0"], tensors["w0"], name, self.impl)
            return list(result) if self.operator == "all_to_all_bmm" else [result]

        return make


def every(operator: str, impl: str, ranks: int) -> list[BatchCase]:
    """Return one small call; these operators have no gradient."""
    return [BatchCase(operator, impl, "bfloat16", count=2, share=16, inner=32, columns=64)]


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> BatchCase:
    """Return a random call."""
    count, inner, columns, dtype, along_k = source.choice(_KINDS)
    return BatchCase(
        operator, impl, dtype, False, count, source.choice(_SHARES), inner, columns, along_k
    )
