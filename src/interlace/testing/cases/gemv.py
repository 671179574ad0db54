"""Calls of ``gemm_all_reduce`` with few rows, by ``gemv_all_reduce``."""

from __future__ import annotations

import dataclasses
import functools
import random

import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.operators.gemm_all_reduce.gemv import tuned
from interlace.testing.cases.base import DTYPES, Case, Make, Tensors, generator, thin, whole_numbers

OPERATOR = "gemv_all_reduce"
IMPLEMENTATIONS = {OPERATOR: ("gemv one_shot", "gemv two_phase", "unfused")}

# Tokens (0 for a vector), rows, columns, dtype, whether there is a bias.
_KINDS = (
    (0, 64, 48, "float32", True),
    (1, 130, 256, "bfloat16", False),
    (2, 97, 65, "float16", True),
    (5, 64, 512, "bfloat16", True),
    (16, 33, 128, "float32", False),
    (0, 1, 8, "float16", False),
    (1, 4096, 512, "bfloat16", False),
)


@dataclasses.dataclass(frozen=True)
class GemvCase(Case):
    """``tokens`` rows of x, or a vector for 0; ``rows`` and ``columns`` of each rank's weight."""

    may_be_zero = ("tokens",)

    tokens: int = 1
    rows: int = 64
    columns: int = 32
    bias: bool = False

    @property
    def sizes(self) -> str:
        bias = ", bias" if self.bias else ""
        return f"{self.tokens or 'vector'} x {self.rows} x {self.columns}{bias}"

    def tensors(self, rank: int, ranks: int, seed: int) -> Tensors:
        source, shared, dtype = generator(seed, rank), generator(seed, -1), DTYPES[self.dtype]
        leading = (self.tokens,) if self.tokens else ()
        tensors = {
            "x": whole_numbers(source, (*leading, self.columns), 2).to(dtype),
            "w": whole_numbers(source, (self.rows, self.columns), 1, thin(self.columns)).to(dtype),
        }
        if self.bias:
            tensors["bias"] = whole_numbers(shared, (self.rows,), 8).to(dtype)
        if self.backward:
            tensors["grad"] = whole_numbers(
                shared, (*leading, self.rows), 1, thin(self.rows, 48)
            ).to(dtype)
        return tensors

    @property
    def is_replicated(self) -> bool:
        return True

    @property
    def shares_bias(self) -> bool:
        return self.bias

    def outputs(self, leaves: list[Tensors], inputs: list[Tensors]) -> list[torch.Tensor]:
        """Compute the sum over ranks, of which every rank has a copy."""
        total = torch.stack([call["x"] @ call["w"].T for call in leaves]).sum(0)
        # The ranks' biases are copies of one, which is added once, after the sum.
        return [total + leaves[0].get("bias", 0)] * len(leaves)

    def open(self, group: dist.ProcessGroup | None) -> Make:
        owner = group_of(group)
        choice = tuned(
            rows=self.tokens or 1,
            columns=self.rows,
            inner=self.columns,
            dtype=DTYPES[self.dtype],
            world_size=owner.world_size,
            device=owner.device,
        )
        options = {
            "group": group,
            "impl": self.impl_name,
            "config": dataclasses.replace(choice.config, protocol=self.variant)
            if self.variant
            else None,
        }
        return functools.partial(self.call, interlace.gemv_all_reduce, options)


def every(operator: str, impl: str, ranks: int) -> list[GemvCase]:
    """Return calls with one token and with several, with their backward pass."""
    return [
        GemvCase(OPERATOR, impl, "bfloat16", True, 1, 96, 64, True),
        GemvCase(OPERATOR, impl, "float16", True, 5, 33, 48, False),
    ]


def draw(operator: str, impl: str, ranks: int, source: random.Random, large: bool) -> GemvCase:
    """Return a random call; ``large`` allows a call with many rows."""
    tokens, rows, columns, dtype, bias = source.choice(_KINDS if large else _KINDS[:-1])
    return GemvCase(OPERATOR, impl, dtype, source.random() < 0.4, tokens, rows, columns, bias)
