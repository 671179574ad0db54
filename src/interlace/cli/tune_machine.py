"""``interlace tune machine``: measure this machine's profile, and keep it for this user."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench import machine_profile, profile_fit
from interlace.bench.draws import Draw
from interlace.cli import bench
from interlace.cli.console import make_console
from interlace.cli.outputs import Outputs
from interlace.cli.tables import make_table
from interlace.costs.time import MachineProfile, own_file, profile_of
from interlace.errors import BackendError

_SEED, _MOST_CALLS = 7, 400


def run_machine(budget_s: float, world_size: int | None, outputs: Outputs) -> None:
    """Measure products, links and calls; write the profile where later programs look for it.

    Raises:
        BackendError: There are no GPUs, or GPUs of several kinds.
    """
    count = world_size or min(torch.cuda.device_count(), 8)
    gpus = {torch.cuda.get_device_name(index) for index in range(count)}
    if len(gpus) > 1:
        raise BackendError(
            f"interlace tune machine must have GPUs of one kind; got {', '.join(sorted(gpus))}. "
            "Show it some of them only, by CUDA_VISIBLE_DEVICES."
        )
    with tempfile.TemporaryDirectory(prefix="interlace-machine-") as folder:
        # Every call is to be measured, whatever this user's programs have measured before.
        before = os.environ.get("INTERLACE_CACHE_DIR")
        os.environ["INTERLACE_CACHE_DIR"] = folder
        document = bench.measure_on_gpus(
            "tune",
            "Measuring this machine",
            machine_profile.calls(_SEED, max(count, 2), _MOST_CALLS),
            measure_rank,
            (budget_s,),
            world_size,
            outputs,
        )
        if before is None:
            del os.environ["INTERLACE_CACHE_DIR"]
        else:
            os.environ["INTERLACE_CACHE_DIR"] = before
    (measured,) = document["results"]
    gpu = gpus.pop()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    profile = machine_profile.profile_from(
        profile_of(gpu, processors),
        gpu,
        processors,
        measured,
        f"measured here on {document['date'][:10]}, {len(measured['results'])} calls of "
        f"{measured['world_size']} ranks",
    )
    file = own_file(gpu)
    write(file, profile)
    console = make_console()
    console.print(_table(profile, measured))
    console.print(
        f"{profile.gpu}: {profile.product.flops_per_s / 1e12:.0f} TFLOP/s, memory "
        f"{profile.product.memory_bytes_per_s / 1e9:.0f} GB/s, links "
        f"{profile.link_bytes_per_s / 1e9:.0f} GB/s."
    )
    console.print(f"Profile: {file}. Remove the file to go back to what is shipped.")


def measure_rank(
    folder: str, drawn: list[Draw], budget_s: float, header: dict[str, Any], file: str | None
) -> list[dict[str, Any]]:
    """Measure on every rank, until the time is over as rank 0 sees it."""
    end = time.monotonic() + budget_s

    def is_over() -> bool:
        over = torch.tensor(float(time.monotonic() > end), device="cuda")
        dist.broadcast(over, 0)
        return bool(over.item())

    measured = machine_profile.run(drawn, is_over)
    return [{**measured, "world_size": dist.get_world_size()}]


def write(file: Path, profile: MachineProfile) -> None:
    """Write a profile as a whole, so that no reader sees half of it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as part:
            part.write(json.dumps(dataclasses.asdict(profile), indent=1) + "\n")
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _table(profile: MachineProfile, measured: dict[str, Any]) -> Any:
    """Return how far the profile is from what was measured, by implementation."""
    table = make_table("operator", "implementation", "times", "median error")
    points = profile_fit.points_of([measured])
    for operator, compositions in profile.compositions.items():
        for name in compositions:
            own = [
                each for each in points if (each.operator, each.implementation) == (operator, name)
            ]
            if own:
                table.add_row(operator, name, str(len(own)), _median_error(profile, own))
    return table


def _median_error(profile: MachineProfile, points: Sequence[profile_fit.Point]) -> str:
    return f"{statistics.median(abs(r - 1) for r in profile_fit.errors(profile, points)):.1%}"
