"""Time the choice of tokens over a sharded vocabulary beside a gather of the logits.

    python benchmarks/linear_top_k.py --json FILE [--ranks 2]

Ways: ``auto``, Interlace's; ``pair``, ``F.linear``, ``all_gather_into_tensor`` of the logits, and
``argmax`` or ``topk``, as engines do it; ``product``, ``F.linear`` alone, which no way can do
without. Microseconds of the slowest rank, the median and deciles, eager and in a CUDA graph; host
time is that of enqueueing. Columns are compared with the pair's first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist
import torch.nn.functional as F
from program_times import in_graph, in_turn

import interlace

# Sequences, width, vocabulary, k: Llama 3 8B, 70B, Qwen3 0.6B.
SIZES = tuple(
    (rows, width, vocabulary, k)
    for width, vocabulary in ((4096, 128256), (8192, 128256), (1024, 151936))
    for rows, k in ((1, 1), (8, 1), (64, 1), (8, 50), (64, 50))
)
CALLS, SETTLING = 10, 20


def _pair(x: torch.Tensor, w: torch.Tensor, k: int) -> torch.Tensor:
    ranks, logits = dist.get_world_size(), F.linear(x, w)
    rows, columns = logits.shape
    gathered = logits.new_empty(ranks * rows, columns)
    dist.all_gather_into_tensor(gathered, logits)
    whole = gathered.view(ranks, rows, columns).transpose(0, 1).reshape(rows, ranks * columns)
    return whole.argmax(1, keepdim=True) if k == 1 else whole.topk(k, 1).indices


def time_sizes(rows: int, width: int, vocabulary: int, k: int) -> dict[str, Any]:
    """Return the times of all ways for one size."""
    torch.manual_seed(1)
    x = torch.randn(rows, width, device="cuda").bfloat16()
    torch.manual_seed(2 + dist.get_rank())
    # Two weights in turn, so that none stays in the cache.
    columns = vocabulary // dist.get_world_size()
    weights = [torch.randn(columns, width, device="cuda").bfloat16() * 0.02 for _ in range(2)]
    ways: dict[str, Callable[[int], Any]] = {
        "pair": lambda i: _pair(x, weights[i % 2], k),
        "auto": lambda i: interlace.linear_top_k(x, weights[i % 2], k).columns,
        "product": lambda i: F.linear(x, weights[i % 2]),
    }
    values = interlace.linear_top_k(x, weights[0], k, impl="unfused").values
    # Equal logits, of which there are many in bfloat16, may be chosen in any order.
    if not interlace.linear_top_k(x, weights[0], k).values.equal(values):
        raise AssertionError(f"{rows} x {width}, {vocabulary}, k = {k}: other values")
    found: dict[str, Any] = {"rows": rows, "width": width, "vocabulary": vocabulary, "k": k}
    for name, times in in_turn(ways, calls=CALLS, settling=SETTLING).items():
        found[name] = times | {"graph": in_graph(ways[name], period=2)}
    return found


def worker() -> list[dict[str, Any]]:
    """Time all sizes on this rank."""
    results = []
    with torch.no_grad():
        for sizes in SIZES:
            results.append(time_sizes(*sizes))
            if dist.get_rank() == 0:
                print(results[-1], flush=True)
    return results


def main() -> None:
    """Run the benchmark and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    results, *_ = interlace.launch(worker, options.ranks, backend="cuda")
    documents.write(options.json, results)


if __name__ == "__main__":
    main()
