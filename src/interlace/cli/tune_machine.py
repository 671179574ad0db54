"""``interlace tune machine``: measure this machine's profile, or the network between nodes, and
keep it for this user.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from interlace.bench import machine_profile
from interlace.bench.draws import Draw, draws
from interlace.bench.sweep import operands_of, time_implementations
from interlace.cli import bench, machine
from interlace.cli.console import make_console, make_table, now
from interlace.cli.doctor_network import networks_in_use, run_measurement, times_table
from interlace.cli.options import MOST_RANKS, Run
from interlace.cli.outputs import Outputs
from interlace.cli.ranks import advance
from interlace.comm import group_of
from interlace.comm.groups.machine_rates import measure_rates
from interlace.comm.groups.network_rates import SIZES, ExchangeTime, measure_network
from interlace.costs.known_profiles import keep_profile, own_file, profile_of
from interlace.costs.product_fit import MeasuredRates, ProductTime
from interlace.costs.time import MachineProfile
from interlace.errors import BackendError
from interlace.tuning.gpu import Gpu

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
    count = world_size or min(torch.cuda.device_count(), MOST_RANKS)
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
            "tune",
            "Measuring this machine",
            work,
            measure,
            Run(world_size, "bfloat16", outputs),
            budget_s,
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


def measure(draw: Draw | None, *, dtype: str) -> list[dict[str, Any]]:
    """Measure one drawn call, or the rates of products and links for None; collective."""
    if draw is None:
        return [dataclasses.asdict(measure_rates(group_of()))]
    case = operands_of(draw, dtype)
    result = time_implementations(case, draw)
    case.owner.release()
    return [result]


def _table(profile: MachineProfile, results: Sequence[dict[str, Any]]) -> Table:
    """Return how far the profile is from what was measured, by implementation."""
    table = make_table("operator", "implementation", "times", "median error")
    points = machine_profile.points_of([{"results": results}])
    for (operator, name), wrong in machine_profile.deviations(profile, points).items():
        table.add_row(operator, name, str(len(wrong)), f"{statistics.median(wrong):.1%}")
    return table


# Between nodes


def run_network(
    world_size: int | None, nodes: int | None, deadline_s: float, outputs: Outputs
) -> None:
    """Measure the network between the nodes; write it into this user's profile on every node.

    The rest of the profile stays as it is known; ``interlace tune machine`` on one node measures
    that.

    Args:
        world_size: Number of ranks; None for the launcher's, or one per GPU.
        nodes: Number of nodes that the ranks count as; None for the nodes that they are on.
        deadline_s: Seconds that each step may last.

    Raises:
        ArgumentError: Nothing says how many ranks there are.
        BackendError: Ranks share a GPU.
        GroupError: All ranks are on one node.
        PeerTimeoutError: A rank did not come.
    """
    console = make_console()
    report, *_ = run_measurement(
        console, measure_network_on_rank, world_size, deadline_s, backend="cuda", nodes=nodes
    )
    document = {**machine.header(), "results": [report]}
    outputs.write_json(lambda: document)
    times = [ExchangeTime(**fields) for fields in report["exchanges"]]
    console.print(times_table(times, [report["network"]["network"]]))
    network = report["network"]
    factors = ", ".join(
        f"{name.replace('_', '-')} {factor:.2f}" for name, factor in network["collective_factors"]
    )
    console.print(f"Times of other collectives, as multiples of an all-to-all's: {factors}.")
    console.print(
        f"Between samples, the ratio of slices to all-to-alls varied by {network['spread']:.0%}, "
        "which slices must gain at least."
    )
    console.print(f"Profile: {report['file']}, on every node.")


def measure_network_on_rank(
    folder: str, logs: str, deadline_s: float, sizes: tuple[int, ...] = SIZES
) -> dict[str, Any]:
    """Measure on a rank; the first rank of each node writes the profile. Collective.

    All ranks know the same profile before, as others are no group, and the same one afterwards.

    Args:
        folder: Folder in which progress is written.
        logs: Folder of NCCL's log of each rank of this machine.
        deadline_s: Seconds that each step may last.
        sizes: Bytes of the messages.
    """
    group = group_of()
    group.require_own_gpus("interlace tune machine")
    group.deadline_s = deadline_s
    source = f"measured {now()[:10]} on {group.world_size} ranks of {group.nodes} nodes"
    exchanges, network = measure_network(group, source, sizes, lambda: advance(folder))
    # Networks are known once there were messages.
    seen = group.exchange("networks", networks_in_use(group.backend, Path(logs)))
    name = ", ".join(sorted({name for names in seen for name in names}))
    network = dataclasses.replace(network, network=name)
    gpu = Gpu.of(group.device)
    if group.rank == min(group.members.local_ranks):
        keep_profile(dataclasses.replace(profile_of(gpu.name, gpu.processors), network=network))
    group.exchange("profiles are written", None)
    return {
        "exchanges": [dataclasses.asdict(exchange) for exchange in exchanges],
        "network": dataclasses.asdict(network),
        "file": str(own_file(gpu.name)),
    }
