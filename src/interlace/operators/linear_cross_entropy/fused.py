"""``linear_cross_entropy`` in chunks of rows: a product, a kernel that exchanges what ranks know of
its rows and puts their gradients in the place of the logits, and the products of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from interlace.comm import MAX_PROGRAMS
from interlace.comm.groups.registration import entrance
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import CPU_PROGRAMS, Launch, processors
from interlace.comm.runtime.interpreter import require
from interlace.operators.linear_cross_entropy.call import (
    OPERATOR,
    LossCall,
    LossGradients,
    SizedLoss,
)
from interlace.units import ceil_div, next_power_of_2, round_up

_MOST_LOGITS_BYTES = 256 << 20
"""Bytes of the logits of a chunk. The gradient of w is read and written for each chunk, so chunks
should have a thousand rows or more.
"""
_ROW_MULTIPLE = 128  # rows of a chunk, as the library's tiles have so many

_LANE_LOGITS = 8  # of a row that a thread loads at once
_MANY_COLUMNS = 32768  # from which on a row has 16 warps instead of 8
_PROGRAMS_PER_PROCESSOR = 16
_ROW_BYTES = 4 * 8  # numbers that a rank tells of a row, each in a packed word


def chunk_rows(rows: int, columns: int, itemsize: int) -> int:
    """Return the rows of a chunk by default: as few chunks as there can be, all about equal.

    Args:
        rows: M.
        columns: Rows of w on one rank.
        itemsize: Bytes of a logit.
    """
    most_rows = max(_MOST_LOGITS_BYTES // (columns * itemsize), _ROW_MULTIPLE)
    return (
        round_up(ceil_div(rows, ceil_div(rows, most_rows)), _ROW_MULTIPLE)
        if rows
        else _ROW_MULTIPLE
    )


def _size(rows: int, world_size: int) -> WorkspaceSize:
    """Return the size of the memory in which ranks tell one another of a chunk's rows."""
    return WorkspaceSize(OPERATOR, rows * world_size * _ROW_BYTES)


def reservation(sized: SizedLoss) -> Reservation:
    """Return the symmetric memory of the loss itself; products with an exchange have their own."""
    rows = min(sized.rows, max(sized.chunk_rows, 1))
    return Reservation((_size(rows, sized.world_size),) if rows else ())


def run(call: LossCall) -> tuple[torch.Tensor, torch.Tensor, LossGradients]:
    """Return each row's loss and logarithm of the sum of exponentials, float32 ``[M]``, and the
    gradients that the call needs of their sum, times ``call.scale``.
    """
    require(call.group.backend)
    rows_of_w, call = len(call.w), _with_equal_rows(call)
    chunks, gradients = _LogitChunks(call), _ChunkGradients(call)
    of_rows = []
    for x, logits, targets, _ in chunks:
        numbers = torch.empty((2, len(logits)), dtype=torch.float32, device=logits.device)
        with call.group.running():
            _losses(call, logits, targets, numbers)()
        of_rows.append(numbers)
        gradients.add(x, logits)
    losses, log_sums = chunks.joined(of_rows)
    return losses, log_sums, gradients.result(rows_of_w)


def backward(call: LossCall, log_sums: torch.Tensor) -> LossGradients:
    """Return the gradients that the call needs of the rows' losses, each times its own of
    ``call.scale``.
    """
    require(call.group.backend)
    rows_of_w, call = len(call.w), _with_equal_rows(call)
    chunks, gradients = _LogitChunks(call), _ChunkGradients(call)
    for x, logits, targets, rows in chunks:
        arguments = _row_arguments(call, logits, targets)
        arguments |= {"log_sums": chunks.part(log_sums, rows)}
        arguments |= {"scales": chunks.part(call.scale, rows)}
        with call.group.running():
            _launch("gradients_of_rows", call, logits, arguments, {})()
        gradients.add(x, logits)
    return gradients.result(rows_of_w)


def _with_equal_rows(call: LossCall) -> LossCall:
    """Return the call with as many rows of w as the other ranks have, as the products around which
    ranks communicate are of the same sizes and layouts on all.
    """
    per_rank = call.shard.per_rank
    if call.options.vocabulary == per_rank * call.group.world_size:
        return call
    # Some rank's w is copied to be padded, and lies along H then, so all ranks' must.
    w, bias = call.w.contiguous(), call.bias
    absent = per_rank - len(w)
    if absent:
        w = F.pad(w, (0, 0, 0, absent))
        bias = None if bias is None else F.pad(bias, (0, absent))
    padded = dataclasses.replace(call, w=w, bias=bias)
    padded.mark = call.mark
    return padded


def multiply(gradients: LossGradients, factor: torch.Tensor) -> None:
    """Multiply gradients in place by a float32 number on their device, which is 1 in most programs;
    nothing is read or written then.
    """
    from interlace.operators.linear_cross_entropy.kernel import multiply_unless_one

    for values in gradients:
        if values is None or not values.numel():
            continue
        if not values.is_cuda:
            values *= factor
            continue
        programs = min(_PROGRAMS_PER_PROCESSOR * processors(values.device), MAX_PROGRAMS)
        arguments = {"values": values, "factor": factor, "count": values.numel()}
        Launch(multiply_unless_one, (programs,), arguments, {"BLOCK": 4096, "num_warps": 8})()


class _LogitChunks:
    """The chunks of a call: rows of x of all ranks that this call has, their logits and targets.

    Where x has this rank's rows alone, a chunk has equally many rows of each rank, rank 0's first.
    """

    def __init__(self, call: LossCall) -> None:
        self._call = call
        self._gathers = call.options.sequence_parallel and call.group.world_size > 1
        self._ranks = call.group.world_size if self._gathers else 1
        self._rows = len(call.x)  # of each of these ranks
        self._step = max(call.options.chunk_rows // self._ranks, 1)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]]:
        """Yield x, logits and targets of each chunk, and its rows among each rank's."""
        call, memory = self._call, None
        if not self._gathers:
            memory = call.x.new_empty(min(self._step, self._rows), len(call.w))
        for first in range(0, self._rows, self._step):
            rows = slice(first, min(first + self._step, self._rows))
            x = call.x[rows]
            if memory is None:
                logits, x = entrance("all_gather_gemm")(
                    x, call.w, call.bias, None, None, None, x.dtype, True, call.group_name, "auto",
                    "",
                )  # fmt: skip
            else:
                logits = _multiply(x, call.w, call.bias, memory[: len(x)])
            yield x, logits, self.part(call.target, rows), rows
            del logits  # so that the next chunk's may have its memory

    def part(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return a chunk's of the numbers that there are for all rows."""
        # Of one row of each rank, reshape alone would return a view that skips the others.
        return values.view(self._ranks, self._rows)[:, rows].reshape(-1).contiguous()

    def joined(self, of_rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both numbers of all rows, of the chunks' ``[2, rows of the chunk]``."""
        if not of_rows:
            nothing = torch.empty(0, dtype=torch.float32, device=self._call.x.device)
            return nothing, nothing.clone()
        by_rank = [numbers.view(2, self._ranks, -1) for numbers in of_rows]
        losses, log_sums = torch.cat(by_rank, 2).view(2, -1)
        # Results of an operator of torch must not share memory.
        return losses.clone(), log_sums.clone()


def _multiply(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, w.t(), out=out)
    return torch.addmm(bias, x, w.t(), out=out)


def _losses(
    call: LossCall, logits: torch.Tensor, targets: torch.Tensor, numbers: torch.Tensor
) -> Launch:
    """Prepare the kernel of a chunk's losses. Collective when memory must grow.

    Args:
        numbers: ``[2, rows]``: the losses, and the logarithms of sums of exponentials.
    """
    group, options = call.group, call.options
    ranks = group.world_size
    workspace = group.workspace(*_size(len(logits), ranks))
    arguments = _row_arguments(call, logits, targets) | {
        "losses": numbers[0],
        "log_sums": numbers[1],
        "scale": call.scale,
        "words": workspace.data.address,
        "epochs": workspace.epochs,
        "ctx": group.context(OPERATOR),
        "call": call.mark,
        "half": workspace.half_bytes // 8,
    }
    constants = {
        "WORLD_SIZE": ranks,
        "SMOOTHS": options.label_smoothing > 0,
        "GRADIENT": call.is_differentiated,
    }
    return _launch("losses_of_rows", call, logits, arguments, constants)


def _row_arguments(call: LossCall, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Return the arguments that both kernels have, by name."""
    return {
        "logits": logits,
        "targets": targets,
        "rows": len(logits),
        "columns": call.shard.columns,
        "stride": logits.shape[1],
        "first": call.shard.first,
        "vocabulary": call.options.vocabulary,
        "ignored": call.options.ignore_index,
        "smoothing": float(call.options.label_smoothing),
        "z_loss": float(call.options.z_loss),
    }


def _launch(
    kernel: str,
    call: LossCall,
    logits: torch.Tensor,
    arguments: dict[str, Any],
    constants: dict[str, Any],
) -> Launch:
    from interlace.operators.linear_cross_entropy import kernel as kernels

    group, (rows, columns) = call.group, logits.shape
    programs = CPU_PROGRAMS
    if group.backend != "cpu":
        programs = _PROGRAMS_PER_PROCESSOR * processors(group.device)
    warps = 16 if columns >= _MANY_COLUMNS else 8
    block = min(next_power_of_2(columns), warps * 32 * _LANE_LOGITS)
    constants = {**constants, "BLOCK": block, "num_warps": warps}
    return Launch(getattr(kernels, kernel), (min(rows, programs),), arguments, constants)


class _ChunkGradients:
    """The gradients of a call, which grow chunk by chunk."""

    def __init__(self, call: LossCall) -> None:
        self._call = call
        # Of the chunks before the next one.
        self._of_x: list[torch.Tensor] = []
        self._of_w: torch.Tensor | None = None
        self._of_bias: torch.Tensor | None = None

    def add(self, x: torch.Tensor, grad: torch.Tensor) -> None:
        """Add a chunk's: the gradient of its logits times w, and times its rows of x."""
        call = self._call
        if call.needs_x:
            self._of_x.append(self._summed(grad))
        if call.needs_w:
            # Each chunk's sum is float32, and is rounded to w's dtype with those before it.
            if self._of_w is None:
                self._of_w = grad.t() @ x
            else:
                self._of_w.addmm_(grad.t(), x)
        if call.needs_bias:
            total = grad.sum(0, dtype=torch.float32)
            self._of_bias = total if self._of_bias is None else self._of_bias.add_(total)

    def result(self, rows_of_w: int) -> LossGradients:
        """Return the gradients in x's dtype, of so many rows of w; of no chunk they are 0."""
        call, of_x, of_w, of_bias = self._call, None, self._of_w, self._of_bias
        if call.needs_x:
            of_x = torch.cat(self._of_x) if self._of_x else call.x.new_zeros(call.x.shape)
        if call.needs_w:
            of_w = call.w.new_zeros(call.w.shape) if of_w is None else of_w
            of_w = of_w if len(of_w) == rows_of_w else of_w[:rows_of_w].clone()
        if call.bias is not None and call.needs_bias:
            if of_bias is None:
                of_bias = torch.zeros_like(call.bias)
            of_bias = of_bias[:rows_of_w].to(call.x.dtype, copy=True)
        return LossGradients(of_x, of_w, of_bias)

    def _summed(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of the gradient of x, of this rank's rows where x has those."""
        call = self._call
        if call.group.world_size == 1:
            return grad @ call.w
        lists = [None] if call.options.sequence_parallel else []
        name = "gemm_reduce_scatter" if lists else "gemm_all_reduce"
        summed: torch.Tensor = entrance(name)(
            grad, call.w.t(), None, None, None, *lists, grad.dtype, call.group_name, "auto", ""
        )
        return summed
