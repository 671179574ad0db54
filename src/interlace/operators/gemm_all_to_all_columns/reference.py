"""``gemm_all_to_all_columns`` as three steps of torch: the unfused pair, with its permute, that the
fused kernel is checked against.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.gemm.reference import is_alone
from interlace.gemm.sequence import SequenceCall


def gemm_all_to_all_columns(call: SequenceCall) -> torch.Tensor:
    """Return this rank's columns of ``x @ w.T + bias`` of all ranks' rows."""
    y = F.linear(call.operands.x, call.operands.w, call.operands.bias)
    # Each rank's columns, one rank's behind the other's: the permute.
    parts = [torch.cat([y[:, a:b] for a, b in ranges] or [y[:, :0]], 1) for ranges in call.columns]
    if is_alone(call.process_group):
        return parts[0]
    own_columns = parts[call.group.rank].shape[1]
    received = y.new_empty(sum(call.rows), own_columns)
    dist.all_to_all_single(
        received.view(-1),
        torch.cat([part.reshape(-1) for part in parts]),
        [rows * own_columns for rows in call.rows],
        [part.numel() for part in parts],
        group=call.process_group,
    )
    return received
