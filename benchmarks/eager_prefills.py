"""Time eager prefills of numbers of tokens that a program has not had before, and has had.

    python benchmarks/eager_prefills.py --json FILE [--ranks 2] [--layers 24]

A prefill is the row-parallel products of Llama 3 70B's layers, each with the all-reduce, the
residual and the RMSNorm behind it, on inputs whose memory is new in each layer; attention and all
else of a layer is left out. ``auto`` is one call of ``gemm_all_reduce`` a product, ``pair`` what a
program without Interlace calls. A server's prompts seldom have the same length twice, so ``first``
are the first prefills of so many tokens, for which memory of the largest prefill of the range is
there, and ``again`` those of the same numbers after all of them. Ways take turns in being the first
one of a number. Results are compared before anything is timed.

Milliseconds of a prefill: what it takes the host to enqueue it, and until the GPU is done; of each
the slowest rank's, and over numbers the median, the 10th and the 90th percentile.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist
import torch.nn.functional as F
from program_times import Sample, sample, spreads

import interlace

COLUMNS, INNERS = 8192, (8192, 28672)
RANGES = ((300, 1000), (1000, 2048), (2048, 4096))
NUMBERS = 10
EPSILON = 1e-5

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Returns the normalised sum and the new residual, given x, w, the residual and the norm's weight.
"""


def auto(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply, sum over ranks, add the residual and normalise."""
    y, residual, _ = interlace.gemm_all_reduce(
        x, w, residual=residual, norm_weight=norm, eps=EPSILON
    )
    return y, residual


def pair(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same by PyTorch's own calls."""
    y = F.linear(x, w)
    dist.all_reduce(y)
    residual = residual + y
    return F.rms_norm(residual, (COLUMNS,), norm, EPSILON), residual


WAYS: dict[str, Sum] = {"pair": pair, "auto": auto}


def worker(layers: int) -> list[dict[str, Any]]:
    """Time all ranges on this rank."""
    torch.manual_seed(dist.get_rank())
    inners = [inner // dist.get_world_size() for inner in INNERS]
    weights = [
        [torch.randn(COLUMNS, inner, device="cuda").bfloat16() * 0.01 for inner in inners]
        for _ in range(layers)
    ]
    norm = torch.ones(COLUMNS, dtype=torch.bfloat16, device="cuda")

    def prefill(way: str, tokens: int, i: int = 0) -> torch.Tensor:
        residual = torch.zeros(tokens, COLUMNS, dtype=torch.bfloat16, device="cuda")
        y = residual
        for layer in weights:
            for w in layer:
                x = torch.full((tokens, w.shape[1]), 0.1, dtype=torch.bfloat16, device="cuda")
                y, residual = WAYS[way](x, w, residual, norm)
        return y

    results, chance = [], random.Random(5)
    for least, most in RANGES:
        found, wanted = (prefill(way, most).float() for way in ("auto", "pair"))
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
        del found, wanted
        numbers = chance.sample(range(least, most), NUMBERS)
        times: dict[str, dict[str, list[Sample]]] = {
            when: {way: [] for way in WAYS} for when in ("first", "again")
        }
        for when, samples in times.items():
            for turn, tokens in enumerate(numbers):
                for way in WAYS if turn % 2 else reversed(WAYS):
                    samples[way].append(sample(functools.partial(prefill, way, tokens)))
            result = {
                "call": f"prefill, {when}",
                "sizes": f"{least} to {most} tokens, {layers} layers",
                **{way: spreads(of_way, "ms") for way, of_way in samples.items()},
            }
            results.append(result)
            if dist.get_rank() == 0:
                print(result, flush=True)
    return results


def main() -> None:
    """Run the benchmark and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    results, *_ = interlace.launch(worker, options.ranks, options.layers, backend="cuda")
    documents.write(options.json, results)


if __name__ == "__main__":
    main()
