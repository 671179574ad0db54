"""The kernels of one layer of a decoding step, by Inductor and by Interlace, as a timeline.

    python benchmarks/decode_layer.py --json FILE [--sequences 1] [--layers 4]

The model is transformers' Llama with the sizes of Llama 3 70B, as in
``examples/huggingface_decode.py``, with two ranks and a GPU each. A step is captured in a CUDA
graph and replayed under PyTorch's profiler. The layer is the one between the second and the fourth
sum over ranks: attention, then the feed-forward network, each with the sum that ends it. FILE has
the kernels of rank 0, with the times in microseconds from the layer's begin, of the replay whose
layer took the median time. ``docs/pictures/draw_decoding.py`` draws it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import interlace
import interlace.compile

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import huggingface_decode as decode

_REPLAYS = 9
_SUMS_BEFORE, _SUMS = 2, 2
_SUM_NAMES = ("AllReduce", "multiply_sum_and_norm", "sum_and_norm", "all_reduce")
"""Parts of the names of kernels that end in a sum over ranks."""

Kernel = tuple[str, float, float]
"""Name, begin and end."""


def worker(settings: decode.Settings) -> list[dict[str, Any]]:
    """Return the kernels of a layer by each way."""
    with torch.no_grad():
        model = decode.sharded_model(settings)
        inputs = decode.Inputs(model, settings)
        expected = inputs.step(model, inputs.cache(model)).float()
        results = []
        for way in (
            decode.Way("Inductor", "inductor"),
            decode.Way("Interlace", interlace.compile.backend),
        ):
            cache = inputs.cache(model)
            with way.switched_on():
                call = way.compiled(model)
                kernels, logits = recorded(lambda call=call, cache=cache: inputs.step(call, cache))
            error = float((logits.float() - expected).norm() / expected.norm())
            assert error <= decode.ALLOWED[settings.dtype], (way.name, error)
            results.append({"way": way.name, "error": error, "kernels": kernels})
            del call, cache
        return results


def recorded(step: Callable[[], torch.Tensor]) -> tuple[list[Kernel], torch.Tensor]:
    """Return the kernels of one layer of a step, and the step's logits."""
    graph, logits = decode.graph_of(step)
    layers = []
    for _ in range(_REPLAYS):
        graph.replay()  # links and caches as in the middle of a program
        torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
        events = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA
        )
        second = events[len(events) // 2 :]
        layers.append(layer_of([(name, start, end) for start, end, name in second]))
    lengths = [layer[-1][2] for layer in layers]
    median = statistics.median_low(lengths)
    return layers[lengths.index(median)], logits.clone()


def layer_of(kernels: list[Kernel]) -> list[Kernel]:
    """Return the kernels between two pairs of sums, with times from the first one's begin."""
    ends = [i for i, (name, _, _) in enumerate(kernels) if any(part in name for part in _SUM_NAMES)]
    if len(ends) < _SUMS_BEFORE + _SUMS:
        names = sorted({name for name, _, _ in kernels})
        raise RuntimeError(f"no sums over ranks were found among {names}")
    first = ends[_SUMS_BEFORE - 1]
    layer = kernels[first + 1 : ends[_SUMS_BEFORE + _SUMS - 1] + 1]
    # From the end of the sum before: the gap in between belongs to this layer.
    begin = kernels[first][2]
    return [(name, round(start - begin, 2), round(end - begin, 2)) for name, start, end in layer]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    settings = decode.Settings(
        size="70b", layers=options.layers, batch=options.sequences, context=128, dtype="bfloat16"
    )
    results = interlace.launch(worker, 2, settings, backend="cuda")[0]
    documents.write(options.json, results)
    for result in results:
        print(f"{result['way']}: {result['kernels'][-1][2]:.1f} us")
        for name, start, end in result["kernels"]:
            print(f"  {start:7.1f} {end - start:6.1f}  {name[:90]}")


if __name__ == "__main__":
    main()
