"""``impl="split"``: cuBLAS adds to what the last rank sent, copy engines send it on; README.md explains the protocol."""

from __future__ import annotations

import dataclasses

import torch

from interlace.comm import Group, copies
from interlace.comm.dlpack import bytes_at, view_as
from interlace.comm.interpreter import require
from interlace.ops.gemm_reduce_scatter.config import OPERATOR
from interlace.products import record
from interlace.products.operands import Operands, contiguous_dimension
from interlace.products.outputs import multiply_into
from interlace.units import ceil_div

_PIECES = 2  # of a rank's rows: while one is multiplied, the other one travels
_FINISHERS, _FINISHED = 264, 4096  # programs, two a processor of an H200, and the elements that one of them takes at a time


def run(operands: Operands, group: Group, mark: int) -> torch.Tensor:
    """``[M/R, N]``, by R products of M/R rows, in pieces. The rows are split evenly; the result has x's dtype."""
    if contiguous_dimension(operands.x) != 1:
        operands = dataclasses.replace(operands, x=operands.x.contiguous())
    rank, ranks = group.rank, group.world_size
    rows = operands.rows // ranks
    y = operands.x.new_empty([rows, operands.columns])
    if ranks == 1:
        multiply_into(y, operands.x, operands.w, operands.bias)
        return y
    require(group.backend)
    from interlace.ops.gemm_reduce_scatter import kernel

    pieces = min(_PIECES, rows)
    # A copy's addresses are known when it is enqueued, so there is one set of slots, in both halves.
    workspace = group.workspace(f"{OPERATOR}, split", ceil_div(ranks * y.nbytes, 2), record.HEADER + ranks * pieces)
    context, signals, there = group.context(OPERATOR), workspace.signals.address, (rank + 1) % ranks
    slots = workspace.data.address + rank * group.stride
    held = view_as(bytes_at(slots, (ranks * y.nbytes,), (1,), group.device, workspace), (ranks, *y.shape), y.dtype)
    x, slot, result = ([part.tensor_split(pieces) for part in of] for of in (operands.x.chunk(ranks), held, (y,)))
    notes = torch.empty(2, dtype=torch.int32, device=group.device)
    with group.running():
        kernel.begin_ring[(1,)](signals, workspace.epochs, context, notes, mark, WORLD_SIZE=ranks, num_warps=1)
        for step in range(ranks):
            part = (rank - 1 - step) % ranks  # it ends at its owner
            for i in range(pieces):
                partial = slot[step][i]
                if step == 0:
                    multiply_into(partial, x[part][i], operands.w, operands.bias)
                else:
                    index = record.HEADER + step * pieces + i
                    kernel.await_partial[(1,)](signals, context, notes, mark, index, WORLD_SIZE=ranks, num_warps=1)
                    partial.addmm_(x[part][i], operands.w.T)
                if step + 1 < ranks:
                    offset = slot[step + 1][i].data_ptr() - slots
                    flag = signals + there * group.stride + 4 * (record.HEADER + (step + 1) * pieces + i)
                    target = workspace.data.address + there * group.stride + offset
                    data = copies.Transfer(target, partial.data_ptr(), partial.nbytes, there)
                    copies.push(group, [data, copies.Transfer(flag, notes.data_ptr() + 4, 4, there)])
                elif i + 1 < pieces:  # of the last piece there is nothing to hide this behind
                    copies.push(group, [copies.Transfer(result[0][i].data_ptr(), partial.data_ptr(), partial.nbytes, rank)])
        copies.join(group)
        last = result[0][-1]
        kernel.finish_ring[(2 if group.backend == "cpu" else min(ceil_div(last.numel(), _FINISHED), _FINISHERS),)](
            y, last, slot[-1][-1], y.numel(), last.numel(), signals, context, notes, mark, WORLD_SIZE=ranks, BLOCK=_FINISHED
        )  # fmt: skip
    return y
