"""Benchmark and tuner of ``gemv_all_reduce`` on CUDA: every figure that a claim needs, from one
run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench.timing import Timing, measure
from interlace.comm import group_of
from interlace.comm.group import MAX_PROGRAMS
from interlace.costs.gemv_all_reduce import floor_link_bytes, floor_memory_bytes
from interlace.costs.machine import H200_NODE
from interlace.errors import InterlaceError
from interlace.operators.gemv_all_reduce.api import gemv_all_reduce
from interlace.operators.gemv_all_reduce.config import GemvAllReduceConfig
from interlace.operators.gemv_all_reduce.launch import choose, prepare

OPERATOR = "gemv_all_reduce"
_L2_MULTIPLE = 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """One benchmarked call: ``x [tokens, columns]``, ``w [rows, columns]`` per rank."""

    tokens: int
    rows: int
    columns: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.tokens} x {self.rows} x {self.columns}"


class Case:
    """A shape's inputs on this rank, with enough weights that none is in the cache when its turn
    comes.
    """

    def __init__(self, shape: Shape, group: dist.ProcessGroup | None = None) -> None:
        self.shape, self.group = shape, group
        self.device = torch.device("cuda", torch.cuda.current_device())
        generator = torch.Generator(self.device).manual_seed(1 + dist.get_rank(group))
        size = (shape.rows, shape.columns)
        nbytes = shape.rows * shape.columns * shape.dtype.itemsize
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        copies = max(2, min(16, math.ceil(_L2_MULTIPLE * cache / max(nbytes, 1)) + 1))
        self.weights = [
            torch.randn(size, generator=generator, device=self.device).to(shape.dtype)
            for _ in range(copies)
        ]
        self.x = torch.randn(
            shape.tokens, shape.columns, generator=generator, device=self.device
        ).to(shape.dtype)

    def weight(self, i: int) -> torch.Tensor:
        return self.weights[i % len(self.weights)]

    def expected(self, i: int) -> torch.Tensor:
        """The sum in float64."""
        y = self.x.double() @ self.weight(i).double().T
        dist.all_reduce(y, group=self.group)
        return y

    def error(
        self, i: int, config: GemvAllReduceConfig | None = None, impl: str = "fused"
    ) -> float:
        """Relative error of one call; NaN if anything was left unwritten."""
        y = gemv_all_reduce(self.x, self.weight(i), group=self.group, impl=impl, config=config)
        expected = self.expected(i)
        return float((y.double() - expected).norm() / expected.norm())


def tolerance(shape: Shape) -> float:
    """A rounding of the output (half a unit in the last place, uniformly: /sqrt(3)) and float32
    sums over K.
    """
    return (
        1.5 * torch.finfo(shape.dtype).eps / 2
        + 8 * math.sqrt(max(shape.columns, 1)) * torch.finfo(torch.float32).eps
    )


# The unfused pairs


def unfused_pairs(case: Case) -> dict[str, tuple[Callable[[int], object], Callable[[int], object]]]:
    """Name -> (compute and collective, collective alone), of every way that stock torch offers."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    shape, group = case.shape, case.group
    process_group = group or dist.group.WORLD
    assert process_group is not None
    buffer = symmetric_memory.empty(
        (shape.tokens, shape.rows), dtype=shape.dtype, device=case.device
    )
    symmetric_memory.rendezvous(buffer, process_group.group_name)
    buffer.zero_()
    plain = torch.zeros_like(buffer)
    name = process_group.group_name

    def product(out: torch.Tensor) -> Callable[[int], object]:
        if shape.tokens == 1:
            return lambda i: torch.mv(case.weight(i), case.x[0], out=out[0])
        return lambda i: torch.mm(case.x, case.weight(i).T, out=out)

    collectives: dict[str, tuple[torch.Tensor, Callable[[int], object]]] = {
        "NCCL": (plain, lambda i: dist.all_reduce(plain, group=group)),
        "torch one-shot": (
            buffer,
            lambda i: torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", name),
        ),
        "torch two-shot": (
            buffer,
            lambda i: torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", name),
        ),
    }

    def pair(
        compute: Callable[[int], object], collective: Callable[[int], object]
    ) -> Callable[[int], object]:
        def call(i: int) -> None:
            compute(i)
            collective(i)

        return call

    return {
        key: (pair(product(out), collective), collective)
        for key, (out, collective) in collectives.items()
    }


def compute_alone(case: Case) -> dict[str, Callable[[int], object]]:
    """Name -> the product without a collective, by torch (cuBLAS)."""
    shape = case.shape
    out = torch.empty((shape.tokens, shape.rows), dtype=shape.dtype, device=case.device)
    ways: dict[str, Callable[[int], object]] = {
        "cuBLAS mm": lambda i: torch.mm(case.x, case.weight(i).T, out=out)
    }
    if shape.tokens == 1:
        ways["cuBLAS mv"] = lambda i: torch.mv(case.weight(i), case.x[0], out=out[0])
    return ways


def bench(
    shape: Shape, config: GemvAllReduceConfig | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Check, then time one shape in every way. Collective; the same result on every rank.

    Raises:
        InterlaceError: the fused result is wrong; nothing is timed then.
    """
    case = Case(shape, group)
    owner = group_of(group)
    choice = choose(
        tokens=shape.tokens, rows=shape.rows, columns=shape.columns, dtype=shape.dtype,
        world_size=owner.world_size, device=case.device,
    )  # fmt: skip
    chosen = config or choice.config
    errors = [case.error(i, chosen) for i in range(3)]
    if not max(errors) <= tolerance(shape):
        raise InterlaceError(
            f"{OPERATOR} {shape}: relative error {errors} is above {tolerance(shape):.1e}; "
            "not timed."
        )

    def fused(
        x: torch.Tensor, weights: list[torch.Tensor], on: dist.ProcessGroup | None
    ) -> Callable[[int], object]:
        return lambda i: gemv_all_reduce(
            x, weights[i % len(weights)], group=on, impl="fused", config=chosen
        )

    times: dict[str, Timing] = {
        "fused": measure(fused(case.x, case.weights, group), period=len(case.weights), group=group)
    }
    for name, (both, alone) in unfused_pairs(case).items():
        times[f"cuBLAS + {name}"] = measure(both, period=len(case.weights), group=group)
        times[f"{name} alone"] = measure(alone, period=len(case.weights), group=group)
    for name, call in compute_alone(case).items():
        times[f"{name} alone"] = measure(call, period=len(case.weights), group=group)
    times["our GEMV alone"] = measure(_solo(case, chosen), period=len(case.weights), group=group)
    empty = case.x[:, :0], [weight[:, :0] for weight in case.weights]
    times["our exchange alone"] = measure(
        fused(*empty, group), period=len(case.weights), group=group
    )
    owner.synchronize()
    link_bytes = floor_link_bytes(
        tokens=shape.tokens,
        rows=shape.rows,
        itemsize=shape.dtype.itemsize,
        world_size=owner.world_size,
    )
    memory_bytes = floor_memory_bytes(
        tokens=shape.tokens, rows=shape.rows, columns=shape.columns, itemsize=shape.dtype.itemsize
    )
    return {
        "operator": OPERATOR,
        "tokens": shape.tokens,
        "rows": shape.rows,
        "columns": shape.columns,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "world_size": owner.world_size,
        "config": str(chosen),
        "auto": choice.impl,
        "relative_error": max(errors),
        "floor_us": round(H200_NODE.floor_ns(memory_bytes, link_bytes) / 1e3, 2),
        "memory_bytes": memory_bytes,
        "link_bytes": link_bytes,
        "times": {name: dataclasses.asdict(timing) for name, timing in times.items()},
    }


def _solo(case: Case, config: GemvAllReduceConfig) -> Callable[[int], object]:
    """The same kernel in a group of one: no puts and no waits, all of the compute."""
    from interlace.comm.group import solo_group

    solo = solo_group(case.device)
    y = case.x.new_empty(case.shape.tokens, case.shape.rows)

    def call(i: int) -> None:
        prepare(solo, case.x, case.weight(i), None, y, config)()

    return call


# The tuner


def candidates(tokens: int, rows: int) -> Iterable[GemvAllReduceConfig]:
    """Configurations worth measuring."""
    if tokens == 1:
        one_warp = [(2, 512), (4, 512), (2, 1024), (4, 1024)]
        two_warps = [(4, 512), (8, 512), (4, 1024), (2, 2048)]
        four_warps = [(8, 512), (16, 256), (16, 512), (8, 1024), (4, 2048)]
        for warps, tiles in ((1, one_warp), (2, two_warps), (4, four_warps)):
            for block_n, block_k in tiles:
                count = math.ceil(rows / block_n)
                for share in (1, 2):
                    programs = math.ceil(count / share)
                    if programs <= MAX_PROGRAMS and (share == 1 or programs >= 1024):
                        yield GemvAllReduceConfig(
                            "one_shot", block_n, block_k, warps, 1, programs if share > 1 else 0
                        )
        return
    if tokens <= 16:
        for block_n, (block_k, stages) in itertools.product((32, 64), ((128, 5), (256, 3))):
            yield GemvAllReduceConfig("one_shot", block_n, block_k, 4, stages)
    if tokens >= 8:
        for block_k, warps, stages in (
            (64, 4, 6),
            (64, 4, 8),
            (128, 4, 4),
            (128, 4, 5),
            (128, 8, 4),
            (256, 4, 3),
        ):
            yield GemvAllReduceConfig("two_phase", 64, block_k, warps, stages)
        yield GemvAllReduceConfig("two_phase", 32, 128, 4, 5)


def tune(shape: Shape, group: dist.ProcessGroup | None = None) -> list[tuple[float, str]]:
    """Median time of every candidate that runs and is right, fastest first. Collective."""
    from triton.runtime.errors import OutOfResources

    case = Case(shape, group)
    owner = group_of(group)
    configs = list(candidates(shape.tokens, shape.rows))

    def timed(config: GemvAllReduceConfig, samples: int) -> float:
        return measure(
            lambda i: gemv_all_reduce(case.x, case.weight(i), group=group, impl="fused", config=config),
            period=len(case.weights), samples=samples, group=group,
        ).median_us  # fmt: skip

    y = case.x.new_empty(shape.tokens, shape.rows)
    ready = [prepare(owner, case.x, case.weight(0), None, y, config) for config in configs]
    works = torch.ones(len(configs), device=case.device)
    for i in range(owner.rank, len(configs), owner.world_size):  # ranks share out the compiling
        try:
            ready[i].compile()
        except (
            Exception
        ) as error:  # the compiler's errors have no common base: too much shared memory, say
            works[i] = 0
            print(
                f"{OPERATOR} {shape}, {configs[i]}: left out: {str(error).splitlines()[0][:100]}",
                flush=True,
            )
    dist.all_reduce(works, op=dist.ReduceOp.MIN, group=group)
    found = []
    for config, usable in zip(configs, works.tolist(), strict=True):
        if not usable:
            continue
        try:
            worst = torch.tensor(case.error(0, config), device=case.device)
        except OutOfResources:  # on every rank alike, before anything was launched
            continue
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        if not worst.item() <= tolerance(shape):
            print(f"{OPERATOR} {shape}, {config}: wrong by {worst.item():.1e}", flush=True)
            continue
        found.append((timed(config, 7), str(config)))
    found.sort()
    # The fastest of many is partly the luckiest: time the best again.
    again = [(timed(GemvAllReduceConfig.parse(text), 25), text) for _, text in found[:4]]
    return [*sorted(again), *found[4:]]
