"""Benchmark of batches of products before and after an all-to-all, which the pass for ``torch.compile`` makes of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import interlace
import interlace.ops  # registers torch.ops.interlace
from interlace.bench import products
from interlace.bench.products import SETS, Step, timed, tolerance
from interlace.bench.timing import host_us
from interlace.comm import default_name, group_of
from interlace.costs import all_to_all_bmm as received_costs
from interlace.costs import gemm_all_to_all as sent_costs
from interlace.costs.gemm import ProductCost
from interlace.costs.machine import H200_NODE
from interlace.errors import InterlaceError
from interlace.ops.all_to_all_bmm.launch import choose as choose_received
from interlace.ops.gemm_all_to_all.launch import choose_batch as choose_sent
from interlace.products.choice import Choice
from interlace.tuning import CARRIED


@dataclasses.dataclass(frozen=True)
class Shape(products.Shape):
    """``count`` products like it on every rank, rows to and from all ranks in equal parts.

    Attributes:
        operator: ``"bmm_all_to_all"`` or ``"all_to_all_bmm"``.
    """

    count: int = 2

    def __str__(self) -> str:
        return f"{self.count} x {super().__str__()}"


class Case:
    """A shape's operands on this rank, and every way to compute it: what both directions have in common."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None = None) -> None:
        self.shape, self.group, self.owner = shape, group, group_of(group)
        generator = torch.Generator(self.owner.device).manual_seed(1 + self.owner.rank)

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(shape.count, rows, columns, generator=generator, device=self.owner.device).to(shape.dtype)

        self.sets = [(random(shape.rows, shape.inner), random(shape.inner, shape.columns)) for _ in range(SETS)]
        self.product = self.sets[0][0].new_empty([shape.count, shape.rows, shape.columns])
        columns = shape.columns if shape.operator == "bmm_all_to_all" else shape.inner
        self.sent = self.product.new_empty([self.owner.world_size, shape.count, self.share, columns])
        self.received = torch.empty_like(self.sent)

    @property
    def share(self) -> int:
        """Rows of a product for, or from, one rank."""
        return self.shape.rows // self.owner.world_size

    def by_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, M, columns] -> [R, B, M / R, columns]``, a view."""
        return rows.view(self.shape.count, self.owner.world_size, self.share, rows.shape[-1]).transpose(0, 1)

    def multiply(self, i: int) -> torch.Tensor:
        return torch.bmm(*self.sets[i % SETS], out=self.product)

    def exchange(self, i: int) -> None:
        dist.all_to_all_single(self.received, self.sent, group=self.group)

    def fused(self, i: int) -> torch.Tensor:
        raise NotImplementedError

    def pair(self, i: int) -> None:
        raise NotImplementedError

    def expected(self, i: int) -> torch.Tensor:
        """What :meth:`fused` returns, in float64."""
        raise NotImplementedError

    def ways(self) -> dict[str, Callable[[int], Any]]:
        """Every way to compute all of it."""
        return {"fused": self.fused, "cuBLAS + NCCL": self.pair}

    def error(self, i: int) -> float:
        """Largest relative difference of our ways from the same in float64, on this rank."""
        expected = self.expected(i)
        found = (way(i).double().view(expected.shape) for name, way in self.ways().items() if name in ("fused", *CARRIED))
        return max(float((y - expected).norm() / expected.norm()) for y in found)


class Sent(Case):
    """A batch of products before an all-to-all."""

    def call(self, i: int, impl: str) -> torch.Tensor:
        x, w = self.sets[i % SETS]
        y: torch.Tensor = torch.ops.interlace.bmm_all_to_all(x, w, default_name(self.group), impl)
        return y

    def fused(self, i: int) -> torch.Tensor:
        return self.call(i, "fused")

    def split(self, i: int) -> torch.Tensor:
        return self.call(i, "split")

    def each(self, i: int) -> torch.Tensor:
        """An operator for each product, their results put together."""
        x, w = self.sets[i % SETS]
        parts = [interlace.gemm_all_to_all(*pair, group=self.group, impl="fused") for pair in zip(x, w.mT, strict=True)]
        return torch.cat([part.view(self.owner.world_size, self.share, -1) for part in parts], 1)

    def pair(self, i: int) -> None:
        self.sent.copy_(self.by_ranks(self.multiply(i)))
        self.exchange(i)

    def ways(self) -> dict[str, Callable[[int], Any]]:
        return super().ways() | {"split": self.split, "fused, product by product": self.each}

    def expected(self, i: int) -> torch.Tensor:
        x, w = self.sets[i % SETS]
        sent = self.by_ranks(torch.bmm(x.double(), w.double())).contiguous()
        expected = torch.empty_like(sent)
        dist.all_to_all_single(expected, sent, group=self.group)
        return expected


class Received(Case):
    """A batch of products after an all-to-all; of x, ``[B, M, K]``, the memory is sent."""

    def fused(self, i: int) -> torch.Tensor:
        x, w = self.sets[i % SETS]
        y, _ = torch.ops.interlace.all_to_all_bmm(x.flatten(0, 1), w, default_name(self.group))
        assert isinstance(y, torch.Tensor)
        return y

    def pair(self, i: int) -> None:
        x, w = self.sets[i % SETS]
        dist.all_to_all_single(self.received, x.view(self.sent.shape), group=self.group)
        torch.bmm(self.received.transpose(0, 1).flatten(1, 2), w, out=self.product)

    def expected(self, i: int) -> torch.Tensor:
        x, w = self.sets[i % SETS]
        dist.all_to_all_single(self.received, x.view(self.sent.shape), group=self.group)
        return torch.bmm(self.received.transpose(0, 1).flatten(1, 2).double(), w.double())


CASES: Mapping[str, type[Case]] = {"bmm_all_to_all": Sent, "all_to_all_bmm": Received}


def bench(shape: Shape, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Check, then time one shape in every way. Collective; the same result on every rank.

    Raises:
        InterlaceError: the fused result is wrong; nothing is timed then.
    """
    case = CASES[shape.operator](shape, group)
    device, ranks = case.owner.device, case.owner.world_size
    worst = torch.tensor(max(case.error(i) for i in range(SETS)), device=device)
    case.owner.synchronize()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    if not worst.item() <= tolerance(shape):
        raise InterlaceError(
            f"{shape.operator} {shape}: relative error {worst.item():.1e} is above {tolerance(shape):.1e}; not timed."
        )
    ways: dict[str, Step] = case.ways()
    alone: dict[str, Step] = {"NCCL alone": case.exchange, "cuBLAS alone": case.multiply}
    times = {name: dataclasses.asdict(timed(case, step)) for name, step in (ways | alone).items()}
    host = {name: host_us(step, device=device, group=group) for name, step in ways.items()}
    cost, choice = _cost(shape, ranks), _choice(shape, ranks, device)
    return {
        "operator": shape.operator,
        "shape": str(shape),
        "batch": shape.count,
        "rows": shape.count * shape.rows,
        "columns": shape.columns,
        "inner": shape.inner,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "world_size": ranks,
        "config": str(choice.config) if shape.operator == "bmm_all_to_all" else "",
        "auto": choice.impl,
        "relative_error": worst.item(),
        "floor_us": round(H200_NODE.floor_ns(cost.memory_bytes + cost.receive_bytes, cost.link_bytes, cost.flops) / 1e3, 2),
        "flops": cost.flops,
        "memory_bytes": cost.memory_bytes + cost.receive_bytes,
        "link_bytes": cost.link_bytes,
        "times": times,
        "host_us": host,
    }


def _choice(shape: Shape, ranks: int, device: torch.device) -> Choice[Any]:
    """What the pass for ``torch.compile`` goes by."""
    choose = choose_sent if shape.operator == "bmm_all_to_all" else choose_received
    sizes = {"rows": shape.count * shape.rows, "columns": shape.columns, "inner": shape.inner}
    return choose(**sizes, dtype=shape.dtype, world_size=ranks, device=device)


def _cost(shape: Shape, ranks: int) -> ProductCost:
    sizes: dict[str, Any] = {
        "rows": shape.rows, "columns": shape.columns, "inner": shape.inner, "itemsize": shape.dtype.itemsize,
    }  # fmt: skip
    if shape.operator == "all_to_all_bmm":
        return received_costs.fused(batch=shape.count, **sizes, world_size=ranks)
    one = sent_costs.fused(**sizes, world_size=ranks)
    return ProductCost(**{name: shape.count * each for name, each in dataclasses.asdict(one).items()})
