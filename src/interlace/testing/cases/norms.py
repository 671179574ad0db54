"""Calls of ``gemm_all_reduce_norm``, by the public functions that lead to it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.gemm.epilogue import Norm
from interlace.registry import operator_named
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator, thin, whole_numbers

OPERATOR = "gemm_all_reduce_norm"
IMPLEMENTATIONS = {
    OPERATOR: tuple(
        implementation.name for implementation in operator_named(OPERATOR).implementations
    )
}

_EPS = 1e-5

# Tokens, columns of the sum, inner size, dtype, norm, bias, residual.
_KINDS: tuple[tuple[int, int, int, str, Norm, bool, bool], ...] = (
    (1, 64, 48, "float32", "rms", True, True),
    (1, 136, 256, "bfloat16", "rms", False, True),
    (3, 97, 65, "float16", "layer", True, False),
    (16, 33, 128, "float32", "layer", False, True),
    (64, 256, 64, "bfloat16", "rms", False, True),
    (5, 8, 24, "bfloat16", "rms", True, False),
    (1, 4096, 512, "bfloat16", "rms", False, True),
)


@dataclasses.dataclass(frozen=True)
class NormCase(Case):
    """``tokens`` rows of x, ``columns`` of the sum; its norm and the new residual are results.

    Attributes:
        norm: ``"rms"`` or ``"layer"``.
        bias: Whether a bias is added to the sum.
        residual: Whether a residual is added to it.
    """

    tokens: int = 1
    columns: int = 64
    inner: int = 32
    norm: Norm = "rms"
    bias: bool = False
    residual: bool = True

    @property
    def sizes(self) -> str:
        added = "".join(f", {name}" for name in ("bias", "residual") if getattr(self, name))
        return f"{self.tokens} x {self.columns} x {self.inner}, {self.norm}{added}"

    @property
    def is_replicated(self) -> bool:
        return True

    @property
    def shares_bias(self) -> bool:
        return self.bias

    @property
    def exact(self) -> bool:
        # A square root is seldom a whole number.
        return False

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, shared, dtype = generator(seed, rank), generator(seed, -1), DTYPES[self.dtype]
        line = (self.columns,)
        tensors = {
            "x": whole_numbers(source, (self.tokens, self.inner), 2).to(dtype),
            "w": whole_numbers(source, (self.columns, self.inner), 1, thin(self.inner)).to(dtype),
            "norm_weight": whole_numbers(shared, line, 3).to(dtype),
        }
        if self.bias:
            tensors["bias"] = whole_numbers(shared, line, 8).to(dtype)
        if self.residual:
            tensors["residual"] = whole_numbers(shared, (self.tokens, self.columns), 8).to(dtype)
        if self.norm == "layer":
            tensors["norm_bias"] = whole_numbers(shared, line, 3).to(dtype)
        return tensors

    def results(self, inputs: list[Tensors]) -> list[list[torch.Tensor]]:
        """Compute, for each rank, the norm and the residual, which every rank has a copy of."""
        first = inputs[0]
        h = torch.stack([call["x"] @ call["w"].T for call in inputs]).sum(0)
        h = h + first.get("bias", 0) + first.get("residual", 0)
        value = h - h.mean(-1, keepdim=True) if self.norm == "layer" else h
        y = value / (value.square().mean(-1, keepdim=True) + _EPS).sqrt()
        return [[y * first["norm_weight"] + first.get("norm_bias", 0), h]] * len(inputs)

    def open(self, group: dist.ProcessGroup | None) -> Make:
        # Two public functions lead to the operator; one is for few tokens.
        function: Any = (
            interlace.gemv_all_reduce if self.tokens <= 16 else interlace.gemm_all_reduce
        )
        options = {"group": group, "impl": self.impl, "norm": self.norm, "eps": _EPS}

        def call(tensors: Tensors) -> list[torch.Tensor]:
            return list(function(**tensors, **options)[:2])

        return call


def every(operator: str, impl: str, ranks: int) -> list[NormCase]:
    """Return a call with each norm."""
    return [
        NormCase(OPERATOR, impl, "bfloat16", False, 1, 96, 64, "rms", False, True),
        NormCase(OPERATOR, impl, "float32", False, 20, 33, 48, "layer", True, True),
    ]


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> NormCase:
    """Return a random call; ``large`` allows one with many columns."""
    tokens, columns, inner, dtype, norm, bias, residual = source.choice(
        _KINDS if large else _KINDS[:-1]
    )
    return NormCase(OPERATOR, impl, dtype, False, tokens, columns, inner, norm, bias, residual)
