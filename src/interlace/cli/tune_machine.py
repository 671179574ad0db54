"""``interlace tune machine``: measure this machine's profile, and keep it for this user."""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from interlace.bench import machine_profile, profile_fit
from interlace.bench.draws import Draw, draws
from interlace.bench.measures import measure_draw
from interlace.cli import bench
from interlace.cli.console import make_console
from interlace.cli.outputs import Outputs
from interlace.cli.tables import make_table
from interlace.comm import group_of
from interlace.comm.groups.machine_rates import measure_rates
from interlace.costs.known_profiles import keep_profile, profile_of
from interlace.costs.product_fit import MeasuredRates, ProductTime
from interlace.costs.time import MachineProfile
from interlace.errors import BackendError

_SEED, _MOST_CALLS = 7, 400


def is_between_nodes(nodes: int | None) -> bool:
    """Return whether ranks are on several nodes, as the command or the launcher says.

    torchrun and Slurm say how many ranks there are, and how many of them are on this node.
    """
    if nodes is not None:
        return nodes > 1
    ranks, local = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return "RANK" in os.environ and ranks != local


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
    # The rates of products and links first, then as many calls as there is time for.
    work = [None, *itertools.islice(draws(_SEED, max(count, 2)), _MOST_CALLS)]
    with bench.nothing_measured():
        document = bench.measure_on_gpus(
            "tune", "Measuring this machine", work, measure, world_size, outputs, budget_s
        )
    rates, *results = document["results"]
    gpu = gpus.pop()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    products = [ProductTime(**fields) for fields in rates.pop("products")]
    profile = machine_profile.profile_from(
        profile_of(gpu, processors),
        gpu,
        processors,
        MeasuredRates(products, **rates),
        results,
        f"measured here on {document['date'][:10]}, {len(results)} calls of "
        f"{rates['world_size']} ranks",
    )
    file = keep_profile(profile)
    console = make_console()
    console.print(_table(profile, results))
    console.print(
        f"{profile.gpu}: {profile.product.flops_per_s / 1e12:.0f} TFLOP/s, memory "
        f"{profile.product.memory_bytes_per_s / 1e9:.0f} GB/s, links "
        f"{profile.link_bytes_per_s / 1e9:.0f} GB/s."
    )
    console.print(f"Profile: {file}. Remove the file to go back to what is shipped.")


def measure(draw: Draw | None) -> list[dict[str, Any]]:
    """Measure one drawn call, or the rates of products and links for None; collective."""
    if draw is None:
        return [dataclasses.asdict(measure_rates(group_of()))]
    return measure_draw(draw, dtype="bfloat16")


def _table(profile: MachineProfile, results: Sequence[dict[str, Any]]) -> Table:
    """Return how far the profile is from what was measured, by implementation."""
    table = make_table("operator", "implementation", "times", "median error")
    points = profile_fit.points_of([{"results": results}])
    for (operator, name), wrong in profile_fit.deviations(profile, points).items():
        table.add_row(operator, name, str(len(wrong)), f"{statistics.median(wrong):.1%}")
    return table
