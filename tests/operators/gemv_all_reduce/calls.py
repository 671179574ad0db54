"""Calls of ``gemv_all_reduce`` that ranks can make, and what must come out, in float64."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

import interlace

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: ``x [tokens, columns]`` (``[columns]`` for tokens = None) and ``w [rows, columns]``
    on each rank.
    """

    tokens: int | None
    rows: int
    columns: int
    dtype: str = "float32"
    bias: bool = False
    impl: str = "gemv"
    config: interlace.GemvAllReduceConfig | None = None
    seed: int = 0

    def inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x, w and bias of a rank; all ranks' biases are equal."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        shape = (self.columns,) if self.tokens is None else (self.tokens, self.columns)
        dtype = DTYPES[self.dtype]
        x = torch.randn(shape, generator=generator).to(dtype)
        w = torch.randn((self.rows, self.columns), generator=generator).to(dtype)
        shared = torch.Generator().manual_seed(self.seed)
        return x, w, torch.randn(self.rows, generator=shared).to(dtype) if self.bias else None

    def expected(self, world_size: int) -> torch.Tensor:
        """The result in float64."""
        return self._sum(world_size, lambda t: t)

    def bound(self, world_size: int) -> torch.Tensor:
        """The largest error that the kernel's arithmetic allows, element by element.

        Products of the inputs are exact or rounded once in float32; K R products and the bias are
        added in float32 in some order: at most ``(K R + 2) u`` times the sum of their absolute
        values. Two values in a word keep 12 significant bits each, a relative error of at most
        2**-12 in every rank's part. The result is then rounded to its dtype. The CPU backend
        truncates to bfloat16: a whole unit in the last place instead of half of one.
        """
        u = torch.finfo(torch.float32).eps / 2
        steps = self.columns * world_size + 2
        exact = self.expected(world_size).abs()
        accumulated = steps * u / (1 - steps * u) * self._sum(world_size, torch.abs)
        if DTYPES[self.dtype].itemsize == 2 and (self.tokens or 1) > 1:
            accumulated += 2**-12 * (accumulated + self._sum_of_parts(world_size))
        out = torch.finfo(DTYPES[self.dtype])
        rounding = out.eps if self.dtype == "bfloat16" else out.eps / 2
        return accumulated + rounding * (exact + accumulated) + out.smallest_normal * out.eps

    def _sum(self, world_size, change):
        total = torch.zeros(
            *(() if self.tokens is None else (self.tokens,)), self.rows, dtype=torch.float64
        )
        for rank in range(world_size):
            x, w, bias = self.inputs(rank)
            total += change(x.double()) @ change(w.double()).T
        return total if bias is None else total + change(bias.double())

    def _sum_of_parts(self, world_size):
        """Of the absolute values of each rank's product."""
        parts = (self.inputs(rank)[:2] for rank in range(world_size))
        return sum((x.double() @ w.double().T).abs() for x, w in parts)

    def check(self, results: list[torch.Tensor]) -> None:
        """Every rank has the same bits, and they are as right as the arithmetic allows."""
        expected, bound = self.expected(len(results)), self.bound(len(results))
        for rank, y in enumerate(results):
            assert y.dtype == DTYPES[self.dtype]
            assert y.shape == expected.shape, self
            error = (y.double() - expected).abs()
            assert (error <= bound).all(), (
                f"{self}: rank {rank} is wrong by {(error / bound).max():.3g} times the bound"
            )
            assert torch.equal(y, results[0]), f"{self}: ranks 0 and {rank} differ"


def run(calls: list[Call]) -> list[torch.Tensor]:
    """On a rank: make the calls one after another."""
    return [run_one(call) for call in calls]


def run_one(call: Call, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    x, w, bias = call.inputs(dist.get_rank(group))
    return interlace.gemv_all_reduce(x, w, bias, group=group, impl=call.impl, config=call.config)


def check_all(calls: list[Call], results: list[list[torch.Tensor]]) -> None:
    """``results[rank][i]`` against ``calls[i]``."""
    for i, call in enumerate(calls):
        call.check([result[i] for result in results])
