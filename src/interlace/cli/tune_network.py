"""``interlace tune machine`` on several nodes: measure the network into the machine profile."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from interlace.cli import machine
from interlace.cli.console import make_console, now
from interlace.cli.doctor_network import networks_in_use, run_measurement, times_table
from interlace.cli.outputs import Outputs
from interlace.cli.ranks import advance
from interlace.comm import group_of
from interlace.comm.groups.network_rates import SIZES, ExchangeTime, measure_network
from interlace.costs.known_profiles import keep_profile, own_file, profile_of
from interlace.gemm.choice import Gpu


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
        console, run_rank, world_size, deadline_s, backend="cuda", nodes=nodes
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


def run_rank(
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
    file = own_file(gpu.name)
    if group.rank == min(group.members.local_ranks):
        keep_profile(dataclasses.replace(profile_of(gpu.name, gpu.processors), network=network))
    group.exchange("profiles are written", None)
    return {
        "exchanges": [dataclasses.asdict(exchange) for exchange in exchanges],
        "network": dataclasses.asdict(network),
        "file": str(file),
    }
