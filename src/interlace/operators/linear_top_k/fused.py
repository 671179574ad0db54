"""``linear_top_k``: a product, this rank's candidates, and a kernel that exchanges them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import CPU_PROGRAMS, Launch, processors
from interlace.comm.replay.deferred import DeferredCall, New
from interlace.comm.replay.replays import places
from interlace.comm.runtime.interpreter import require
from interlace.operators.linear_top_k.call import OPERATOR, SizedChoice, TopKCall
from interlace.units import next_power_of_2

_BLOCK, _WARPS = 8192, 16  # columns that a program compares at a time
_CANDIDATE_BYTES = 2 * 8  # a value and a column, each in a packed word


def reservation(sized: SizedChoice) -> Reservation:
    """Return the symmetric memory of a call."""
    return Reservation((_size(*sized),) if sized.rows else ())


def _size(rows: int, k: int, world_size: int) -> WorkspaceSize:
    return WorkspaceSize(OPERATOR, rows * world_size * next_power_of_2(k) * _CANDIDATE_BYTES)


def choose(call: TopKCall) -> DeferredCall:
    """Choose the k highest logits of each row, float32, and their columns, int64."""
    require(call.group.backend)
    shape = len(call.x), call.k
    return DeferredCall(
        (OPERATOR, call.mark, call.vocabulary, call.k, places(call.x, call.w, call.bias)),
        New(call.x.device, ((shape, torch.float32), (shape, torch.int64))),
        functools.partial(_prepare, call),
        result=_values_and_columns,
        temporary_bytes=len(call.x) * len(call.w) * call.x.itemsize,
    )


def _values_and_columns(*memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return memory


def _prepare(call: TopKCall, values: torch.Tensor, chosen: torch.Tensor) -> Callable[[], None]:
    """Return what enqueues the product and the kernel; collective when the workspace must grow."""
    group, shard, k, rows = call.group, call.shard, call.k, len(call.x)
    if not rows:
        return lambda: None
    workspace = group.workspace(*_size(rows, k, group.world_size))
    arguments = {
        "chosen": chosen,
        "chosen_values": values,
        "words": workspace.data.address,
        "epochs": workspace.epochs,
        "ctx": group.context(OPERATOR),
        "call": call.mark,
        "half": workspace.half_bytes // 8,
        "rows": rows,
        "count": shard.columns,
        "first": shard.first,
    }
    constants = {
        "WORLD_SIZE": group.world_size,
        "K": k,
        "CANDIDATES": next_power_of_2(k),
        "BLOCK": min(next_power_of_2(shard.columns), _BLOCK),
        "num_warps": _WARPS,
    }
    programs = CPU_PROGRAMS if group.backend == "cpu" else processors(call.x.device)
    from interlace.operators.linear_top_k.kernel import choose_columns

    def enqueue() -> None:
        logits = F.linear(call.x, call.w, call.bias)
        candidates: tuple[Any, Any] = (None, None)
        if k > 1:
            candidates = logits[:, : shard.columns].topk(k, 1)
        of_logits = {
            "logits": logits,
            "stride": logits.stride(0),
            "values": candidates[0],
            "columns": candidates[1],
        }
        Launch(choose_columns, (min(rows, programs),), arguments | of_logits, constants)()

    return enqueue
