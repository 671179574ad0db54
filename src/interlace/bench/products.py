"""Benchmark and tuner of the operators around a matrix product, on CUDA: every figure that a claim
needs, from one run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from interlace.bench.timing import Timing, host_us, measure
from interlace.comm import Group, group_of
from interlace.comm.group import solo_group
from interlace.costs.machine import H200_NODE
from interlace.errors import ArgumentError, InterlaceError
from interlace.gemm import schema
from interlace.gemm.config import GemmConfig
from interlace.gemm.implementations.chunked import multiply_in_chunks
from interlace.gemm.implementations.triggered import count_product
from interlace.gemm.operands import Operands
from interlace.gemm.operator import GemmOperator
from interlace.mapped import Fused, TriggeredTransfers, empty_rotating, fuse
from interlace.mapped.output import ORDERS
from interlace.operators.gemm_reduce_scatter import GemmReduceScatterConfig
from interlace.operators.gemm_reduce_scatter.fused import prepare
from interlace.registry import operator_named, operators
from interlace.units import ceil_div

Step = Callable[[int], object]

SETS = 2  # of operands that calls take in turn: weights in the L2 are then another call's


_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
"""Collectives whose stock pairs are measured; an operator with another one is measured beside its
own ``impl="unfused"``."""


def declared(operator: str) -> GemmOperator:
    """Return the declaration of an operator around one matrix product.

    Raises:
        ArgumentError: There is no such operator.
    """
    declaration = operator_named(operator)
    if not isinstance(declaration, GemmOperator):
        raise ArgumentError(f"{operator} must be an operator around one matrix product; it is not.")
    return declaration


def benchmarked() -> tuple[str, ...]:
    """Return the names of the operators around one matrix product."""
    return tuple(
        name for name, declaration in operators().items() if isinstance(declaration, GemmOperator)
    )


def sends_output(operator: str) -> bool:
    """Return whether the operator's product may be written straight to the peers."""
    names = [implementation.name for implementation in declared(operator).implementations]
    return "remote_stores" in names


def own_implementations(operator: str) -> list[str]:
    """Return the implementations other than the fused kernel and the stock pairs."""
    return [
        implementation.name
        for implementation in declared(operator).implementations
        if not implementation.is_stock and implementation.name not in ("fused", "unfused")
    ]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One benchmarked call: a product of ``rows x columns x inner`` (M, N, K) on every rank."""

    operator: str
    rows: int
    columns: int
    inner: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} x {self.inner}"


class Case:
    """A shape's operands on this rank, and the calls on them."""

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None = None) -> None:
        self.shape, self.group, self.owner = shape, group, group_of(group)
        self.operator = declared(shape.operator)
        ranks, device = self.owner.world_size, self.owner.device
        generator = torch.Generator(device).manual_seed(1 + self.owner.rank)
        own = shape.rows // ranks if self.operator.returns_gathered else shape.rows

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, device=device).to(shape.dtype)

        self.sets = [
            (random(own, shape.inner), random(shape.columns, shape.inner)) for _ in range(SETS)
        ]
        # What the parts of unfused pairs work on.
        self.gathered = (
            random(shape.rows, shape.inner) if self.operator.returns_gathered else self.sets[0][0]
        )
        self.product = torch.zeros(shape.rows, shape.columns, dtype=shape.dtype, device=device)
        self.received = torch.empty_like(self.product)
        self.choice = self.operator.choose(
            rows=shape.rows,
            columns=shape.columns,
            inner=shape.inner,
            dtype=shape.dtype,
            world_size=ranks,
            device=device,
        )

    def call(self, i: int, impl: str, config: GemmConfig | None = None) -> torch.Tensor:
        x, w = self.sets[i % SETS]
        result = schema.call(
            self.operator,
            x,
            w,
            None,
            splits=[None] * len(self.operator.split_names),
            x_scale=None,
            w_scale=None,
            out_dtype=None,
            group=self.group,
            impl=impl,
            config=config,
        )
        y: torch.Tensor = result[0] if self.operator.returns_gathered else result
        return y

    def multiply(self, i: int) -> torch.Tensor:
        """The product of this rank alone, by cuBLAS."""
        x, w = self.sets[i % SETS]
        x = self.gathered if self.operator.returns_gathered else x
        return torch.mm(x, w.T, out=self.product)

    def error(self, i: int, config: GemmConfig) -> float:
        """Relative difference of one call from the same in float64, on this rank."""
        x, w = self.sets[i % SETS]
        y = self.call(i, "fused", config)
        if self.operator.collective not in _COLLECTIVES:
            expected = self.call(i, "unfused").double()
        elif self.operator.returns_gathered:
            wide = torch.empty(self.shape.rows, self.shape.inner, dtype=x.dtype, device=x.device)
            _gather(wide, x, self.group)
            expected = wide.double() @ w.double().T
        else:
            part = x.double() @ w.double().T
            if self.operator.collective == "all_to_all":
                expected = torch.empty_like(part)
                dist.all_to_all_single(expected, part, group=self.group)
            else:
                dist.all_reduce(part, group=self.group)
                whole = self.operator.collective == "all_reduce"
                expected = (
                    part if whole else part.tensor_split(self.owner.world_size)[self.owner.rank]
                )
        return float((y.double() - expected).norm() / expected.norm())


def tolerance(shape: Shape) -> float:
    """Roundings of the parts and of the output (half a unit in the last place, uniformly: /
    sqrt(3)), float32 sums over K.
    """
    return (
        2.0 * torch.finfo(shape.dtype).eps / 2
        + 8 * math.sqrt(max(shape.inner, 1)) * torch.finfo(torch.float32).eps
    )


def check(case: Case, config: GemmConfig) -> float:
    """The largest error of three calls on any rank.

    Raises:
        InterlaceError: it is too large.
    """
    worst = torch.tensor(max(case.error(i, config) for i in range(3)), device=case.owner.device)
    case.owner.synchronize()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=case.group)
    if not worst.item() <= tolerance(case.shape):
        raise InterlaceError(
            f"{case.shape.operator} {case.shape}, {config}: relative error {worst.item():.1e} is "
            "above "
            f"{tolerance(case.shape):.1e}; not timed."
        )
    return float(worst.item())


# The unfused pairs


def _gather(whole: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    # Named all_gather_single since torch 2.13, which warns of the older name.
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(whole, x, group=group)


def _scatter(own: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(
        own, parts, group=group
    )


def collectives(case: Case) -> dict[str, Step]:
    """Name -> the collective alone, of every way that stock torch offers, on the memory that the
    pair uses.
    """
    group, parts = case.group, case.product
    own = parts[: case.shape.rows // case.owner.world_size]
    match case.operator.collective:
        case "all_to_all":
            return {"NCCL": lambda i: dist.all_to_all_single(case.received, parts, group=group)}
        case "reduce_scatter":
            return {"NCCL": lambda i: _scatter(own, case.received, group)}
        case "all_gather":
            return {"NCCL": lambda i: _gather(case.gathered, case.sets[i % SETS][0], group)}
        case collective if collective not in _COLLECTIVES:
            return {}
    from torch.distributed import _symmetric_memory as symmetric_memory

    process_group = group or dist.group.WORLD
    assert process_group is not None
    name = process_group.group_name
    case.product = symmetric_memory.empty(
        tuple(parts.shape), dtype=parts.dtype, device=parts.device
    )
    symmetric_memory.rendezvous(case.product, name)
    case.product.zero_()
    ways: dict[str, Step] = {
        "NCCL": lambda i: dist.all_reduce(case.product, group=group),
        "torch two-shot": lambda i: torch.ops.symm_mem.two_shot_all_reduce_(
            case.product, "sum", name
        ),
    }
    if parts.nbytes <= 1 << 24:
        ways["torch one-shot"] = lambda i: torch.ops.symm_mem.one_shot_all_reduce(
            case.product, "sum", name
        )
    return ways


def pairs(case: Case) -> dict[str, Step]:
    """Name -> product and collective."""

    def pair(collective: Step) -> Step:
        if case.operator.returns_gathered:
            return lambda i: (collective(i), case.multiply(i))
        if case.operator.collective == "reduce_scatter":
            return lambda i: (
                torch.mm(case.sets[i % SETS][0], case.sets[i % SETS][1].T, out=case.received),
                collective(i),
            )
        return lambda i: (case.multiply(i), collective(i))

    ways = {f"cuBLAS + {name}": pair(collective) for name, collective in collectives(case).items()}
    return ways | _async_tensor_parallel(case)


def mapped(case: Case) -> dict[str, Step]:
    """Name -> cuBLAS, unchanged, with an output that is the peers' memory; in both orders of rows."""
    if not sends_output(case.shape.operator):
        return {}
    shape = (case.shape.rows, case.shape.columns)
    ways: dict[str, Step] = {}
    for order in ORDERS:
        run = fuse(
            torch.mm, case.operator.collective, shape=shape, dtype=case.shape.dtype,
            order=order, group=case.group
        )  # fmt: skip
        sources = [x for x, _ in case.sets]
        if order == "rotated":
            inputs = [
                empty_rotating(
                    (case.shape.rows, case.shape.inner), dtype=case.shape.dtype, group=case.group
                )
                for _ in sources
            ]
            for source, x in zip(inputs, sources, strict=True):
                source.natural.copy_(x)
            sources = [source.rotated for source in inputs]
        ways[f"cuBLAS, mapped output, {order}"] = functools.partial(
            _mapped_call, run, sources, [w for _, w in case.sets]
        )
    return ways


def _mapped_call(
    run: Fused, sources: list[torch.Tensor], weights: list[torch.Tensor], i: int
) -> torch.Tensor:
    return run(sources[i % SETS], weights[i % SETS].T)


def split(case: Case) -> dict[str, Step]:
    """Name -> cuBLAS for each rank's rows, and copy engines."""
    if not sends_output(case.shape.operator):
        return {}
    ranks, dtype = case.owner.world_size, case.shape.dtype
    shape = (ranks, case.shape.rows // ranks, case.shape.columns)
    product = functools.partial(multiply_in_chunks, case.owner)
    collective = case.operator.collective
    run = fuse(
        product, collective, shape=shape, dtype=dtype, transport="copy_engine", group=case.group
    )
    sets = [Operands(x, w, None, None, None, dtype) for x, w in case.sets]
    return {"cuBLAS in parts, copy engines": lambda i: run(sets[i % SETS], False)}


def triggered(case: Case, config: GemmConfig, pieces: int = 1) -> dict[str, Step]:
    """Name -> the product that counts its tiles, with copy engines; and each of the two alone."""
    if not sends_output(case.shape.operator):
        return {}
    ranks = case.owner.world_size
    shape = (ranks, case.shape.rows // ranks, case.shape.columns)
    tiles = ceil_div(shape[1] // pieces, config.block_m) * ceil_div(
        case.shape.columns, config.block_n
    )
    sets = [Operands(x, w, None, None, None, case.shape.dtype).for_kernel() for x, w in case.sets]
    collective, dtype = case.operator.collective, case.shape.dtype
    product = functools.partial(count_product, case.owner)
    run = fuse(
        product,
        collective,
        shape=shape,
        dtype=dtype,
        transport="copy_engine",
        tiles=tiles,
        pieces=pieces,
        group=case.group,
    )
    copies = TriggeredTransfers(shape, dtype=dtype, tiles=tiles, pieces=pieces, group=case.group)
    counters, plain = (
        torch.zeros(ranks * pieces, dtype=torch.int32, device=case.owner.device),
        case.product.view(shape),
    )

    def copy(i: int) -> None:
        copies.begin()
        copies.counters.fill_(tiles)
        copies.exchange()

    cut = "" if pieces == 1 else f", {pieces} pieces a rank"
    return {
        f"counted product, copy engines{cut}": lambda i: run(sets[i % SETS], False, config),
        f"copy engines{cut} alone": copy,
        f"our counted product{cut} alone": lambda i: product(
            sets[i % SETS], False, config, out=plain, counters=counters
        ),
    }


def check_carried(case: Case, name: str, step: Step) -> None:
    """Against the operator's unfused pair.

    Raises:
        InterlaceError: they differ by more than roundings.
    """
    y, expected = step(0), case.call(0, "unfused")
    assert isinstance(y, torch.Tensor)
    y = y.reshape(expected.shape)
    difference = ((y.double() - expected.double()).norm() / expected.double().norm()).float()
    case.owner.synchronize()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX, group=case.group)
    if not difference.item() <= 2 * tolerance(case.shape):
        raise InterlaceError(
            f"{case.shape.operator} {case.shape}, {name}: differs by {difference.item():.1e} from "
            "the pair; not timed."
        )


def _async_tensor_parallel(case: Case) -> dict[str, Step]:
    """torch's own overlap of the product with copies, where it has one."""
    # Defines the operators, too
    from torch.distributed import _symmetric_memory as symmetric_memory

    process_group = case.group or dist.group.WORLD
    assert process_group is not None
    name, sets = process_group.group_name, case.sets
    if case.operator.collective == "reduce_scatter":
        scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
        ways: dict[str, Step] = {
            "torch async-TP (cuBLAS + copies)": lambda i: scatter(
                sets[i % SETS][0], sets[i % SETS][1].T, "sum", 0, name
            )
        }
    elif case.operator.returns_gathered:
        gather = torch.ops.symm_mem.fused_all_gather_matmul
        ways = {
            "torch async-TP (copies + cuBLAS)": lambda i: gather(
                sets[i % SETS][0], [sets[i % SETS][1].T], 0, name, return_A=False
            )
        }
    else:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # needed until torch 2.10, deprecated since
        symmetric_memory.enable_symm_mem_for_group(name)
    return ways


def _product_alone(case: Case, config: GemmConfig) -> Step:
    """Return the kernel of gemm_reduce_scatter in a group of one: no puts and no waits, all of the
    compute.
    """
    solo = solo_group(case.owner.device)
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(GemmReduceScatterConfig)
    }
    same = GemmReduceScatterConfig(**{**fields, "stagger": 0})

    def call(i: int) -> None:
        x, w = case.sets[i % SETS]
        x = case.gathered if case.operator.returns_gathered else x
        operands = Operands(x, w, None, None, None, x.dtype).for_kernel()
        prepare(solo, operands, [len(x)], case.received, same)()

    return call


class Grouped(Protocol):
    """What a case of any benchmark has: its process group, and that as operators see it."""

    group: dist.ProcessGroup | None
    owner: Group


def timed(case: Grouped, step: Step, samples: int = 15) -> Timing:
    """Time ``step``; buffers that the graph has taken are given back afterwards, for the graph is
    gone.
    """
    timing = measure(step, period=SETS, samples=samples, group=case.group)
    case.owner.release()
    return timing


def bench(
    shape: Shape, config: GemmConfig | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Check, then time one shape in every way. Collective; the same result on every rank.

    Raises:
        InterlaceError: the fused result is wrong; nothing is timed then.
    """
    case = Case(shape, group)
    chosen = config or case.choice.config
    error = check(case, chosen)
    steps: dict[str, Step] = {"fused": functools.partial(case.call, impl="fused", config=chosen)}
    for impl in own_implementations(shape.operator):
        steps[impl] = functools.partial(case.call, impl=impl, config=chosen)
        check_carried(case, impl, steps[impl])
    steps |= pairs(case) or {"unfused": functools.partial(case.call, impl="unfused")}
    times = {name: timed(case, step) for name, step in steps.items()}
    host = {
        name: host_us(step, device=case.owner.device, group=case.group)
        for name, step in steps.items()
    }
    for name, step in (mapped(case) | split(case) | triggered(case, chosen)).items():
        if not name.endswith(" alone"):
            check_carried(case, name, step)
        times[name] = timed(case, step)
    for name, step in collectives(case).items():
        times[f"{name} alone"] = timed(case, step)
    times["cuBLAS alone"] = timed(case, case.multiply)
    times["our product alone"] = timed(case, _product_alone(case, chosen))
    case.owner.synchronize()
    ranks, itemsize = case.owner.world_size, shape.dtype.itemsize
    cost = case.operator.cost(
        rows=shape.rows, columns=shape.columns, inner=shape.inner, itemsize=itemsize,
        world_size=ranks
    )  # fmt: skip
    memory_bytes = cost.memory_bytes + cost.receive_bytes
    return {
        "operator": shape.operator,
        "shape": str(shape),
        "rows": shape.rows,
        "columns": shape.columns,
        "inner": shape.inner,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "world_size": ranks,
        "config": str(chosen),
        "auto": case.choice.impl,
        "relative_error": error,
        "floor_us": round(H200_NODE.floor_ns(memory_bytes, cost.link_bytes, cost.flops) / 1e3, 2),
        "flops": cost.flops,
        "memory_bytes": memory_bytes,
        "link_bytes": cost.link_bytes,
        "times": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "host_us": host,
    }


# The tuner


def tune(shape: Shape, group: dist.ProcessGroup | None = None) -> GemmConfig:
    """The fastest of the candidates that run and are right. Collective.

    Raises:
        InterlaceError: there is none.
    """
    from triton.runtime.errors import OutOfResources

    case = Case(shape, group)
    best, best_us = None, math.inf
    for config in case.operator.candidates(case.choice.config, shape.rows, case.owner.world_size):
        try:
            check(case, config)
        except (
            InterlaceError,
            OutOfResources,
        ) as error:  # on every rank alike; the latter before anything was launched
            print(f"{shape.operator} {shape}, {config}: left out: {error}", flush=True)
            continue
        time_us = timed(
            case, functools.partial(case.call, impl="fused", config=config), samples=7
        ).median_us
        if time_us < best_us:
            best, best_us = config, time_us
    if best is None:
        raise InterlaceError(
            f"{shape.operator} {shape}: some configuration must run and be right; none did on "
            "this GPU."
        )
    return best


__all__ = ["Case", "Shape", "bench", "check", "tolerance", "tune"]
