"""Time layers of experts in float8 with scales of blocks beside the same layers in bfloat16.

    python benchmarks/float8_experts.py --json FILE [--ranks 2] [--share 1]
        [--tokens 1,8,32,128,512,2048,8192]

Ways: ``bfloat16``, what runs by itself with weights of bfloat16; ``auto``, ``fused`` and ``decode``
with weights of float8; and ``unfused``, one expert after another by cuBLAS, which waits for the
device, is not captured, and is what the others' results are compared with first. Microseconds of
the slowest rank, the median and deciles, eager and in a CUDA graph. All tokens have an even choice
of experts. With ``--ranks 1 --share 2`` one GPU computes what each of two would: all the rows of
half of the experts, and nothing is exchanged.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist
from program_times import in_graph, in_turn

import interlace
from interlace.gemm.scaled import SCALE_BLOCK

CALLS, SETTLING = 5, 10
MOST_DECODED = 256
"""Tokens of a rank up to which ``decode`` is timed."""

TOLERANCE = 0.05
"""The relative error of two results in float8: ``unfused`` rounds gate and up to bfloat16, and one
in 16 activations becomes another number of float8 then.
"""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Experts of all ranks; DeepSeek V3's are some of its 256, as many as four nodes leave one."""

    name: str
    experts: int
    hidden: int
    ffn: int
    top_k: int


LAYERS = (
    Layer("Qwen3-30B-A3B", 128, 2048, 768, 8),
    Layer("Qwen3-235B-A22B", 32, 4096, 1536, 8),
    Layer("Mixtral 8x7B", 8, 4096, 14336, 2),
    Layer("DeepSeek V3", 64, 7168, 2048, 8),
)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[L, N, K]`` in float8, and the scales of its blocks, expert by expert."""
    local, lines, inner = weight.shape
    float8 = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = weight.new_empty(local, lines // SCALE_BLOCK, inner // SCALE_BLOCK, dtype=torch.float32)
    for expert in range(local):
        blocks = weight[expert].float().unflatten(1, (-1, SCALE_BLOCK))
        blocks = blocks.unflatten(0, (-1, SCALE_BLOCK))
        scale[expert] = blocks.abs().amax((1, 3)) / torch.finfo(float8.dtype).max
        float8[expert] = (blocks / scale[expert][:, None, :, None]).to(float8.dtype).view(lines, -1)
    return float8, scale


def weights_of(layer: Layer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return this rank's weights, as the operator takes them, in bfloat16 and in float8."""
    local = layer.experts // dist.get_world_size()

    def random(lines: int, inner: int) -> torch.Tensor:
        weight = torch.empty(local, lines, inner, dtype=torch.bfloat16, device="cuda")
        return weight.normal_(0, inner**-0.5)

    def halves(lines: torch.Tensor) -> torch.Tensor:
        return lines.unflatten(1, (2, -1)).transpose(1, 2)

    first, second = random(2 * layer.ffn, layer.hidden), random(layer.hidden, layer.ffn)
    (first_8, first_scale), (second_8, second_scale) = quantised(first), quantised(second)
    return {"w_in": halves(first), "w_out": second}, {
        "w_in": halves(first_8), "w_out": second_8,
        "w_in_scale": halves(first_scale), "w_out_scale": second_scale,
    }  # fmt: skip


def ways_of(
    layer: Layer, tokens: int, wide: dict[str, Any], narrow: dict[str, Any]
) -> dict[str, Callable[[int], torch.Tensor]]:
    """Return a forward pass of so many tokens a rank in every way."""
    x = torch.randn(tokens, layer.hidden, device="cuda").bfloat16()
    scores = torch.randn(tokens, layer.experts, device="cuda")
    routing, experts = torch.softmax(scores, -1).topk(layer.top_k)
    impls = ["auto", "fused", *(["decode"] if tokens <= MOST_DECODED else []), "unfused"]

    def call(impl: str, weights: dict[str, Any]) -> Callable[[int], torch.Tensor]:
        return lambda _: interlace.mixture_of_experts(x, experts, routing, impl=impl, **weights)

    return {"bfloat16": call("auto", wide)} | {impl: call(impl, narrow) for impl in impls}


def worker(counts: list[int], share: int, path: Path) -> None:
    """Time all layers on this rank; the first one writes what there is after each size."""
    results: list[dict[str, Any]] = []
    for whole in LAYERS:
        layer = dataclasses.replace(whole, experts=whole.experts // share)
        torch.manual_seed(1 + dist.get_rank())
        wide, narrow = weights_of(layer)
        for tokens in counts:
            ways = ways_of(layer, tokens, wide, narrow)
            expected = ways.pop("unfused")(0).float()
            for name, way in ways.items():
                error = float((way(0).float() - expected).norm() / expected.norm())
                # Weights of bfloat16 are the ones before they were quantised.
                if name != "bfloat16" and not error < TOLERANCE:
                    raise AssertionError(
                        f"{layer}, {tokens} tokens: {name} is wrong by {error:.2g}"
                    )
            found: dict[str, Any] = dataclasses.asdict(layer) | {"tokens": tokens}
            for name, times in in_turn(ways, calls=CALLS, settling=SETTLING).items():
                found[name] = times | {"graph": in_graph(ways[name], period=1)}
            results.append(found)
            if dist.get_rank() == 0:
                graphs = {name: found[name]["graph"]["median_us"] for name in ways}
                print(f"{layer.name}, {tokens} tokens, in graphs: {graphs}", flush=True)
                documents.write(path, results)


def main() -> None:
    """Run the benchmark and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192", help="of a rank")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--share", type=int, default=1, help="take one part in so many of experts")
    options = parser.parse_args()
    counts = [int(count) for count in options.tokens.split(",")]
    interlace.launch(worker, options.ranks, counts, options.share, options.json, backend="cuda")


if __name__ == "__main__":
    main()
