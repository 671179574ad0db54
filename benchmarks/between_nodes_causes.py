"""Why slices between two hosts take as long as they do, beside what ``between_nodes.py`` measures.

    python benchmarks/between_nodes_causes.py --json FILE

Two GPUs of one machine are two hosts for NCCL, as there. Embeddings are looked up so often that
pooling takes as long as the exchange. With 1 to 16 slices, and 2, 4 and 8 SMs for NCCL:

    alone      the slices, of nothing, with no kernel beside them: what messages cost
    host       time in which the host enqueues these exchanges
    pooling    the kernel of the real call, with nothing sent
    beside     both at once, not gated: what the pooling takes from NCCL's kernel (SMs, memory)
    fused      the real call: what it takes beyond ``beside`` is due to the gates

If ``alone`` is as slow as ``fused``, messages are the cause, and larger ones or more SMs the cure;
if only ``beside`` is, NCCL's kernel waits for SMs; if ``host`` is longer than ``alone``, exchanges
are enqueued too slowly, and the CUDA graph is quicker. The network itself (one message of 64 KiB to
64 MiB, several at once, torch's all-to-all, beside products) goes into FILE, too, as the rates of
its network.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from between_nodes import (
    BATCH,
    ROWS,
    SLICES,
    TABLES,
    WIDTH,
    Workload,
    captured,
    config_of,
    learn_network,
    lookups_that_take,
    run,
    say,
    tables_of_rank,
    timed,
)

import interlace
from interlace.comm.groups import carrier
from interlace.comm.groups import network_rates as network
from interlace.operators.embedding_all_to_all import between_nodes

_STACKS_S = 85.0


def main() -> None:
    """Measure the forward pass of embeddings."""
    run(measure, {"tables": TABLES, "width": WIDTH, "rows": ROWS, "batch": BATCH})


@torch.no_grad()
def measure() -> dict[str, Any]:
    """On a rank: measure messages alone, beside the pooling, and in the call; see the top."""
    faulthandler.dump_traceback_later(_STACKS_S)
    group, (weights, alone) = interlace.group_of(), tables_of_rank()
    on_gpu = group.backend == "cuda"
    rates = learn_network()
    first = Workload.of(20, weights, alone)
    pooled = first.pool()
    balanced = 2
    if on_gpu:
        balanced = lookups_that_take(timed(lambda: first.exchange(pooled)), weights, alone)
    workload = Workload.of(balanced, weights, alone)
    nbytes = pooled[len(pooled) // dist.get_world_size() :].nbytes
    results: dict[str, Any] = {"balanced_lookups": balanced, "us": {}}
    for channels in (2, 4, 8) if on_gpu else (2,):
        with mock.patch.object(carrier, "CHANNELS", channels):
            its_group = dist.new_group()
            interlace.group_of(its_group).network()
        for slices in SLICES:
            name = f"{slices} slices, {channels} SMs"
            times = time_causes(workload, its_group, nbytes, slices)
            say(f"{name}, us: " + ", ".join(f"{key} {us:.0f}" for key, us in times.items()))
            results["us"][name] = times
    faulthandler.cancel_dump_traceback_later()
    return {**results, "network": dataclasses.asdict(rates)}


def time_causes(
    workload: Workload, process_group: dist.ProcessGroup, nbytes: int, slices: int
) -> dict[str, float]:
    """Time so many slices alone, beside the pooling, and as the call sends them."""
    group = interlace.group_of(process_group)
    queue = network.queue_of(group, nbytes // slices, 1, slices)
    host_us = []

    def exchange(beside: Callable[[], object] = lambda: None) -> None:
        with group.running():
            queue.arm()
            beside()
            start = time.perf_counter()
            queue.release()
            host_us.append((time.perf_counter() - start) * 1e6)
            queue.join()

    times = {"alone": timed(exchange), "host": statistics.median(host_us)}
    with (
        mock.patch.object(between_nodes, "SliceQueue", mock.MagicMock()),
        mock.patch.object(between_nodes, "prepare_collect", mock.Mock(return_value=None)),
    ):
        times["pooling"] = timed(workload.call)
        times["beside"] = timed(lambda: exchange(workload.call))
    config = config_of(workload, slices)
    if config is not None:
        times["fused"] = timed(lambda: workload.call(config=config, group=process_group))
        if workload.indices.is_cuda:
            replay, _ = captured(lambda: workload.call(config=config, group=process_group))
            times["fused, graph"] = timed(replay)
    return times


if __name__ == "__main__":
    main()
