"""Benchmark of a batch of products and the all-to-all of their rows, which the pass for ``torch.compile`` makes of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

import interlace
import interlace.ops  # registers torch.ops.interlace
from interlace.bench import products
from interlace.bench.products import SETS, Step, timed, tolerance
from interlace.bench.timing import host_us
from interlace.comm import default_name, group_of
from interlace.costs import gemm_all_to_all as costs
from interlace.costs.machine import H200_NODE
from interlace.errors import InterlaceError
from interlace.ops.gemm_all_to_all.launch import choose

OPERATOR = "bmm_all_to_all"


@dataclasses.dataclass(frozen=True)
class Shape(products.Shape):
    """``count`` products like it on every rank, rows split evenly."""

    count: int = 2

    def __str__(self) -> str:
        return f"{self.count} x {super().__str__()}"


class Case:
    """A shape's operands on this rank, and every way to compute it."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None = None) -> None:
        self.shape, self.group, self.owner = shape, group, group_of(group)
        generator = torch.Generator(self.owner.device).manual_seed(1 + self.owner.rank)

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(shape.count, rows, columns, generator=generator, device=self.owner.device).to(shape.dtype)

        self.sets = [(random(shape.rows, shape.inner), random(shape.inner, shape.columns)) for _ in range(SETS)]
        self.product = self.sets[0][0].new_empty([shape.count, shape.rows, shape.columns])
        self.ordered = self.product.new_empty([self.owner.world_size, shape.count, self._share, shape.columns])
        self.received = torch.empty_like(self.ordered)

    @property
    def _share(self) -> int:
        """Rows of a product for one rank."""
        return self.shape.rows // self.owner.world_size

    def by_ranks(self, product: torch.Tensor) -> torch.Tensor:
        """``[B, M, N] -> [R, B, M / R, N]``, a view."""
        return product.view(self.shape.count, self.owner.world_size, self._share, self.shape.columns).transpose(0, 1)

    def fused(self, i: int) -> torch.Tensor:
        x, w = self.sets[i % SETS]
        y: torch.Tensor = torch.ops.interlace.bmm_all_to_all(x, w, default_name(self.group))
        return y

    def each(self, i: int) -> torch.Tensor:
        """An operator for each product, their results put together."""
        x, w = self.sets[i % SETS]
        parts = [interlace.gemm_all_to_all(*pair, group=self.group, impl="fused") for pair in zip(x, w.mT, strict=True)]
        return torch.cat([part.view(self.owner.world_size, self._share, -1) for part in parts], 1)

    def multiply(self, i: int) -> torch.Tensor:
        return torch.bmm(*self.sets[i % SETS], out=self.product)

    def exchange(self, i: int) -> None:
        dist.all_to_all_single(self.received, self.ordered, group=self.group)

    def pair(self, i: int) -> None:
        self.ordered.copy_(self.by_ranks(self.multiply(i)))
        self.exchange(i)

    def error(self, i: int) -> float:
        """Relative difference of one call from the same in float64, on this rank."""
        x, w = self.sets[i % SETS]
        sent = self.by_ranks(torch.bmm(x.double(), w.double())).contiguous()
        expected = torch.empty_like(sent)
        dist.all_to_all_single(expected, sent, group=self.group)
        return float((self.fused(i).double().view(expected.shape) - expected).norm() / expected.norm())


def bench(shape: Shape, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Check, then time one shape in every way. Collective; the same result on every rank.

    Raises:
        InterlaceError: the fused result is wrong; nothing is timed then.
    """
    case = Case(shape, group)
    device, ranks, itemsize = case.owner.device, case.owner.world_size, shape.dtype.itemsize
    worst = torch.tensor(max(case.error(i) for i in range(SETS)), device=device)
    case.owner.synchronize()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    if not worst.item() <= tolerance(shape):
        raise InterlaceError(f"{OPERATOR} {shape}: relative error {worst.item():.1e} is above {tolerance(shape):.1e}; not timed.")
    ways: dict[str, Step] = {"fused": case.fused, "fused, product by product": case.each, "cuBLAS + NCCL": case.pair}
    alone: dict[str, Step] = {"NCCL alone": case.exchange, "cuBLAS alone": case.multiply}
    times = {name: dataclasses.asdict(timed(case, step)) for name, step in (ways | alone).items()}
    host = {name: host_us(step, device=device, group=group) for name, step in ways.items()}
    sizes: dict[str, Any] = {"rows": shape.rows, "columns": shape.columns, "inner": shape.inner}
    choice = choose(**sizes | {"rows": shape.count * shape.rows}, dtype=shape.dtype, world_size=ranks, device=device)
    one = costs.fused(**sizes, itemsize=itemsize, world_size=ranks)
    memory_bytes, link_bytes, flops = (
        shape.count * each for each in (one.memory_bytes + one.receive_bytes, one.link_bytes, one.flops)
    )  # fmt: skip
    return {
        "operator": OPERATOR,
        "shape": str(shape),
        "batch": shape.count,
        **sizes,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "world_size": ranks,
        "config": str(choice.config),
        "auto": "fused",  # a batch has no other implementation
        "relative_error": worst.item(),
        "floor_us": round(H200_NODE.floor_ns(memory_bytes, link_bytes, flops) / 1e3, 2),
        "flops": flops,
        "memory_bytes": memory_bytes,
        "link_bytes": link_bytes,
        "times": times,
        "host_us": host,
    }
