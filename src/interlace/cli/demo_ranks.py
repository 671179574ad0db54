"""The work of each rank of ``interlace demo``."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist

from interlace.cli.ranks import advance
from interlace.comm import Group, group_of
from interlace.costs.gemv_all_reduce import fused
from interlace.operators.gemv_all_reduce.api import gemv_all_reduce
from interlace.operators.gemv_all_reduce.config import GemvAllReduceConfig, block_tokens
from interlace.operators.gemv_all_reduce.launch import choose, prepare


def run_rank(folder: str, shapes: list[tuple[int, int]], tokens: int) -> list[dict[str, Any]]:
    """Run every ``(rows, columns per rank)``; return a report of each for JSON.

    The progress bar advances once per shape. On the CPU the times are recorded at which the last
    shape's puts left, fused and unfused.
    """
    group = group_of()
    # Imports and compiles what must be, before anything is recorded
    _run(group, *_inputs(group, 16, 16, 1))
    last = len(shapes) - 1
    return [
        _one_shape(folder, group, *shape, tokens, record=i == last)
        for i, shape in enumerate(shapes)
    ]


def _one_shape(
    folder: str, group: Group, rows: int, columns: int, tokens: int, *, record: bool
) -> dict[str, Any]:
    x, w = _inputs(group, rows, columns, tokens)
    config = choose(
        tokens=tokens,
        rows=rows,
        columns=columns,
        dtype=x.dtype,
        world_size=group.world_size,
        device=x.device,
    ).config
    group.traffic.reset()
    group.traffic.events = []
    started = _meet(group)
    y = _run(group, x, w, config)
    ended = time.monotonic()
    # The sum in float64, of the same bfloat16 operands.
    expected = x.double() @ w.double().T
    dist.all_reduce(expected)
    cost = fused(
        protocol=config.protocol,
        rank=group.rank,
        world_size=group.world_size,
        tokens=tokens,
        rows=rows,
        columns=columns,
        itemsize=x.element_size(),
        block_n=config.block_n,
        block_tokens=block_tokens(tokens),
    )
    report: dict[str, Any] = {
        "rank": group.rank,
        "error": float((y.double() - expected).norm() / expected.norm()),
        "digest": hashlib.sha256(y.cpu().view(torch.uint8).numpy().tobytes()).hexdigest(),
        "config": str(config),
        "predicted": {"puts": cost.messages, "bytes": cost.link_bytes, "signals": cost.signals},
    }
    if group.backend == "cpu":
        traffic = group.traffic
        report["counted"] = {
            "puts": traffic.messages,
            "bytes": traffic.message_bytes,
            "signals": traffic.signals,
        }
        if record:
            report["fused"] = {"start": started, "end": ended, "puts": traffic.events}
            report["unfused"] = _record_unfused(group, x, w, config)
    else:
        report["times_us"] = _time(x, w, config)
    group.traffic.events = None
    advance(folder)
    return report


def _inputs(
    group: Group, rows: int, columns: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x ``[tokens, columns]`` and w ``[rows, columns]``, bfloat16 as models have them."""
    generator = torch.Generator(group.device).manual_seed(1 + group.rank)
    x = torch.randn(tokens, columns, generator=generator, device=group.device)
    w = torch.randn(rows, columns, generator=generator, device=group.device)
    return x.bfloat16(), w.bfloat16()


def _run(
    group: Group, x: torch.Tensor, w: torch.Tensor, config: GemvAllReduceConfig | None = None
) -> torch.Tensor:
    y = gemv_all_reduce(x, w, impl="fused", config=config)
    group.synchronize()
    return y


def _meet(group: Group) -> float:
    """Meet the other ranks in a barrier; return the time of leaving it."""
    if group.world_size > 1:
        dist.barrier()
    return time.monotonic()


def _record_unfused(
    group: Group, x: torch.Tensor, w: torch.Tensor, config: GemvAllReduceConfig
) -> dict[str, Any]:
    """Record the kernel taken apart: all of its compute, and then all of its communication.

    The compute is the kernel in a group of one.
    """
    from interlace.comm.groups.group import solo_group

    # A group of one has no puts and no waits; no columns have no products.
    solo = solo_group(x.device)
    compute = prepare(solo, x, w, None, x.new_empty(x.shape[0], w.shape[0]), config)
    traffic = group.traffic
    traffic.reset()
    started = _meet(group)
    with solo.running():
        compute()
    computed = time.monotonic()
    if group.world_size > 1:
        _run(group, x[:, :0], w[:, :0], config)
    return {"start": started, "computed": computed, "end": time.monotonic(), "puts": traffic.events}


def _time(x: torch.Tensor, w: torch.Tensor, config: GemvAllReduceConfig) -> dict[str, float]:
    """Return the slowest rank's medians in microseconds.

    Calls take weights in turn, so that none is in the cache.
    """
    from torch.nn.functional import linear

    from interlace.bench.timing import measure

    cache = torch.cuda.get_device_properties(x.device).L2_cache_size
    copies = max(2, min(8, 2 * cache // max(1, w.nbytes) + 2))
    weights = [w, *(w.clone() for _ in range(copies - 1))]
    calls = {
        "fused": lambda i: gemv_all_reduce(x, weights[i % copies], impl="fused", config=config),
        "unfused": lambda i: gemv_all_reduce(x, weights[i % copies], impl="unfused"),
        "compute alone": lambda i: linear(x, weights[i % copies]),
    }
    return {name: measure(call, period=copies, samples=7).median_us for name, call in calls.items()}
