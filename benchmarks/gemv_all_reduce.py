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

from interlace.bench.benchmark import LeastWork, Step, Way, constant
from interlace.bench.carriers import symmetric_all_reduces
from interlace.bench.products import ProductShape, TimedProduct, rounding_error
from interlace.comm.groups.group import MAX_PROGRAMS, solo_group
from interlace.costs.gemv_all_reduce import floor_link_bytes, floor_memory_bytes
from interlace.operators.gemm_all_reduce import gemv_all_reduce
from interlace.operators.gemm_all_reduce.config import GemvAllReduceConfig
from interlace.operators.gemm_all_reduce.gemv import GEMV, prepare

OPERATOR = "gemv_all_reduce"


@dataclasses.dataclass(frozen=True)
class GemvShape(ProductShape):
    """One benchmarked call: ``x [rows, inner]``, ``w [columns, inner]`` on every rank."""

    @property
    def tolerance(self) -> float:
        """The relative error that roundings explain.

        The output is rounded, by half a unit in the last place, uniformly (/ sqrt(3)); sums over K
        are float32.
        """
        return rounding_error(self.dtype, self.inner, 1.5)


class TimedGemv(TimedProduct):
    """A product with few rows, and the calls of ``gemv_all_reduce`` on it."""

    # Results are this rank's own memory, so a graph takes no buffers, and a release would make the
    # ranks agree and allocate anew before each of dozens of candidates.
    releases = False

    def call(self, i: int, impl: str, config: Any = None) -> torch.Tensor:
        """Run the operator."""
        return gemv_all_reduce(*self.operands(i), group=self.group, impl=impl, config=config)

    # The ways

    def ways(self, config: Any) -> list[Way]:
        """Return the kernel, every pair of stock torch, and each part alone."""
        name = GEMV.name
        fused = Way(name, "ours", self.tuned_call(config), name)
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
        multiply = self._multiply_vector if self.shape.rows == 1 else self.multiply
        multiply(i, out)
        collective(i)

    def _multiply_vector(self, i: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply a single row on this rank alone, for which cuBLAS has a kernel of its own."""
        x, w = self.operands(i)
        return torch.mv(w, x[0], out=(self.product if out is None else out)[0])

    def _compute_alone(self, config: GemvAllReduceConfig) -> list[Way]:
        """Return the product without a collective, by cuBLAS and by our kernel."""
        solo = solo_group(self.device)
        ways: dict[str, Step] = {"cuBLAS mm alone": self.multiply}
        if self.shape.rows == 1:
            ways["cuBLAS mv alone"] = self._multiply_vector
        # A group of one has no puts and no waits, and all of the compute.
        ways["our GEMV alone"] = lambda i: prepare(
            solo, *self.operands(i), None, self.product, config
        )()
        return [Way(name, "compute", call) for name, call in ways.items()]

    def _exchange_alone(self, config: GemvAllReduceConfig) -> Way:
        """Return the kernel without a K to sum over: all of the communication, of zeros."""
        options: dict[str, Any] = {"group": self.group, "impl": GEMV.name, "config": config}

        def call(i: int) -> torch.Tensor:
            x, w = self.operands(i)
            y: torch.Tensor = gemv_all_reduce(x[:, :0], w[:, :0], **options)
            return y

        return Way("our exchange alone", "communication", call)

    # Timing and tuning

    def tuned_call(self, config: Any) -> Step:
        """Return the kernel's call."""
        return functools.partial(self.call, impl=GEMV.name, config=config)

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
    kernels = [prepare(owner, *case.operands(0), None, case.product, config) for config in configs]
    # Ranks share out the compiling: there are dozens of candidates.
    compilations = [
        kernel.compile if i % owner.world_size == owner.rank else None
        for i, kernel in enumerate(kernels)
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
    best: GemvAllReduceConfig = case.fastest(
        {config: case.measure(case.tuned_call(config), 25).median_us for _, _, config in usable[:4]}
    )
    return best


def measure(sizes: tuple[int, int, int], *, dtype: str, tunes: bool) -> list[dict[str, Any]]:
    """Benchmark an all-reduce of ``(M, N, K)`` with few rows, with the best configuration if
    ``tunes``.
    """
    shape = GemvShape(OPERATOR, *sizes, getattr(torch, dtype))
    return [bench(shape, tune(shape) if tunes else None)]
