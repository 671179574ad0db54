"""What ``impl="auto"`` takes for every call that benchmarks have recorded, on each GPU that has a
shipped profile.

    python -m tests.golden_choices | diff tests/golden_choices.json -

says which choices a change has changed; with ``> tests/golden_choices.json`` they become the
expected ones. That takes 40 s of processor time, so ``tests/test_golden_choices.py`` compares one
call of ten.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from interlace.cli.gpus import gpu_named
from interlace.costs.known_profiles import profiled_gpus
from interlace.operators.mixture_of_experts.choice import ExpertTerms
from interlace.operators.mixture_of_experts.layout import ExpertSizes
from interlace.registry import find_operator, operator_named
from interlace.tuning.gpu import Gpu

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

Call = tuple[tuple[int, ...], str, int]


def recorded_calls() -> dict[str, list[Call]]:
    """Return the sizes, dtype and number of ranks of the recorded calls, by operator."""
    calls: dict[str, set[Call]] = {}
    for file in sorted(RESULTS.glob("*.json")):
        for result in json.loads(file.read_text()).get("results", ()):
            if "operator" not in result or "world_size" not in result:
                continue
            operator = find_operator(result["operator"])
            # Some operators that were measured are gone.
            sizes = operator.sizes if operator else ()
            if operator and all(size in result for size in sizes):
                values = tuple(result[size] for size in sizes)
                call = values, result["dtype"], result["world_size"]
                calls.setdefault(result["operator"], set()).add(call)
    return {name: sorted(calls[name]) for name in sorted(calls)}


def choices(step: int = 1) -> dict[str, dict[str, dict[str, str]]]:
    """Return the choice for each recorded call, by GPU and operator.

    Args:
        step: Each operator's calls are taken in steps of so many.

    A choice is the implementation, the values of its configuration, and eight digits of the hash of
    the reason, which names the predicted time of every implementation.
    """
    # Each GPU is a device of its own, as choices are cached by device.
    gpus = [gpu_named(name) for name in sorted(profiled_gpus())]
    torch.cuda.get_device_name = lambda device=None: gpus[torch.device(device).index].name
    torch.cuda.get_device_properties = lambda device=None: _properties(gpus[device.index])
    calls = recorded_calls()
    return {
        gpu.name: {
            name: {
                f"{'x'.join(map(str, sizes))} {dtype} {ranks}": _choice(
                    name, sizes, dtype=getattr(torch, dtype), world_size=ranks, device=device
                )
                for sizes, dtype, ranks in calls[name][::step]
            }
            for name in calls
        }
        for gpu, device in zip(gpus, map(_device, range(len(gpus))), strict=True)
    }


def _properties(gpu: Gpu) -> SimpleNamespace:
    """Return what torch says of a GPU, as far as choices ask for it."""
    return SimpleNamespace(
        multi_processor_count=gpu.processors,
        shared_memory_per_block=gpu.shared_bytes,
        shared_memory_per_block_optin=gpu.shared_bytes,
    )


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


def _choice(name: str, sizes: tuple[int, ...], **call: Any) -> str:
    """Return the choice for one call as text."""
    operator = operator_named(name)
    named = dict(zip(operator.sizes, sizes, strict=True))
    if name == "mixture_of_experts":
        ranks, dtype, device = call["world_size"], call["dtype"], call["device"]
        layer = ExpertSizes(**named, world_size=ranks, capacity=named["tokens"])
        choice = operator.choose(
            terms=ExpertTerms(layer, dtype, "cuda", keeps=False), device=device
        )
    else:
        choice = operator.choose(**named, **call)
    config = choice.configs.get(choice.impl, choice.config)
    values = " ".join(str(value) for value in vars(config).values())
    return f"{choice.impl} [{values}] {hashlib.sha256(choice.reason.encode()).hexdigest()[:8]}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INTERLACE_CACHE_DIR"] = folder  # without profiles that this user has measured
        json.dump(choices(*map(int, sys.argv[1:])), sys.stdout, indent=0)
        print()
