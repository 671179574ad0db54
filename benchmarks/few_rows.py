"""Time products of few rows by the kernel of ``interlace.gemm.few_rows`` beside cuBLAS.

    python benchmarks/few_rows.py [--json FILE] [--tune] [--tokens 4 16] [--shapes 28] [--seed 7]

It needs one GPU. First come layers of one input, those of a rank of two of Llama 3 8B and 70B:
queries, keys and values; gate and up. They are products one after another, one product with joined
weights, and the kernel with all weights. Then come single products of random shapes. All are
bfloat16. Each call finds its weights in no cache: calls of a CUDA graph take turns over weights
that do not fit in the L2 together. The last column is the time to read the weights once at the
bandwidth of a copy, which is measured first. Every result is compared with float64 before anything
is timed.
``--tune`` tries other tiles for the layers, and prints the fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import documents
import torch
import torch.nn.functional as F

import interlace
from interlace.bench.timing import Timing, measure
from interlace.comm.groups.machine_rates import sets_past_cache
from interlace.gemm.few_rows import FewRowsConfig, default_config, is_faster
from interlace.operators.linears import multiply
from interlace.operators.linears.reference import linears as one_after_another
from interlace.units import next_power_of_2

TOKENS = (1, 4, 16, 64)
DTYPE = torch.bfloat16
RANKS = 2
MOST_SHARED_BYTES = 200 * 1024


@dataclasses.dataclass(frozen=True)
class Layer:
    """Products of one input.

    Attributes:
        name: The model and the products.
        columns: K, the model's width.
        rows: N of each weight on a rank.
    """

    name: str
    columns: int
    rows: tuple[int, ...]


LAYERS = (
    Layer("Llama 3 8B, q k v", 4096, (4096 // RANKS, 1024 // RANKS, 1024 // RANKS)),
    Layer("Llama 3 8B, gate up", 4096, (14336 // RANKS, 14336 // RANKS)),
    Layer("Llama 3 70B, q k v", 8192, (8192 // RANKS, 1024 // RANKS, 1024 // RANKS)),
    Layer("Llama 3 70B, gate up", 8192, (28672 // RANKS, 28672 // RANKS)),
)


class Case:
    """A layer's operands, with so many sets of weights that none is in the cache at its turn."""

    def __init__(self, layer: Layer, tokens: int) -> None:
        generator = torch.Generator("cuda").manual_seed(3)
        self.nbytes = sum(layer.rows) * layer.columns * DTYPE.itemsize

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(DTYPE)

        self.x = random(tokens, layer.columns)
        self.sets = [
            [random(count, layer.columns) for count in layer.rows]
            for _ in range(max(2, sets_past_cache(self.nbytes, self.x.device)))
        ]
        self.joined = [torch.cat(weights) for weights in self.sets]
        self.biases: list[torch.Tensor | None] = [None] * len(layer.rows)

    def cublas(self, i: int) -> list[torch.Tensor]:
        """Run torch's products of the i-th call."""
        return one_after_another(self.x, self.sets[i % len(self.sets)], self.biases)

    def together(self, i: int) -> torch.Tensor:
        """Run one product with the weights of the i-th call, which a program must keep joined."""
        return F.linear(self.x, self.joined[i % len(self.joined)])

    def merged(self, i: int, config: FewRowsConfig | None) -> list[torch.Tensor]:
        """Run the kernel on the operands of the i-th call."""
        return multiply(self.x, self.sets[i % len(self.sets)], self.biases, config)

    def check(self, results: Sequence[torch.Tensor]) -> None:
        """Compare results of call 0 with float64.

        Raises:
            AssertionError: An error is larger than roundings explain.
        """
        allowed = torch.finfo(DTYPE).eps + 8 * math.sqrt(self.x.shape[1]) * 2**-23
        for y, w in zip(results, self.sets[0], strict=True):
            exact = self.x.double() @ w.double().T
            error = float((y.double() - exact).norm() / exact.norm())
            assert error < allowed, f"relative error {error:.1e}; allowed {allowed:.1e}"

    def time(self, call: Callable[[int], object]) -> Timing:
        """Return the time of a call whose weights are in no cache."""
        return measure(call, period=len(self.sets))


def configurations(tokens: int) -> Iterator[FewRowsConfig]:
    """Yield tiles that are worth a trial."""
    if tokens == 1:
        for columns, block_k, warps in itertools.product(
            (2, 4, 8, 16), (256, 512, 1024), (1, 2, 4)
        ):
            yield FewRowsConfig(1, columns, block_k, warps, 1)
    rows = max(16, next_power_of_2(tokens))
    for (columns, warps), block_k, stages in itertools.product(
        ((64, 4), (128, 4), (128, 8)), (64, 128, 256), (3, 4, 5, 6, 8)
    ):
        if (rows + columns) * block_k * DTYPE.itemsize * stages <= MOST_SHARED_BYTES:
            yield FewRowsConfig(rows, columns, block_k, warps, stages)


def copy_gb_per_s() -> float:
    """Return the bandwidth of reading, in GB/s, of a copy that both reads and writes."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    time_us = measure(lambda _: target.copy_(source)).median_us
    return 2 * source.nbytes / time_us / 1e3


def worker(tune: bool, all_tokens: Sequence[int], shapes: int, seed: int) -> dict[str, Any]:
    """Time all layers and shapes on this rank's GPU, and print a line for each."""
    bandwidth = copy_gb_per_s()
    print(f"{torch.cuda.get_device_name()}; a copy moves {bandwidth:.0f} GB/s. us, p10 to p90")
    lines = []
    for layer, tokens in itertools.product(LAYERS, all_tokens):
        case = Case(layer, tokens)
        config = default_config(case.x, sum(layer.rows))
        if tune:
            config = fastest(case, tokens)
        for results in (case.cublas(0), case.merged(0, config)):
            case.check(results)
        times = {
            "cublas": case.time(case.cublas),
            "together": case.time(case.together),
            "merged": case.time(functools.partial(case.merged, config=config)),
        }
        floor = case.nbytes / bandwidth / 1e3
        medians = {name: time.median_us for name, time in times.items()}
        shown = ", ".join(
            f"{name} {time.median_us:6.1f} ({time.p10_us:.1f} to {time.p90_us:.1f})"
            for name, time in times.items()
        )
        print(
            f"{layer.name:20} {tokens:3} tokens: {shown}, weights {floor:6.1f}; "
            f"{medians['merged'] / medians['cublas'] - 1:+.0%} [{config}]",
            flush=True,
        )
        lines.append(
            {"layer": dataclasses.asdict(layer), "tokens": tokens, "config": str(config)}
            | {name: dataclasses.asdict(each) for name, each in times.items()}
            | {"weights_us": floor, "sets": len(case.sets)}
        )
    products = list(random_products(shapes, seed, all_tokens))
    for tokens in all_tokens:
        ratios = sorted(
            line["kernel"]["median_us"] / line["cublas"]["median_us"]
            for line in products
            if line["tokens"] == tokens
        )
        if ratios:
            print(
                f"{tokens:3} tokens: the kernel takes {statistics.median(ratios):.2f} of cuBLAS's "
                f"time at the median of {len(ratios)} shapes, {ratios[0]:.2f} to {ratios[-1]:.2f}"
            )
    return {
        "gpu": torch.cuda.get_device_name(),
        "copy_gb_per_s": bandwidth,
        "layers": lines,
        "products": products,
    }


def random_products(shapes: int, seed: int, all_tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the times of single products by weights of random sizes, multiples of 64."""
    chosen = random.Random(seed)
    for _ in range(shapes):
        columns = int(2 ** chosen.uniform(9, 15)) // 64 * 64
        inner = int(2 ** chosen.uniform(9.5, 14)) // 64 * 64
        for tokens in all_tokens:
            case = Case(Layer("", inner, (columns,)), tokens)
            kernel = functools.partial(case.merged, config=None)
            case.check(kernel(0))
            line = {
                "columns": columns,
                "inner": inner,
                "tokens": tokens,
                "is_faster": is_faster(case.x, case.sets[0][0]),
                "cublas": dataclasses.asdict(case.time(case.cublas)),
                "kernel": dataclasses.asdict(case.time(kernel)),
            }
            print(
                f"{columns} x {inner}, {tokens} tokens: cuBLAS {line['cublas']['median_us']:.1f}, "
                f"kernel {line['kernel']['median_us']:.1f}",
                flush=True,
            )
            yield line


def fastest(case: Case, tokens: int) -> FewRowsConfig:
    """Return the tiles with the shortest median."""
    times = {}
    for config in configurations(tokens):
        try:
            case.check(case.merged(0, config))
            times[config] = case.time(functools.partial(case.merged, config=config)).median_us
        except (RuntimeError, AssertionError) as error:
            # Some tiles need more registers or shared memory than this GPU has.
            print(f"  {config}: {type(error).__name__}", flush=True)
    return min(times, key=lambda config: times[config])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all times to this file")
    parser.add_argument("--tune", action="store_true", help="try other tiles, too")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="default: 1 4 16 64")
    parser.add_argument("--shapes", type=int, default=28, help="how many; default: 28")
    parser.add_argument("--seed", type=int, default=7, help="of the shapes; default: 7")
    options = parser.parse_args()
    arguments = options.tune, options.tokens, options.shapes, options.seed
    (results,) = interlace.launch(worker, 1, *arguments, backend="cuda")
    if options.json:
        documents.write(options.json, results)


if __name__ == "__main__":
    main()
