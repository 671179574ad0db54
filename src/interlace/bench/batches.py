"""Benchmark of batches of products before and after an all-to-all.

The pass for ``torch.compile`` makes these operators of a mixture's experts.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from interlace.bench import products
from interlace.bench.benchmark import Benchmark, LeastWork, Way, relative_error
from interlace.comm import default_name
from interlace.costs import find_cost
from interlace.costs.gemm import ProductCost
from interlace.gemm import schema
from interlace.gemm.config import GemmConfig
from interlace.gemm.operator import GemmOperator
from interlace.registry import operator_matching, operator_named


@dataclasses.dataclass(frozen=True)
class BatchShape(products.ProductShape):
    """``batch`` products on every rank, with rows to and from all ranks in equal parts."""

    batch: int = 2

    def __str__(self) -> str:
        return f"{self.batch} x {super().__str__()}"


class TimedBatch(Benchmark[GemmConfig]):
    """A shape's operands on this rank, and every way to compute it.

    Attributes:
        default_shapes: The experts of one rank in two layers, ``BxMxNxK``, forward and backward:
            Mixtral's 8 of 4096 x 14336 on 4 ranks, and 64 of 2048 x 1408.
        sets: Pairs of x and w.
        product, sent, received: The memory of the stock pair.
        choice: What the pass for ``torch.compile`` goes by.
    """

    default_shapes: ClassVar[tuple[str, ...]]
    shape: BatchShape

    operand_sets = 2

    def __init__(self, shape: BatchShape, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(operator_named(shape.operator), shape, group)
        generator = torch.Generator(self.device).manual_seed(1 + self.owner.rank)

        def random(rows: int, columns: int) -> torch.Tensor:
            size = shape.batch, rows, columns
            return torch.randn(size, generator=generator, device=self.device).to(shape.dtype)

        self.sets = [
            (random(shape.rows, shape.inner), random(shape.inner, shape.columns))
            for _ in range(self.operand_sets)
        ]
        self.product = self.sets[0][0].new_empty([shape.batch, shape.rows, shape.columns])
        # NCCL sends a rank's rows of all products as one message, so they lie together.
        self.sent = self.product.new_empty(
            [self.owner.world_size, shape.batch, self.share, self.width]
        )
        self.received = torch.empty_like(self.sent)
        # The tuned table counts the rows of all products.
        self.choice = self.operator.choose(
            rows=shape.batch * shape.rows,
            columns=shape.columns,
            inner=shape.inner,
            dtype=shape.dtype,
            world_size=self.owner.world_size,
            device=self.device,
        )

    @property
    def share(self) -> int:
        """Rows of a product for, or from, one rank."""
        return self.shape.rows // self.owner.world_size

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Columns of the rows that travel."""

    def operands(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and w of the i-th call."""
        return self.sets[i % self.operand_sets]

    def run_operator(self, x: torch.Tensor, w: torch.Tensor, impl: str) -> Any:
        """Run the operator, which the pass for ``torch.compile`` makes."""
        function = getattr(torch.ops.interlace, self.operator.name)
        return function(x, w, default_name(self.group), impl)

    @abc.abstractmethod
    def call(self, i: int, impl: str) -> torch.Tensor:
        """Run the operator on the operands of the i-th call; return the products."""

    @abc.abstractmethod
    def pair(self, i: int) -> None:
        """Run cuBLAS and NCCL, one after the other."""

    @abc.abstractmethod
    def expected(self, i: int) -> torch.Tensor:
        """Return the result of :meth:`call` in float64."""

    def multiply(self, i: int) -> torch.Tensor:
        """Multiply on this rank alone, by cuBLAS."""
        return torch.bmm(*self.operands(i), out=self.product)

    def exchange(self, i: int) -> None:
        """Exchange rows by NCCL."""
        dist.all_to_all_single(self.received, self.sent, group=self.group)

    def ways(self) -> list[Way]:
        """Return every way to compute all of it."""
        implementations = [
            Way(name, "ours", functools.partial(self.call, impl=name), name)
            for name in (implementation.name for implementation in self.operator.implementations)
            if name != "unfused"
        ]
        return [Way("cuBLAS + NCCL", "pair", self.pair, "unfused"), *implementations]

    def parts(self) -> list[Way]:
        """Return communicating alone and computing alone."""
        return [
            Way("NCCL alone", "communication", self.exchange),
            Way("cuBLAS alone", "compute", self.multiply),
        ]

    def config(self) -> str:
        """Return the fused kernel's configuration; empty if there is no fused kernel."""
        return str(self.choice.config) if "fused" in self.operator.words else ""

    def work(self) -> LeastWork:
        """Return the least work of a rank."""
        cost: ProductCost = find_cost(self.operator.name).formula(
            rows=self.shape.rows,
            columns=self.shape.columns,
            inner=self.shape.inner,
            itemsize=self.shape.dtype.itemsize,
            world_size=self.owner.world_size,
            batch=self.shape.batch,
        )
        return LeastWork(cost.memory_bytes + cost.receive_bytes, cost.link_bytes, cost.flops)

    def check(self, config: GemmConfig | None = None) -> float:
        """Return the largest relative error of our implementations on any rank."""
        errors = []
        for i in range(self.operand_sets):
            expected = self.expected(i)
            results = [way.call(i) for way in self.ways() if way.role == "ours" and way.impl]
            errors += [
                relative_error(cast(torch.Tensor, y).view(expected.shape), expected)
                for y in results
            ]
        return self.accept(errors)


class SentBatch(TimedBatch):
    """A batch of products before an all-to-all."""

    default_shapes = ("2x5120x4096x14336", "2x5120x4096x28672", "16x1920x2048x1408")

    @property
    def width(self) -> int:
        """Columns of the products, which travel."""
        return self.shape.columns

    def call(self, i: int, impl: str) -> torch.Tensor:
        """Run the operator; return the rows for this rank."""
        y: torch.Tensor = self.run_operator(*self.operands(i), impl)
        return y

    def product_by_product(self, i: int) -> torch.Tensor:
        """Run the operator of one product for each, and put the results together."""
        x, w = self.operands(i)
        single = cast(GemmOperator, operator_matching("gemm", "all_to_all"))
        parts = [
            schema.call(
                single,
                *pair,
                None,
                splits=[None] * len(single.split_names),
                x_scale=None,
                w_scale=None,
                out_dtype=None,
                group=self.group,
                impl="fused",
                config=None,
            )
            for pair in zip(x, w.mT, strict=True)
        ]
        return torch.cat([part.view(self.owner.world_size, self.share, -1) for part in parts], 1)

    def by_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """View ``[B, M, N]`` as ``[R, B, M / R, N]``."""
        return rows.view(self.shape.batch, self.owner.world_size, self.share, -1).transpose(0, 1)

    def pair(self, i: int) -> None:
        """Run cuBLAS, then NCCL."""
        # NCCL sends contiguous memory, so the rows of each rank are put together first.
        self.sent.copy_(self.by_ranks(self.multiply(i)))
        self.exchange(i)

    def ways(self) -> list[Way]:
        """Return every way to compute all of it."""
        return [*super().ways(), Way("fused, product by product", "ours", self.product_by_product)]

    def expected(self, i: int) -> torch.Tensor:
        """Return the rows for this rank in float64."""
        x, w = self.operands(i)
        sent = self.by_ranks(torch.bmm(x.double(), w.double())).contiguous()
        expected = torch.empty_like(sent)
        dist.all_to_all_single(expected, sent, group=self.group)
        return expected


class Received(TimedBatch):
    """A batch of products after an all-to-all; x's memory, ``[B, M, K]``, is sent as it is."""

    default_shapes = ("2x5120x28672x4096", "2x5120x14336x4096", "16x1920x2816x2048")

    @property
    def width(self) -> int:
        """Columns of x, which travels."""
        return self.shape.inner

    def call(self, i: int, impl: str) -> torch.Tensor:
        """Run the operator; return the products."""
        x, w = self.operands(i)
        y, _ = self.run_operator(x.flatten(0, 1), w, impl)
        assert isinstance(y, torch.Tensor)
        return y

    def receive(self, i: int) -> torch.Tensor:
        """Exchange x by NCCL; return the rows for this rank, ``[B, M, K]``."""
        x, _ = self.operands(i)
        dist.all_to_all_single(self.received, x.view(self.sent.shape), group=self.group)
        return self.received.transpose(0, 1).flatten(1, 2)

    def pair(self, i: int) -> None:
        """Run NCCL, then cuBLAS."""
        torch.bmm(self.receive(i), self.operands(i)[1], out=self.product)

    def expected(self, i: int) -> torch.Tensor:
        """Return the products in float64."""
        return torch.bmm(self.receive(i).double(), self.operands(i)[1].double())


CASES: Mapping[tuple[str, ...], type[TimedBatch]] = {
    ("bmm", "all_to_all"): SentBatch,
    ("all_to_all", "bmm"): Received,
}
"""The case of each pattern."""


def case_of(shape: BatchShape, group: dist.ProcessGroup | None = None) -> TimedBatch:
    """Return the case of a shape's operator."""
    return CASES[operator_named(shape.operator).pattern](shape, group)


def bench(shape: BatchShape, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Check, then time one shape in every way. Collective; the same result on every rank.

    Raises:
        InterlaceError: The fused result is wrong; nothing is timed then.
    """
    case = case_of(shape, group)
    # The check comes first: nothing is timed whose result is wrong.
    error, ways = case.check(), case.ways()
    times = case.time([*ways, *case.parts()])
    return {
        "shape": str(shape),
        **case.header(case.config(), case.choice.impl, error),
        # As the tuned table has it: the rows of all products.
        "rows": shape.batch * shape.rows,
        **case.work().entries(),
        "times": times,
        "host_us": case.host_times(ways),
    }


def measure(work: tuple[str, int, int, int, int], *, dtype: str) -> list[dict[str, Any]]:
    """Benchmark ``(operator, B, M, N, K)``."""
    operator, count, rows, columns, inner = work
    shape = BatchShape(operator, rows, columns, inner, getattr(torch, dtype), batch=count)
    return [bench(shape)]
