"""Products with a collective before or behind them: tensors, stock pairs, and Interlace.

Sizes are M x N x K of one rank's product, as in docs/results.md.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from benchmarks.peers.case import Case, Sizes, random, ways_of

WEIGHTS = 4
"""Weights that take turns, so that none is in the cache."""
EPS = 1e-6


def _product(m: int, n: int, k: int) -> SimpleNamespace:
    """Return ``x [M, K]``, weights ``[N, K]`` whose products are of order one, and a result."""
    weights = [random(n, k, scale=k**-0.5) for _ in range(WEIGHTS)]
    x = random(m, k)
    return SimpleNamespace(x=x, weights=weights, y=x.new_empty(m, n), rows=m, columns=n, inner=k)


def _weight(inputs: Any, i: int) -> torch.Tensor:
    weight: torch.Tensor = inputs.weights[i % WEIGHTS]
    return weight


def _group() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


ALL_GATHER_SIZES: tuple[Sizes, ...] = (
    (8192, 8192, 2048), (4096, 8192, 2048), (4096, 4096, 14336), (1024, 8192, 7168),
    (256, 8192, 7168), (64, 8192, 7168), (16384, 7168, 2048),
)  # fmt: skip


def all_gather_gemm(m: int, n: int, k: int) -> Case:
    """M gathered rows, N columns of a rank."""
    inputs = _product(m, n, k)
    own = m // dist.get_world_size()
    inputs.shard, inputs.gathered = random(own, k), inputs.x
    symmetric = interlace.empty_symmetric((own, k), dtype=inputs.x.dtype)
    inputs.rows_in_place = symmetric.local.copy_(inputs.shard)

    def alone(i: int) -> torch.Tensor:
        return torch.mm(inputs.gathered, _weight(inputs, i).t(), out=inputs.y)

    def pair(i: int) -> torch.Tensor:
        dist.all_gather_into_tensor(inputs.gathered, inputs.shard)
        return alone(i)

    def async_tp(i: int) -> torch.Tensor:
        operator = torch.ops.symm_mem.fused_all_gather_matmul
        results: Any = operator(inputs.shard, [_weight(inputs, i).t()], 0, _group())
        first: torch.Tensor = results[1][0]
        return first

    def ours(i: int) -> torch.Tensor:
        return interlace.all_gather_gemm(inputs.shard, _weight(inputs, i))

    def in_place(i: int) -> torch.Tensor:
        return interlace.all_gather_gemm(inputs.rows_in_place, _weight(inputs, i))

    ways = ways_of(alone, pair, ours, async_tp) | {"Interlace, rows in place": in_place}
    return Case(f"{m} x {n} x {k}", inputs, ways)


REDUCE_SCATTER_SIZES: tuple[Sizes, ...] = (
    (8192, 8192, 2048), (4096, 8192, 2048), (4096, 4096, 14336), (1024, 8192, 7168),
    (256, 8192, 7168),
)  # fmt: skip


def gemm_reduce_scatter(m: int, n: int, k: int) -> Case:
    """M rows, K inner elements of a rank."""
    inputs = _product(m, n, k)
    inputs.part = inputs.x.new_empty(m // dist.get_world_size(), n)

    def alone(i: int) -> torch.Tensor:
        return torch.mm(inputs.x, _weight(inputs, i).t(), out=inputs.y)

    def pair(i: int) -> torch.Tensor:
        part: torch.Tensor = inputs.part
        dist.reduce_scatter_tensor(part, alone(i))
        return part

    def async_tp(i: int) -> torch.Tensor:
        operator = torch.ops.symm_mem.fused_matmul_reduce_scatter
        y: torch.Tensor = operator(inputs.x, _weight(inputs, i).t(), "sum", 0, _group())
        return y

    def ours(i: int) -> torch.Tensor:
        return interlace.gemm_reduce_scatter(inputs.x, _weight(inputs, i))

    return Case(f"{m} x {n} x {k}", inputs, ways_of(alone, pair, ours, async_tp))


ALL_REDUCE_SIZES: tuple[Sizes, ...] = (
    (1, 8192, 4096), (16, 8192, 4096), (64, 8192, 7168), (256, 8192, 7168), (1024, 8192, 7168),
)  # fmt: skip


def gemm_all_reduce(m: int, n: int, k: int) -> Case:
    """M rows, K inner elements of a rank."""
    inputs = _product(m, n, k)

    def alone(i: int) -> torch.Tensor:
        return torch.mm(inputs.x, _weight(inputs, i).t(), out=inputs.y)

    def pair(i: int) -> torch.Tensor:
        y = alone(i)
        dist.all_reduce(y)
        return y

    def ours(i: int) -> torch.Tensor:
        return interlace.gemm_all_reduce(inputs.x, _weight(inputs, i))

    inputs.product = alone
    return Case(f"{m} x {n} x {k}", inputs, ways_of(alone, pair, ours))


NORM_SIZES: tuple[Sizes, ...] = tuple((tokens, 8192, 3584) for tokens in (1, 16, 64, 256))


def gemm_all_reduce_norm(m: int, n: int, k: int) -> Case:
    """M tokens, K inner elements of a rank; the residual is added, and RMSNorm follows."""
    inputs = _product(m, n, k)
    inputs.residual, inputs.norm_weight = random(m, n), random(n)
    for tensor in (inputs.residual, inputs.norm_weight):
        dist.broadcast(tensor, 0)

    def alone(i: int) -> torch.Tensor:
        return torch.mm(inputs.x, _weight(inputs, i).t(), out=inputs.y)

    def pair(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = alone(i)
        dist.all_reduce(y)
        residual = y + inputs.residual
        return F.rms_norm(residual, (n,), inputs.norm_weight, EPS), residual

    def ours(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        normed = interlace.gemm_all_reduce(
            inputs.x, _weight(inputs, i), norm_weight=inputs.norm_weight,
            residual=inputs.residual, eps=EPS,
        )  # fmt: skip
        return normed.y, normed.residual

    inputs.product = alone
    return Case(f"{m} x {n} x {k}", inputs, ways_of(alone, pair, ours))
