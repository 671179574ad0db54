"""``interlace doctor --network``: which ranks share memory, and how fast the network is.

It measures on ranks that torchrun or Slurm has started, or starts ranks on this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from interlace import environment
from interlace.bench.report import machine_line
from interlace.cli import machine
from interlace.cli.console import make_console, make_table, run_ranks
from interlace.cli.outputs import Outputs
from interlace.cli.ranks import advance
from interlace.comm import group_of
from interlace.comm.groups.network_rates import SIZES, TOGETHER, ExchangeTime, measure_exchanges
from interlace.errors import ArgumentError
from interlace.gemm.between_nodes import profile_on
from interlace.units import format_binary_bytes
from interlace_gin.self_test import puts_sentences, try_puts

_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}


def run(
    world_size: int | None, nodes: int | None, backend: str, deadline_s: float, outputs: Outputs
) -> int:
    """Measure and print; return the exit code: 0 if the ranks could exchange what they must.

    Args:
        world_size: Number of ranks; None for those of the launcher, else one per GPU.
        nodes: Number of nodes that the ranks count as; None for the nodes that they are on.
        backend: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        deadline_s: Seconds that each step may last.

    Raises:
        ArgumentError: The number of ranks is not the launcher's, or there is no such backend.
        PeerTimeoutError: A rank did not come.
    """
    console = make_console()
    reports = run_measurement(
        console, run_rank, world_size, deadline_s, backend=backend, nodes=nodes
    )
    document = {
        **machine.header(),
        "ranks": [report["rank"] for report in reports],
        "networks": sorted({name for report in reports for name in report["networks"]}),
        "exchanges": reports[0]["exchanges"],
        "gin": reports[0]["gin"],
        "profile": reports[0]["profile"],
    }
    outputs.write_json(lambda: document)
    console.print(_nodes_table(document["ranks"]))
    if document["exchanges"]:
        times = [ExchangeTime(**fields) for fields in document["exchanges"]]
        console.print(times_table(times, document["networks"]))
    for sentence in (*_missing(document), *puts_sentences(document["gin"])):
        console.print(sentence)
    console.print(machine_line(document["machine"], document["date"]))
    outputs.say_written(console, "All numbers")
    return 0


def run_measurement(
    console: Console,
    rank_function: Callable[..., Any],
    world_size: int | None,
    deadline_s: float,
    *,
    backend: str,
    nodes: int | None,
) -> list[Any]:
    """Run ``rank_function(progress, logs, deadline_s)`` on every rank; return its results.

    The first two are folders: of the progress bar, and of NCCL's logs.

    Args:
        world_size: Number of ranks; None for those of the launcher, else one per GPU.
        backend, nodes: As :func:`run` takes them.

    Raises:
        ArgumentError: Nothing says how many ranks there are.
    """
    launched = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    ranks = world_size or int(launched or torch.cuda.device_count())
    if not ranks:
        raise ArgumentError(
            "a measured network must have ranks on several nodes; there are no GPUs here. Start "
            "the command by torchrun on two machines (`interlace doctor --network -n 4 --nodes 2 "
            "--backend cpu` tries it on CPUs)."
        )
    with nccl_logs() as folder:
        return run_ranks(
            console,
            f"Measuring the network between {ranks} ranks",
            2 * len(SIZES) - 2,
            rank_function,
            ranks,
            str(folder),
            deadline_s,
            backend=backend,
            nodes=nodes,
            join_timeout_s=deadline_s,
        )


def run_rank(folder: str, logs: str, deadline_s: float) -> dict[str, Any]:
    """Measure on a rank; return what rank 0 shows. Collective.

    Args:
        folder: Folder in which progress is written.
        logs: Folder of NCCL's log of each rank of this machine.
        deadline_s: Seconds that each step may last.
    """
    group = group_of()
    group.deadline_s = deadline_s
    members = group.members
    exchanges: list[ExchangeTime] = []
    if group.spans_nodes:
        # The cpu backend shows that messages arrive; large ones would only take long.
        sizes = SIZES if group.backend == "cuda" else SIZES[:4]
        exchanges = measure_exchanges(group, sizes, lambda: advance(folder))
    profile = profile_on(group.device)
    network = None if profile is None else profile.network
    device = "CPU"
    if group.backend == "cuda":
        device = f"{group.device}, {torch.cuda.get_device_name(group.device)}"
    return {
        "rank": {"node": members.node, "host": socket.gethostname(), "device": device},
        "networks": networks_in_use(group.backend, Path(logs)),
        "exchanges": [dataclasses.asdict(exchange) for exchange in exchanges],
        "gin": try_puts(group),
        "profile": None if network is None else f"{network.network}, {network.source}",
    }


@contextlib.contextmanager
def nccl_logs() -> Iterator[Path]:
    """Let NCCL of ranks that start within the context say into files which network it takes.

    A user's own ``NCCL_DEBUG_FILE`` stays, and then the network is not known.
    """
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:
        added = {**_LOG, "NCCL_DEBUG_FILE": f"{folder}/nccl.%p"}
        if "NCCL_DEBUG_FILE" in os.environ:
            added = {}
        with environment.changed(added):
            yield Path(folder)


def networks_in_use(backend: str, logs: Path) -> list[str]:
    """Return the networks that messages of this machine's ranks go through.

    Args:
        backend: ``"cpu"``, whose network is Gloo's, or ``"cuda"``, whose network is NCCL's.
        logs: Folder of NCCL's log of each rank.
    """
    if backend == "cpu":
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "the one of the host's name")
        return [f"Gloo over TCP, interface {interface}"]
    texts = [file.read_text(errors="replace") for file in sorted(logs.glob("nccl.*"))]
    networks = {name for text in texts for name in re.findall(r"via (NET/\S+)", text)}
    # NET/IB/0/GDRDMA and NET/Socket/0/Shared end with the channel's number and how it is shared.
    names = {re.sub(r"/\d+", "", name).removesuffix("/Shared") for name in networks}
    return [f"NCCL over {name}" for name in sorted(names)] or ["NCCL, over what is not known"]


def _nodes_table(ranks: Sequence[dict[str, Any]]) -> Table:
    table = make_table("node", "ranks that share memory", "hosts", "devices")
    for node in sorted({rank["node"] for rank in ranks}):
        numbers = [number for number, rank in enumerate(ranks) if rank["node"] == node]
        hosts = sorted({ranks[number]["host"] for number in numbers})
        devices = sorted({ranks[number]["device"] for number in numbers})
        table.add_row(str(node), ", ".join(map(str, numbers)), ", ".join(hosts), "\n".join(devices))
    return table


def times_table(times: Sequence[ExchangeTime], networks: Sequence[str]) -> Table:
    """Return the times by size of a message, of one message and of several at once."""
    table = make_table("message", "us", "GB/s", f"{TOGETHER} at once: us", "GB/s")
    table.caption = (
        f"{'; '.join(networks)}. Each rank sends and receives at once, to and from another node: "
        "medians of the slowest rank, GB/s each way."
    )
    by_size = {(time.nbytes, time.messages): time for time in times}
    for nbytes, messages in by_size:
        if messages > 1:
            continue
        cells = [format_binary_bytes(nbytes)]
        for count in (1, TOGETHER):
            time = by_size.get((nbytes, count))
            cells += [f"{time.us:.0f}", f"{time.bytes_per_s / 1e9:.2f}"] if time else ["", ""]
        table.add_row(*cells)
    return table


def _missing(document: dict[str, Any]) -> list[str]:
    """Return a sentence for each thing that is missing between the nodes."""
    if not document["exchanges"]:
        return [
            "All ranks share memory, so no network is between them. Start this by torchrun on two "
            "machines, or declare nodes: --nodes 2."
        ]
    names = " ".join(document["networks"])
    sentences = []
    if "Gloo" in names:
        sentences.append("Times of the cpu backend say that messages arrive, and nothing else.")
    elif "Socket" in names:
        sentences.append(
            "NCCL found no InfiniBand, RoCE or EFA adapter: messages go through the hosts' TCP "
            "sockets (NCCL_IB_HCA and NCCL_NET choose another network). Messages over sockets are "
            "faster with NCCL_SOCKET_NTHREADS=4, NCCL_NSOCKS_PERTHREAD=4 and "
            "NCCL_P2P_NET_CHUNKSIZE=1048576."
        )
    elif "NET/" in names and "GDRDMA" not in names:
        sentences.append(
            "Messages pass through the hosts' memory: NCCL does not use GPUDirect RDMA (see "
            "NCCL_NET_GDR_LEVEL, and the module nvidia-peermem or dma-buf)."
        )
    if document["profile"] is not None:
        sentences.append(f'impl="auto" goes by a measured network: {document["profile"]}.')
    elif "Gloo" not in names:
        sentences.append(
            'impl="auto" takes PyTorch\'s pair between these nodes, as no network was measured. '
            "Measure it: interlace tune machine, started as this command was."
        )
    return sentences
