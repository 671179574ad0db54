"""Calls of ``linear_cross_entropy``."""

from __future__ import annotations

import dataclasses
import functools
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator

OPERATOR = "linear_cross_entropy"
IMPLEMENTATIONS = {OPERATOR: ("fused", "unfused")}
REDUCTIONS = ("mean", "sum", "none")

_IGNORED = -100
_Z_LOSS = 0.01
_ROUNDINGS = 16  # of logits, of their exponentials, of gradients and of sums of these

# Rows of a rank, width, columns of a rank, dtype, bias, label smoothing, reduction, rows sharded.
_KINDS: tuple[tuple[int, int, int, str, bool, float, str, bool], ...] = (
    (7, 24, 40, "float32", True, 0.1, "mean", False),
    (5, 16, 33, "float32", False, 0.0, "none", True),
    (16, 64, 300, "bfloat16", False, 0.1, "sum", False),
    (9, 32, 64, "float16", True, 0.0, "none", False),
    (64, 128, 2048, "bfloat16", False, 0.0, "mean", True),
)


@dataclasses.dataclass(frozen=True)
class LossCase(Case):
    """A loss whose rows lie in two chunks or more; the last column is none of the vocabulary's.

    Attributes:
        rows: Rows of a rank if they are sharded, else of all.
        hidden: The width of x.
        columns: Rows of w on each rank.
        bias: Whether logits have a bias.
        smoothing: The label smoothing.
        reduction: As the operator takes it.
        sharded: Whether ranks have different rows of x.
    """

    rows: int = 5
    hidden: int = 16
    columns: int = 24
    bias: bool = False
    smoothing: float = 0.0
    reduction: str = "mean"
    sharded: bool = False

    @property
    def sizes(self) -> str:
        rows = f"{self.rows}{' sharded' if self.sharded else ''} x {self.columns} x {self.hidden}"
        options = f"{self.reduction}, smoothing {self.smoothing}{', bias' if self.bias else ''}"
        return f"{rows}, {options}"

    @property
    def exact(self) -> bool:
        return False

    @property
    def result_dtype(self) -> torch.dtype:
        return torch.float32

    def dtypes(self, results: int) -> list[torch.dtype]:
        return [torch.float32, *[DTYPES[self.dtype]] * (results - 1)]

    def _options(self, ranks: int) -> dict[str, float | int | str | bool]:
        return {
            "label_smoothing": self.smoothing,
            "z_loss": _Z_LOSS,
            "reduction": self.reduction,
            "vocabulary": ranks * self.columns - 1,
            "sequence_parallel": self.sharded,
            "chunk_rows": max(self.rows * (ranks if self.sharded else 1) // 2, 1),
        }

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, shared, dtype = generator(seed, rank), generator(seed, -1), DTYPES[self.dtype]
        rows = self.rows * (ranks if self.sharded else 1)
        of_x = source if self.sharded else shared
        target = torch.randint(0, ranks * self.columns - 1, (rows,), generator=shared)
        target[rows // 2] = _IGNORED
        tensors = {
            "x": torch.randn(self.rows, self.hidden, generator=of_x).to(dtype),
            "w": torch.randn(self.columns, self.hidden, generator=source).to(dtype),
            "target": target,
        }
        if self.bias:
            tensors["bias"] = torch.randn(self.columns, generator=source).to(dtype)
        if self.backward:
            shape = (rows,) if self.reduction == "none" else ()
            tensors["grad"] = torch.rand(shape, generator=shared)
        return tensors

    def expected(self, rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, float]]:
        inputs = [self.tensors(rank, ranks, seed) for rank in range(ranks)]
        names = [name for name in self.leaf_names if name in inputs[0]]
        leaves = [{name: call[name].double().requires_grad_() for name in names} for call in inputs]
        x = torch.cat([call["x"] for call in leaves]) if self.sharded else leaves[0]["x"]
        w = torch.cat([call["w"] for call in leaves])
        bias = torch.cat([call["bias"] for call in leaves]) if self.bias else None
        # The padding is no column, and gets a gradient of 0.
        logits = F.linear(x, w, bias)[:, :-1]
        logits.retain_grad()
        loss = self._loss(logits, inputs[0]["target"])
        results = [loss.detach()]
        largest = float(logits.detach().abs().max())
        sizes = [largest * float(loss.detach().abs().max().clamp(min=1))]
        if self.backward:
            loss.backward(inputs[0]["grad"].double())
            assert logits.grad is not None
            found = [(leaves[0] if name == "x" and not self.sharded else leaves[rank])[name]
                     for name in names]  # fmt: skip
            results += [leaf.grad for leaf in found if leaf.grad is not None]
            # What the sums of gradients have for summands, in absolute values.
            grad, inner = logits.grad.abs(), float(x.detach().abs().max())
            of_x = grad.sum(1).max() * w.detach().abs().max()
            of_column = grad.sum(0).max()
            bounds = {"x": of_x, "w": of_column * inner, "bias": of_column}
            sizes += [largest * float(bounds[name]) for name in names]
        eps = torch.finfo(DTYPES[self.dtype]).eps
        triples = zip(results, self.dtypes(len(results)), sizes, strict=True)
        return [(result.to(dtype), _ROUNDINGS * eps * size) for result, dtype, size in triples]

    def _loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        counts = target != _IGNORED
        losses = F.cross_entropy(
            logits, target, reduction="none", label_smoothing=self.smoothing, ignore_index=_IGNORED
        )
        losses = losses + torch.where(counts, _Z_LOSS * logits.logsumexp(1).square(), 0.0)
        if self.reduction == "none":
            return losses
        return losses.sum() / counts.sum() if self.reduction == "mean" else losses.sum()

    def open(self, group: dist.ProcessGroup | None) -> Make:
        ranks = interlace.group_of(group).world_size
        options = {**self._options(ranks), "group": group, "impl": self.impl_name}
        return functools.partial(self.call, interlace.linear_cross_entropy, options)


def every(operator: str, impl: str, ranks: int) -> list[LossCase]:
    """Return a loss of one number, and one of sharded rows for each row."""
    return [
        LossCase(OPERATOR, impl, "bfloat16", True, 12, 32, 64, smoothing=0.1),
        LossCase(OPERATOR, impl, "float32", True, 5, 16, 33, True, reduction="none", sharded=True),
    ]


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> LossCase:
    """Return a random call; ``large`` allows one with many columns."""
    rows, hidden, columns, dtype, bias, smoothing, reduction, sharded = source.choice(
        _KINDS if large else _KINDS[:-1]
    )
    return LossCase(
        OPERATOR, impl, dtype, source.random() < 0.7, rows, hidden, columns, bias, smoothing,
        reduction, sharded,
    )  # fmt: skip
