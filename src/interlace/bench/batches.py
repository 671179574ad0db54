"""Benchmark of batches of products before and after an all-to-all, which the pass for
``torch.compile`` makes of experts.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import interlace
import interlace.operators  # registers torch.ops.interlace
from interlace.bench import products
from interlace.bench.products import SETS, Step, timed, tolerance
from interlace.bench.timing import host_us
from interlace.comm import default_name, group_of
from interlace.costs import find_cost
from interlace.costs.gemm import ProductCost
from interlace.costs.machine import H200_NODE
from interlace.errors import InterlaceError
from interlace.gemm.choice import Choice
from interlace.registry import operator_matching, operator_named


@dataclasses.dataclass(frozen=True)
class Shape(products.Shape):
    """``count`` products like it on every rank, rows to and from all ranks in equal parts.

    Attributes:
        operator: ``"bmm_all_to_all"`` or ``"all_to_all_bmm"``.
    """

    count: int = 2

    def __str__(self) -> str:
        return f"{self.count} x {super().__str__()}"


class Case(abc.ABC):
    """A shape's operands on this rank, and every way to compute it.

    Attributes:
        default_shapes: The experts of one rank in two layers, ``BxMxNxK``, forward and backward:
            Mixtral's 8 of 4096 x 14336 on 4 ranks, and 64 of 2048 x 1408.
    """

    default_shapes: ClassVar[tuple[str, ...]]

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None = None) -> None:
        self.shape, self.group, self.owner = shape, group, group_of(group)
        generator = torch.Generator(self.owner.device).manual_seed(1 + self.owner.rank)

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(
                shape.count, rows, columns, generator=generator, device=self.owner.device
            ).to(shape.dtype)

        self.sets = [
            (random(shape.rows, shape.inner), random(shape.inner, shape.columns))
            for _ in range(SETS)
        ]
        self.product = self.sets[0][0].new_empty([shape.count, shape.rows, shape.columns])
        self.sent = self.product.new_empty(
            [self.owner.world_size, shape.count, self.share, self.width]
        )
        self.received = torch.empty_like(self.sent)

    @property
    def share(self) -> int:
        """Rows of a product for, or from, one rank."""
        return self.shape.rows // self.owner.world_size

    def multiply(self, i: int) -> torch.Tensor:
        return torch.bmm(*self.sets[i % SETS], out=self.product)

    def exchange(self, i: int) -> None:
        dist.all_to_all_single(self.received, self.sent, group=self.group)

    def ways(self) -> dict[str, Callable[[int], Any]]:
        """Every way to compute all of it."""
        return {"cuBLAS + NCCL": self.pair}

    def error(self, i: int) -> float:
        """Largest relative difference of our ways from the same in float64, on this rank."""
        expected = self.expected(i)
        found = (
            way(i).double().view(expected.shape)
            for name, way in self.ways().items()
            if name in operator_named(self.shape.operator).words
        )
        return max(float((y - expected).norm() / expected.norm()) for y in found)

    def choose(self) -> Choice[Any]:
        """What the pass for ``torch.compile`` goes by."""
        shape = self.shape
        sizes = {"rows": shape.count * shape.rows, "columns": shape.columns, "inner": shape.inner}
        choice: Choice[Any] = operator_named(shape.operator).choose(
            **sizes, dtype=shape.dtype, world_size=self.owner.world_size, device=self.owner.device
        )
        return choice

    def sizes(self) -> dict[str, Any]:
        """Of one product, as costs take them."""
        shape = self.shape
        sizes = {"rows": shape.rows, "columns": shape.columns, "inner": shape.inner}
        return sizes | {"itemsize": shape.dtype.itemsize, "world_size": self.owner.world_size}

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Columns of what travels."""

    @abc.abstractmethod
    def call(self, i: int, impl: str) -> torch.Tensor: ...

    @abc.abstractmethod
    def pair(self, i: int) -> None: ...

    @abc.abstractmethod
    def expected(self, i: int) -> torch.Tensor:
        """What :meth:`call` returns, in float64."""

    @abc.abstractmethod
    def cost(self) -> ProductCost: ...

    def config(self) -> str:
        """The fused kernel's; empty where there is none."""
        return ""


class Sent(Case):
    """A batch of products before an all-to-all."""

    default_shapes = ("2x5120x4096x14336", "2x5120x4096x28672", "16x1920x2048x1408")

    @property
    def width(self) -> int:
        return self.shape.columns

    def call(self, i: int, impl: str) -> torch.Tensor:
        x, w = self.sets[i % SETS]
        y: torch.Tensor = torch.ops.interlace.bmm_all_to_all(x, w, default_name(self.group), impl)
        return y

    def each(self, i: int) -> torch.Tensor:
        """An operator for each product, their results put together."""
        x, w = self.sets[i % SETS]
        parts = [
            interlace.gemm_all_to_all(*pair, group=self.group, impl="fused")
            for pair in zip(x, w.mT, strict=True)
        ]
        return torch.cat([part.view(self.owner.world_size, self.share, -1) for part in parts], 1)

    def by_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, M, N] -> [R, B, M / R, N]``, a view."""
        return rows.view(self.shape.count, self.owner.world_size, self.share, -1).transpose(0, 1)

    def pair(self, i: int) -> None:
        self.sent.copy_(self.by_ranks(self.multiply(i)))
        self.exchange(i)

    def ways(self) -> dict[str, Callable[[int], Any]]:
        return super().ways() | {
            "fused": functools.partial(self.call, impl="fused"),
            "chunked": functools.partial(self.call, impl="chunked"),
            "fused, product by product": self.each,
        }

    def expected(self, i: int) -> torch.Tensor:
        x, w = self.sets[i % SETS]
        sent = self.by_ranks(torch.bmm(x.double(), w.double())).contiguous()
        expected = torch.empty_like(sent)
        dist.all_to_all_single(expected, sent, group=self.group)
        return expected

    def cost(self) -> ProductCost:
        one = find_cost(operator_matching("gemm", "all_to_all").name).formula(**self.sizes())
        return ProductCost(
            **{name: self.shape.count * each for name, each in dataclasses.asdict(one).items()}
        )

    def config(self) -> str:
        return str(self.choose().config)


class Received(Case):
    """A batch of products after an all-to-all; x's memory, ``[B, M, K]``, is sent as it is."""

    default_shapes = ("2x5120x28672x4096", "2x5120x14336x4096", "16x1920x2816x2048")

    @property
    def width(self) -> int:
        return self.shape.inner

    def call(self, i: int, impl: str) -> torch.Tensor:
        x, w = self.sets[i % SETS]
        y, _ = torch.ops.interlace.all_to_all_bmm(
            x.flatten(0, 1), w, default_name(self.group), impl
        )
        assert isinstance(y, torch.Tensor)
        return y

    def ways(self) -> dict[str, Callable[[int], Any]]:
        return super().ways() | {
            "chunked": functools.partial(self.call, impl="chunked"),
            "pushed": functools.partial(self.call, impl="pushed"),
        }

    def sort(self, i: int) -> torch.Tensor:
        """What comes, ``[B, M, K]``."""
        dist.all_to_all_single(
            self.received, self.sets[i % SETS][0].view(self.sent.shape), group=self.group
        )
        return self.received.transpose(0, 1).flatten(1, 2)

    def pair(self, i: int) -> None:
        torch.bmm(self.sort(i), self.sets[i % SETS][1], out=self.product)

    def expected(self, i: int) -> torch.Tensor:
        return torch.bmm(self.sort(i).double(), self.sets[i % SETS][1].double())

    def cost(self) -> ProductCost:
        cost: ProductCost = find_cost(self.shape.operator).formula(
            batch=self.shape.count, **self.sizes()
        )
        return cost


CASES: Mapping[tuple[str, ...], type[Case]] = {
    ("bmm", "all_to_all"): Sent,
    ("all_to_all", "bmm"): Received,
}
"""The case of each pattern."""


def case_of(shape: Shape, group: dist.ProcessGroup | None = None) -> Case:
    """Return the case of a shape's operator."""
    return CASES[operator_named(shape.operator).pattern](shape, group)


def bench(shape: Shape, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Check, then time one shape in every way. Collective; the same result on every rank.

    Raises:
        InterlaceError: the fused result is wrong; nothing is timed then.
    """
    case = case_of(shape, group)
    device = case.owner.device
    worst = torch.tensor(max(case.error(i) for i in range(SETS)), device=device)
    case.owner.synchronize()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    if not worst.item() <= tolerance(shape):
        raise InterlaceError(
            f"{shape.operator} {shape}: relative error {worst.item():.1e} is above "
            f"{tolerance(shape):.1e}; not timed."
        )
    ways: dict[str, Step] = case.ways()
    alone: dict[str, Step] = {"NCCL alone": case.exchange, "cuBLAS alone": case.multiply}
    times = {name: dataclasses.asdict(timed(case, step)) for name, step in (ways | alone).items()}
    host = {name: host_us(step, device=device, group=group) for name, step in ways.items()}
    cost = case.cost()
    return {
        "operator": shape.operator,
        "shape": str(shape),
        "batch": shape.count,
        "rows": shape.count * shape.rows,
        "columns": shape.columns,
        "inner": shape.inner,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "world_size": case.owner.world_size,
        "config": case.config(),
        "auto": case.choose().impl,
        "relative_error": worst.item(),
        "floor_us": round(
            H200_NODE.floor_ns(cost.memory_bytes + cost.receive_bytes, cost.link_bytes, cost.flops)
            / 1e3,
            2,
        ),
        "flops": cost.flops,
        "memory_bytes": cost.memory_bytes + cost.receive_bytes,
        "link_bytes": cost.link_bytes,
        "times": times,
        "host_us": host,
    }
