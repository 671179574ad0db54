"""Time products of one input in one kernel beside cuBLAS: one product after another, and one with
joined weights.

    python benchmarks/linears.py [--json FILE] [--tune] [--tokens 4 16]

It needs one GPU. Shapes are those of a rank of two of Llama 3 8B and 70B: queries, keys and values;
gate and up; 1, 4 and 16 tokens, bfloat16. Each call finds its weights in no cache: calls of a CUDA
graph take turns over weights that do not fit in the L2 together. The last column is the time to
read the weights once at the bandwidth of a copy, which is measured first. Every result is compared
with float64 before anything is timed. ``--tune`` tries other tiles, and prints the fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import documents
import torch
import torch.nn.functional as F

import interlace
from interlace.bench.timing import Timing, measure
from interlace.gemm.autotune import sets_past_cache
from interlace.operators.linears.config import LinearsConfig, default_config
from interlace.operators.linears.launch import multiply
from interlace.operators.linears.reference import linears as one_after_another

TOKENS = (1, 4, 16)
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

    def merged(self, i: int, config: LinearsConfig) -> list[torch.Tensor]:
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


def configurations(tokens: int) -> Iterator[LinearsConfig]:
    """Yield tiles that are worth a trial."""
    if tokens == 1:
        for block_n, block_k, warps in itertools.product(
            (2, 4, 8, 16), (256, 512, 1024), (1, 2, 4)
        ):
            yield LinearsConfig(block_n, block_k, warps)
        return
    # Few rows per program where a weight has few, and enough bytes in flight for each SM.
    for tiles in itertools.product((16, 32, 64), (128, 256), (2, 4), (3, 4, 6)):
        config = LinearsConfig(*tiles)
        block_bytes = (config.block_n + tokens) * config.block_k * DTYPE.itemsize
        if block_bytes * config.num_stages <= MOST_SHARED_BYTES:
            yield config


def copy_gb_per_s() -> float:
    """Return the bandwidth of reading, in GB/s, of a copy that both reads and writes."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    time_us = measure(lambda _: target.copy_(source)).median_us
    return 2 * source.nbytes / time_us / 1e3


def worker(tune: bool, all_tokens: Sequence[int]) -> dict[str, Any]:
    """Time all layers on this rank's GPU, and print a line for each."""
    bandwidth = copy_gb_per_s()
    print(f"{torch.cuda.get_device_name()}; a copy moves {bandwidth:.0f} GB/s. us, p10 to p90")
    lines = []
    for layer, tokens in itertools.product(LAYERS, all_tokens):
        case = Case(layer, tokens)
        config = default_config(tokens, DTYPE.itemsize)
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
    return {"gpu": torch.cuda.get_device_name(), "copy_gb_per_s": bandwidth, "layers": lines}


def fastest(case: Case, tokens: int) -> LinearsConfig:
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
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="default: 1 4 16")
    options = parser.parse_args()
    (results,) = interlace.launch(worker, 1, options.tune, options.tokens, backend="cuda")
    if options.json:
        documents.write(options.json, results)


if __name__ == "__main__":
    main()
