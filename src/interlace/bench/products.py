"""Benchmark and tuner of the operators around a matrix product: every figure that a claim needs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench import carriers
from interlace.bench.benchmark import Benchmark, LeastWork, Step, Way, constant, relative_error
from interlace.bench.report import PAIR_NAMES, Role
from interlace.comm.groups.group import solo_group
from interlace.comm.groups.machine_rates import sets_past_cache
from interlace.comm.groups.process_groups import gather
from interlace.errors import ArgumentError
from interlace.gemm import schema
from interlace.gemm.config import GemmConfig
from interlace.gemm.operands import FLOAT8, Operands
from interlace.gemm.operator import GemmOperator, product_operator
from interlace.gemm.reference import product
from interlace.gemm.scaled import block_scale_shapes
from interlace.gemm.terms import Terms, default_output_dtype
from interlace.operators.gemm_reduce_scatter import GemmReduceScatterConfig
from interlace.operators.gemm_reduce_scatter.fused import prepare


def operand_sets(call_bytes: int, device: torch.device) -> int:
    """Return how many sets of operands the calls of a benchmark take in turn; at least two.

    Args:
        call_bytes: The bytes of one call's operands and result.
        device: The device of the operands.
    """
    return max(2, sets_past_cache(call_bytes, device)) if device.type == "cuda" else 2


def rounding_error(dtype: torch.dtype, inner: int, roundings: float) -> float:
    """Return the relative error of roundings to a dtype, and of float32 sums over ``inner``."""
    return (
        roundings * torch.finfo(dtype).eps / 2
        + 8 * math.sqrt(max(inner, 1)) * torch.finfo(torch.float32).eps
    )


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """One benchmarked call: a product of ``rows x columns x inner`` (M, N, K) on every rank.

    Attributes:
        w_along_k: Whether w is contiguous along K; else along N.
        x_padding: Elements between the end of a row of x and the next one.
        has_bias: Whether there is a bias.
        has_block_scales: Whether float8 operands have a scale for each block, else one each.
    """

    operator: str
    rows: int
    columns: int
    inner: int
    dtype: torch.dtype = torch.bfloat16
    w_along_k: bool = True
    x_padding: int = 0
    has_bias: bool = False
    has_block_scales: bool = False

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} x {self.inner}"

    @property
    def tolerance(self) -> float:
        """The relative error that roundings explain.

        The parts and the output are rounded, by half a unit in the last place, uniformly (/
        sqrt(3)); sums over K are float32.
        """
        return rounding_error(default_output_dtype(self.dtype), self.inner, 2.0)


class TimedProduct(Benchmark[Any]):
    """A shape's operands on this rank, and the calls on them.

    Attributes:
        sets: Pairs of x and w.
        bias: ``[columns]``, or None.
        scales: ``x_scale`` and ``w_scale`` of float8 operands; None for other dtypes.
        gathered: The x that stock pairs multiply: all ranks' rows, if the operator gathers them.
        gathered_scale: The scale of these rows.
        product, received: The memory of stock pairs.
        choice: What ``impl="auto"`` runs.
    """

    operator: GemmOperator
    shape: ProductShape

    def __init__(self, shape: ProductShape, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(product_operator(shape.operator), shape, group)
        ranks, device = self.owner.world_size, self.device
        shares_rows = {"all_gather", "all_to_all"} & set(self.operator.pattern)
        if shares_rows and shape.rows % ranks:
            raise ArgumentError(
                f"{shape.operator}: rows must be a multiple of {ranks} ranks, which share them out "
                f"evenly; got {shape.rows}."
            )
        # Ranks have different operands, so rows that arrive from the wrong rank are an error.
        generator = torch.Generator(device).manual_seed(1 + self.owner.rank)
        x_rows = shape.rows // ranks if self.operator.returns_gathered else shape.rows

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, device=device).to(shape.dtype)

        elements = (x_rows + shape.columns) * shape.inner + shape.rows * shape.columns
        self.operand_sets = operand_sets(elements * shape.dtype.itemsize, device)

        def weight() -> torch.Tensor:
            if shape.w_along_k:
                return random(shape.columns, shape.inner)
            return random(shape.inner, shape.columns).T

        self.sets = [
            (random(x_rows, shape.inner + shape.x_padding)[:, : shape.inner], weight())
            for _ in range(self.operand_sets)
        ]
        self.bias = None
        if shape.has_bias:
            # The same on every rank, as a bias must be.
            same = torch.Generator(device).manual_seed(0)
            bias = torch.randn(shape.columns, generator=same, device=device)
            self.bias = bias.to(default_output_dtype(shape.dtype))
        self.gathered, w = self.sets[0]
        self.scales = self._scales(self.gathered, w)
        self.gathered_scale = self.scales[0]
        if self.operator.returns_gathered:
            self.gathered = random(shape.rows, shape.inner)
            self.gathered_scale, _ = self._scales(self.gathered, w)
        # Collectives alone send this memory, and sums of what torch.empty finds may be NaN or slow.
        self.product = torch.zeros(
            shape.rows, shape.columns, dtype=default_output_dtype(shape.dtype), device=device
        )
        self.received = torch.empty_like(self.product)
        self.choice = self.operator.choose(
            rows=shape.rows,
            columns=shape.columns,
            inner=shape.inner,
            dtype=shape.dtype,
            world_size=ranks,
            device=device,
            w_along_k=shape.w_along_k,
            has_block_scales=shape.has_block_scales,
        )

    def _scales(
        self, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return scales of float8 operands: ones, or for blocks powers of two, so that products
        with them have no other roundings.
        """
        if self.shape.dtype != FLOAT8:
            return None, None
        if not self.shape.has_block_scales:
            one = torch.ones([], device=x.device)
            return one, one
        generator = torch.Generator(x.device).manual_seed(2 + self.owner.rank)
        of_x, of_w = (
            torch.exp2(torch.randint(-1, 2, shape, generator=generator, device=x.device))
            for shape in block_scale_shapes(x, w)
        )
        # cuBLAS reads scales of x along rows, and programs for it write them so.
        return of_x.T.contiguous().T, of_w

    def operands(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and w of the i-th call."""
        return self.sets[i % self.operand_sets]

    def call(self, i: int, impl: str, config: GemmConfig | None = None) -> torch.Tensor:
        """Run the operator; return the product."""
        x, w = self.operands(i)
        result = schema.call(
            self.operator,
            x,
            w,
            self.bias,
            splits=[None] * len(self.operator.split_names),
            x_scale=self.scales[0],
            w_scale=self.scales[1],
            out_dtype=None,
            group=self.group,
            impl=impl,
            config=config,
        )
        y: torch.Tensor = result[0] if self.operator.returns_gathered else result
        return y

    def multiply(self, i: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply on this rank alone, by cuBLAS."""
        x, w = self.operands(i)
        x = self.gathered if self.operator.returns_gathered else x
        y = self.product if out is None else out
        if self.shape.dtype == FLOAT8:
            (_, w_scale), x_scale = self.scales, self.gathered_scale
            y.copy_(product(Operands(x, w, None, x_scale, w_scale, y.dtype)))
            return y
        return torch.mm(x, w.T, out=y)

    def expected(self, i: int) -> torch.Tensor:
        """Return the result in float64; the unfused pair's for a collective of no library."""
        x, w = self.operands(i)
        is_stock = self.operator.collective in carriers.COLLECTIVES
        # Float8 is multiplied by cuBLAS, whose sums have other digits.
        if not is_stock or self.shape.dtype == FLOAT8:
            return self.call(i, "unfused").double()
        if self.operator.returns_gathered:
            gathered = torch.empty(
                self.shape.rows, self.shape.inner, dtype=x.dtype, device=x.device
            )
            gather(gathered, x, self.group)
            return gathered.double() @ w.double().T
        part = x.double() @ w.double().T
        if self.operator.collective == "all_to_all":
            expected = torch.empty_like(part)
            dist.all_to_all_single(expected, part, group=self.group)
            return expected
        dist.all_reduce(part, group=self.group)
        if self.operator.collective == "all_reduce":
            return part
        return part.tensor_split(self.owner.world_size)[self.owner.rank]

    # The ways

    @property
    def terms(self) -> Terms:
        """The terms by which implementations may refuse the case's calls."""
        shape, ranks = self.shape, self.owner.world_size
        terms = Terms.of_sizes(shape.rows, shape.columns, shape.dtype, self.device.type, ranks)
        return dataclasses.replace(
            terms,
            is_even=shape.rows % ranks == 0,
            has_bias=shape.has_bias,
            w_along_k=shape.w_along_k,
        )

    def refusals(self) -> dict[str, str | None]:
        """Return what the case's calls lack for each implementation; None if they lack nothing."""
        return {
            implementation.name: implementation.refusal(self.terms)
            for implementation in self.operator.implementations
        }

    def implementations(self, config: GemmConfig) -> list[Way]:
        """Return the implementations that can run, the stock pairs last."""
        # Without a library's collective there is no pair that NCCL could be named for.
        titles = PAIR_NAMES if self.operator.collective in carriers.COLLECTIVES else {}
        ways = []
        for name, refusal in self.refusals().items():
            if refusal is None:
                is_pair = self.operator.is_pair(name)
                role: Role = "pair" if is_pair else "ours"
                # It is the configuration of the operator's own kernel.
                takes = not is_pair and self.operator.implementation(name).config_type is None
                call = functools.partial(self.call, impl=name, config=config if takes else None)
                ways.append(Way(titles.get(name, name), role, call, name))
        return sorted(ways, key=lambda way: way.role == "pair")

    def parts(self, config: GemmConfig) -> list[Way]:
        """Return computing alone and communicating alone."""
        return [
            *carriers.alone(self),
            Way("cuBLAS alone", "compute", self.multiply),
            Way("our product alone", "compute", self._product_alone(config)),
        ]

    def _product_alone(self, config: GemmConfig) -> Step:
        """Return the kernel in a group of one: no puts and no waits, all of the compute."""
        solo = solo_group(self.device)
        fields = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(GemmReduceScatterConfig)
        }
        # Programs begin one after another to spread their traffic; a group of one has none.
        solo_config = GemmReduceScatterConfig(**{**fields, "stagger": 0})

        def call(i: int) -> None:
            x, w = self.operands(i)
            x = self.gathered if self.operator.returns_gathered else x
            (_, w_scale), x_scale = self.scales, self.gathered_scale
            operands = Operands(x, w, None, x_scale, w_scale, self.product.dtype).for_kernel()
            prepare(solo, operands, [len(x)], self.received, solo_config)()

        return call

    # Timing and tuning

    def tuned_call(self, config: GemmConfig) -> Step:
        """Return the fused call."""
        return functools.partial(self.call, impl="fused", config=config)

    def work(self) -> LeastWork:
        """Return the least work of a rank."""
        shape = self.shape
        cost = self.operator.cost(
            rows=shape.rows,
            columns=shape.columns,
            inner=shape.inner,
            itemsize=shape.dtype.itemsize,
            output_itemsize=default_output_dtype(shape.dtype).itemsize,
            world_size=self.owner.world_size,
        )
        return LeastWork(cost.memory_bytes + cost.receive_bytes, cost.link_bytes, cost.flops)


def check_ways(case: TimedProduct, ways: Iterable[Way]) -> None:
    """Compare our ways with the operator's unfused pair.

    Raises:
        InterlaceError: One differs by more than roundings.
    """
    for way in ways:
        if way.role == "ours":
            check_way(case, way, case.call(0, "unfused"))


def check_way(case: TimedProduct, way: Way, expected: torch.Tensor) -> float:
    """Return the relative error of a way's first call, by the result of the unfused pair.

    Raises:
        InterlaceError: It is more than roundings explain.
    """
    y = way.call(0)
    assert isinstance(y, torch.Tensor)
    # Both have roundings, so half of their difference is one's.
    return case.accept([relative_error(y.reshape(expected.shape), expected) / 2], way.name)


def bench(
    shape: ProductShape, config: GemmConfig | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Check, then time one shape in every way. Collective; the same result on every rank.

    Raises:
        InterlaceError: The fused result is wrong; nothing is timed then.
    """
    case = TimedProduct(shape, group)
    chosen = config or case.choice.config
    error = case.check(chosen)
    ways = case.implementations(chosen)
    check_ways(case, [way for way in ways if way.impl != "fused"])
    times = case.time(ways)
    host = case.host_times(ways)
    times |= case.time(case.parts(chosen))
    case.owner.synchronize()
    return {
        "shape": str(shape),
        **case.header(chosen, case.choice.impl, error),
        **case.work().entries(),
        "times": times,
        "host_us": host,
    }


def tune(shape: ProductShape, group: dist.ProcessGroup | None = None) -> GemmConfig:
    """Return the fastest of the candidates that run and are right. Collective.

    Raises:
        BackendError: There is none.
    """
    case = TimedProduct(shape, group)
    candidates = case.operator.candidates(case.choice.config, shape.rows, case.owner.world_size)
    best: GemmConfig = case.fastest(case.tune(constant(candidate) for candidate in candidates))
    return best


def measure(
    work: tuple[str, int, int, int], *, dtype: str, tunes: bool, block_scales: bool = False
) -> list[dict[str, Any]]:
    """Benchmark ``(operator, M, N, K)``, with the best configuration if ``tunes``.

    Args:
        block_scales: Whether float8 operands have a scale for each block.
    """
    shape = ProductShape(*work, getattr(torch, dtype), has_block_scales=block_scales)
    return [bench(shape, tune(shape) if tunes else None)]
