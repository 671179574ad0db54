"""``linear_top_k``: a product, this rank's candidates, and a kernel that exchanges them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import CPU_PROGRAMS, Launch, processors
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


def choose(call: TopKCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k highest logits of each row, float32, and their columns, int64."""
    group, shard, k = call.group, call.shard, call.k
    require(group.backend)
    rows, device = len(call.x), call.x.device
    chosen = torch.empty((rows, k), dtype=torch.int64, device=device)
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    if not rows:
        return values, chosen
    logits = F.linear(call.x, call.w, call.bias)
    candidates: tuple[Any, Any] = (None, None)
    if k > 1:
        candidates = logits[:, : shard.columns].topk(k, 1)
    workspace = group.workspace(*_size(rows, k, group.world_size))
    arguments = {
        "logits": logits,
        "values": candidates[0],
        "columns": candidates[1],
        "chosen": chosen,
        "chosen_values": values,
        "words": workspace.data.address,
        "epochs": workspace.epochs,
        "ctx": group.context(OPERATOR),
        "call": call.mark,
        "half": workspace.half_bytes // 8,
        "rows": rows,
        "count": shard.columns,
        "stride": logits.stride(0),
        "first": shard.first,
    }
    constants = {
        "WORLD_SIZE": group.world_size,
        "K": k,
        "CANDIDATES": next_power_of_2(k),
        "BLOCK": min(next_power_of_2(shard.columns), _BLOCK),
        "num_warps": _WARPS,
    }
    programs = CPU_PROGRAMS if group.backend == "cpu" else processors(device)
    from interlace.operators.linear_top_k.kernel import choose_columns

    with group.running():
        Launch(choose_columns, (min(rows, programs),), arguments, constants)()
    return values, chosen
