"""Benchmark and tuner of ``gemm_all_reduce``'s kernel for few rows, on CUDA: every figure that a
claim needs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench.benchmark import Benchmark, LeastWork, Step, Way, constant
from interlace.bench.carriers import symmetric_all_reduces
from interlace.bench.products import ProductShape
from interlace.comm.groups.group import MAX_PROGRAMS, solo_group
from interlace.costs.gemv_all_reduce import floor_link_bytes, floor_memory_bytes
from interlace.operators.gemm_all_reduce import gemv_all_reduce
from interlace.operators.gemm_all_reduce.config import GemvAllReduceConfig
from interlace.operators.gemm_all_reduce.gemv import GEMV, prepare
from interlace.registry import operator_named

OPERATOR = "gemv_all_reduce"
_L2_MULTIPLE = 3
"""Size of all weights in L2 caches."""


@dataclasses.dataclass(frozen=True)
class GemvShape(ProductShape):
    """One benchmarked call: ``x [rows, inner]``, ``w [columns, inner]`` on every rank."""

    @property
    def tolerance(self) -> float:
        """The relative error that roundings explain.

        The output is rounded, by half a unit in the last place, uniformly (/ sqrt(3)); sums over K
        are float32.
        """
        return (
            1.5 * torch.finfo(self.dtype).eps / 2
            + 8 * math.sqrt(max(self.inner, 1)) * torch.finfo(torch.float32).eps
        )


class TimedGemv(Benchmark[GemvAllReduceConfig]):
    """A shape's inputs on this rank, with so many weights that none is in the cache at its turn."""

    shape: GemvShape

    # Results are this rank's own memory, so a graph takes no buffers, and a release would make the
    # ranks agree and allocate anew before each of dozens of candidates.
    releases = False

    def __init__(self, shape: GemvShape, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(operator_named(OPERATOR), shape, group)
        generator = torch.Generator(self.device).manual_seed(1 + self.owner.rank)
        nbytes = shape.columns * shape.inner * shape.dtype.itemsize
        # Decoding reads each weight once per token, so no weight may be in the cache at its turn.
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        self.operand_sets = max(2, min(16, math.ceil(_L2_MULTIPLE * cache / max(nbytes, 1)) + 1))

        def random(rows: int) -> torch.Tensor:
            size = rows, shape.inner
            return torch.randn(size, generator=generator, device=self.device).to(shape.dtype)

        self.weights = [random(shape.columns) for _ in range(self.operand_sets)]
        self.x = random(shape.rows)
        self.choice = self.operator.choose(
            rows=shape.rows,
            columns=shape.columns,
            inner=shape.inner,
            dtype=shape.dtype,
            world_size=self.owner.world_size,
            device=self.device,
        )

    def weight(self, i: int) -> torch.Tensor:
        """Return the weight of the i-th call."""
        return self.weights[i % self.operand_sets]

    def call(self, i: int, impl: str, config: GemvAllReduceConfig | None = None) -> torch.Tensor:
        """Run the operator."""
        return gemv_all_reduce(self.x, self.weight(i), group=self.group, impl=impl, config=config)

    def fused(self, i: int, config: GemvAllReduceConfig) -> torch.Tensor:
        """Run the kernel."""
        return self.call(i, GEMV.name, config)

    def expected(self, i: int) -> torch.Tensor:
        """Return the sum in float64."""
        y = self.x.double() @ self.weight(i).double().T
        dist.all_reduce(y, group=self.group)
        return y

    # The ways

    def ways(self, config: GemvAllReduceConfig) -> list[Way]:
        """Return the kernel, every pair of stock torch, and each part alone."""
        name = GEMV.name
        fused = Way(name, "ours", functools.partial(self.fused, config=config), name)
        return [fused, *self._pairs(), *self._compute_alone(config), self._exchange_alone(config)]

    def _pairs(self) -> list[Way]:
        """Return product and collective, and the collective alone, by every library."""
        size = self.shape.rows, self.shape.columns
        shared, steps = symmetric_all_reduces(size, self.shape.dtype, self.group)
        # NCCL needs no symmetric memory.
        private = torch.zeros_like(shared)
        collectives: dict[str, tuple[torch.Tensor, Step]] = {
            "NCCL": (private, lambda i: dist.all_reduce(private, group=self.group)),
            **{library: (shared, step) for library, step in steps.items()},
        }
        ways = []
        for library, (out, collective) in collectives.items():
            pair = functools.partial(self._run_pair, out, collective)
            impl = "unfused" if library == "NCCL" else ""
            ways.append(Way(f"cuBLAS + {library}", "pair", pair, impl))
            ways.append(Way(f"{library} alone", "communication", collective))
        return ways

    def _run_pair(self, out: torch.Tensor, collective: Step, i: int) -> None:
        if self.shape.rows == 1:
            torch.mv(self.weight(i), self.x[0], out=out[0])
        else:
            torch.mm(self.x, self.weight(i).T, out=out)
        collective(i)

    def _compute_alone(self, config: GemvAllReduceConfig) -> list[Way]:
        """Return the product without a collective, by cuBLAS and by our kernel."""
        out = self.x.new_empty(self.shape.rows, self.shape.columns)
        solo = solo_group(self.device)
        ways: dict[str, Step] = {
            "cuBLAS mm alone": lambda i: torch.mm(self.x, self.weight(i).T, out=out),
            "cuBLAS mv alone": lambda i: torch.mv(self.weight(i), self.x[0], out=out[0]),
            # A group of one has no puts and no waits, and all of the compute.
            "our GEMV alone": lambda i: prepare(solo, self.x, self.weight(i), None, out, config)(),
        }
        # cuBLAS has a kernel of its own for a single token.
        if self.shape.rows != 1:
            del ways["cuBLAS mv alone"]
        return [Way(name, "compute", call) for name, call in ways.items()]

    def _exchange_alone(self, config: GemvAllReduceConfig) -> Way:
        """Return the kernel without a K to sum over: all of the communication, of zeros."""
        x, weights = self.x[:, :0], [weight[:, :0] for weight in self.weights]
        options: dict[str, Any] = {"group": self.group, "impl": GEMV.name, "config": config}
        return Way(
            "our exchange alone",
            "communication",
            lambda i: gemv_all_reduce(x, weights[i % len(weights)], **options),
        )

    # Timing and tuning

    def tuned_call(self, config: GemvAllReduceConfig) -> Step:
        """Return the kernel's call."""
        return functools.partial(self.fused, config=config)

    def work(self) -> LeastWork:
        """Return the least work of a rank."""
        shape, itemsize = self.shape, self.shape.dtype.itemsize
        memory_bytes = floor_memory_bytes(
            tokens=shape.rows, rows=shape.columns, columns=shape.inner, itemsize=itemsize
        )
        link_bytes = floor_link_bytes(
            tokens=shape.rows,
            rows=shape.columns,
            itemsize=itemsize,
            world_size=self.owner.world_size,
        )
        return LeastWork(memory_bytes, link_bytes)


def bench(
    shape: GemvShape,
    config: GemvAllReduceConfig | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Check, then time one shape in every way. Collective; the same result on every rank.

    Raises:
        InterlaceError: The fused result is wrong; nothing is timed then.
    """
    case = TimedGemv(shape, group)
    chosen = config or case.choice.configs[GEMV.name]
    error = case.check(chosen)
    times = case.time(case.ways(chosen))
    case.owner.synchronize()
    return {
        "shape": str(shape),
        **case.header(chosen, case.choice.impl, error),
        **case.work().entries(),
        "times": times,
    }


def candidates(rows: int, columns: int) -> Iterator[GemvAllReduceConfig]:
    """Yield the configurations worth measuring."""
    # A single token has no use for tensor cores: warps read rows of w as fast as they can.
    if rows == 1:
        one_warp = [(2, 512), (4, 512), (2, 1024), (4, 1024)]
        two_warps = [(4, 512), (8, 512), (4, 1024), (2, 2048)]
        four_warps = [(8, 512), (16, 256), (16, 512), (8, 1024), (4, 2048)]
        for warps, tiles in ((1, one_warp), (2, two_warps), (4, four_warps)):
            for block_n, block_k in tiles:
                count = math.ceil(columns / block_n)
                for share in (1, 2):
                    programs = math.ceil(count / share)
                    if programs <= MAX_PROGRAMS and (share == 1 or programs >= 1024):
                        yield GemvAllReduceConfig(
                            "one_shot", block_n, block_k, warps, 1, programs if share > 1 else 0
                        )
        return
    # Few tokens are sent at once; many are reduced by one rank each and sent again. Tiles of few
    # rows give all SMs a program where the weight has few, and a warp of its own needs no barrier.
    if rows <= 16:
        for block_n, block_k, warps, stages in (
            (16, 256, 1, 4),
            (16, 256, 1, 5),
            (16, 256, 2, 4),
            (16, 256, 2, 5),
            (32, 256, 2, 4),
            (32, 128, 4, 5),
            (64, 128, 4, 5),
            (64, 256, 4, 3),
            (64, 256, 4, 4),
        ):
            yield GemvAllReduceConfig("one_shot", block_n, block_k, warps, stages)
    if rows >= 8:
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


def tune(shape: GemvShape, group: dist.ProcessGroup | None = None) -> GemvAllReduceConfig:
    """Return the fastest of the candidates that run and are right.

    Collective; the same on every rank.

    Raises:
        BackendError: There is none.
    """
    case = TimedGemv(shape, group)
    owner, configs = case.owner, list(candidates(shape.rows, shape.columns))
    y = case.x.new_empty(shape.rows, shape.columns)
    launches = [prepare(owner, case.x, case.weight(0), None, y, config) for config in configs]
    # Ranks share out the compiling: there are dozens of candidates.
    compilations = [
        launch.compile if i % owner.world_size == owner.rank else None
        for i, launch in enumerate(launches)
    ]
    compiled = case.all_compile(compilations, configs)
    times = case.tune(
        constant(config) for config, is_usable in zip(configs, compiled, strict=True) if is_usable
    )
    usable = sorted(
        (time_us, str(config), config)
        for config, time_us in times.items()
        if math.isfinite(time_us)
    )
    # The fastest of many is partly the luckiest: the best are timed again.
    return case.fastest(
        {config: case.measure(case.tuned_call(config), 25).median_us for _, _, config in usable[:4]}
    )


def measure(sizes: tuple[int, int, int], *, dtype: str, tunes: bool) -> list[dict[str, Any]]:
    """Benchmark an all-reduce of ``(M, N, K)`` with few rows, with the best configuration if
    ``tunes``.
    """
    shape = GemvShape(OPERATOR, *sizes, getattr(torch, dtype))
    return [bench(shape, tune(shape) if tunes else None)]
