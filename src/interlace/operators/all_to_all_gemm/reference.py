"""``all_to_all_gemm`` as three steps of torch: the unfused pair, with its permute, that the fused
kernel is checked against.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.gemm.reference import is_alone
from interlace.gemm.sequence import SequenceCall


def all_to_all_gemm(call: SequenceCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``gathered @ w.T + bias`` and, if it is a result, the gathered x: this rank's rows of
    all ranks' columns.
    """
    x, gathered = call.operands.x, call.operands.x.clone() if call.gather else call.operands.x
    if not is_alone(call.process_group):
        own_rows, counts = call.rows[call.group.rank], call.column_counts
        received = x.new_empty(own_rows * sum(counts))
        sizes = [own_rows * count for count in counts]
        dist.all_to_all_single(
            received,
            x.contiguous().view(-1),
            sizes,
            [rows * x.shape[1] for rows in call.rows],
            group=call.process_group,
        )
        # Columns of each rank one behind the other, in every row: the permute.
        parts = zip(received.split(sizes), counts, strict=True)
        gathered = torch.cat([part.view(own_rows, count) for part, count in parts], 1)
    y = F.linear(gathered, call.operands.w, call.operands.bias)
    return y, gathered if call.gather else x.new_empty(0, gathered.shape[1])
