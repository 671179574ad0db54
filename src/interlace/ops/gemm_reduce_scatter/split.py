"""``impl="split"``: cuBLAS for the peers' rows, copy engines that take them there, a product that adds what came."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from interlace.comm import Group, copies
from interlace.comm.dlpack import bytes_at, view_as
from interlace.comm.interpreter import require
from interlace.comm.kernels import describe_ranks
from interlace.ops.gemm_reduce_scatter.config import OPERATOR, GemmReduceScatterConfig
from interlace.products import record
from interlace.products.launch import describe_own, has_descriptors, operand_arguments, options, padded_columns, programs, tile_ns
from interlace.products.operands import ALIGNMENT_BYTES, Operands
from interlace.products.outputs import multiply_into
from interlace.units import ceil_div, round_up

_PIECES = 2  # of the rows for one rank, at most
_LINK_BYTES_PER_NS = 380  # of a copy engine to one peer of an H200


def run(
    products: Sequence[Operands], splits: Sequence[int], group: Group, config: GemmReduceScatterConfig, mark: int
) -> torch.Tensor:  # fmt: skip
    """``[splits[rank], N]`` of x's dtype, of a product or the sum of several. Collective when the workspace must grow.

    Args:
        products: of the same rows, columns and dtypes; only the first one may have a bias.
    """
    products = [product.with_contiguous_rows() for product in products]
    operands, *others = products
    rank, ranks, dtype = group.rank, group.world_size, operands.out_dtype
    rows, columns, stride = max(splits), operands.columns, padded_columns(operands.columns, dtype)
    y = operands.x.new_empty([splits[rank], stride])
    if ranks == 1:
        _multiply(y[:, :columns], products, slice(None), operands.bias)
        return y[:, :columns].contiguous()
    require(group.backend)
    from interlace.ops.gemm_reduce_scatter import kernel

    row_bytes = stride * dtype.itemsize
    piece_rows = _piece_rows(rows, row_bytes, operands.inner, config)
    # A copy's addresses are known before its epoch is, so there is one set of slots, in both halves of the workspace.
    workspace = group.workspace(f"{OPERATOR}, split", ceil_div(ranks * rows * row_bytes, 2), record.HEADER + ranks * _PIECES)
    context, signals, address = group.context(OPERATOR), workspace.signals.address, workspace.data.address
    starts = list(itertools.accumulate(splits, initial=0))
    sent = operands.x.new_empty([ranks - 1, rows, stride])
    notes = torch.empty(2, dtype=torch.int32, device=group.device)

    mine = slice(starts[rank], starts[rank + 1])
    own = dataclasses.replace(operands, x=operands.x[mine]).for_kernel()
    tiles = has_descriptors(group)
    own_x, w, bias, _, _, x_stride, w_stride, _, _ = operand_arguments(own, config, tiles)
    slots = results = None
    if tiles:
        whole = 2 * workspace.half_bytes // dtype.itemsize
        sizes = [(1, whole), (ranks, rows * stride), (rows, stride), (columns, 1)]
        slots = describe_ranks(group, address, dtype, sizes, [config.block_m, config.block_n])
        results = describe_own(y, columns, [config.block_m, config.block_n])
    align = ALIGNMENT_BYTES // dtype.itemsize
    with group.running():
        with copies.beside(group):  # only copies have to wait for it
            kernel.admit_parts[(1,)](signals, workspace.epochs, context, notes, mark, WORLD_SIZE=ranks, num_warps=1)
            admitted = copies.so_far(group)
        for piece, first in enumerate(range(0, rows, piece_rows)):
            for step in range(ranks - 1):
                to = (rank + 1 + step) % ranks
                last = min(first + piece_rows, splits[to])
                if first >= last:
                    continue
                part = sent[step, first:last]
                _multiply(part[:, :columns], products, slice(starts[to] + first, starts[to] + last))
                there = to * group.stride
                slot = address + there + (rank * rows + first) * row_bytes
                flag = signals + there + 4 * (record.HEADER + rank * _PIECES + piece)
                part_there = copies.Transfer(slot, part.data_ptr(), part.nbytes, to)
                stamp_there = copies.Transfer(flag, notes.data_ptr() + 4, 4, to)
                copies.push(group, [part_there, stamp_there])
        if others and len(y):  # in the place of a peer's part, which is added like it
            here = address + rank * group.stride + rank * rows * row_bytes
            part = view_as(bytes_at(here, (len(y) * row_bytes,), (1,), group.device, workspace), y.shape, dtype)
            _multiply(part[:, :columns], others, mine)
        copies.wait_for(group, admitted)
        kernel.multiply_and_sum[(programs(group, config),)](
            own_x, w, bias, slots, results, address, y.data_ptr(), signals, context, notes, mark, rows, len(y), piece_rows, columns,
            own.inner, x_stride, w_stride, stride // align,
            **options(own, config, group, tiles), TILES=tiles, ALIGN=align, PIECES=_PIECES, OWN_PART=bool(others),
        )  # fmt: skip
        copies.join(group)
    return y[:, :columns].contiguous()


def _multiply(out: torch.Tensor, products: Sequence[Operands], rows: slice, bias: torch.Tensor | None = None) -> None:
    """These rows of the sum of products into ``out``."""
    first, *others = products
    multiply_into(out, first.x[rows], first.w, bias)
    for other in others:
        out.addmm_(other.x[rows], other.w.T)


def _piece_rows(rows: int, row_bytes: int, inner: int, config: GemmReduceScatterConfig) -> int:
    """Rows that are multiplied and copied at a time.

    The last copy is hidden by the first tiles of the own product. If it takes longer, pieces make it shorter; else they would only
    make cuBLAS's products smaller.
    """
    if rows * row_bytes < tile_ns(config.block_m, config.block_n, inner) * _LINK_BYTES_PER_NS:
        return rows
    return min(rows, round_up(ceil_div(rows, _PIECES), config.block_m))
