"""``impl="chunked"``: cuBLAS multiplies the peers' rows, copy engines send them, and a kernel
multiplies this rank's rows and adds the received parts; or, where tiles of ours would take longer,
cuBLAS multiplies this rank's rows as well, and a kernel adds the parts to them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from interlace.comm import Group
from interlace.comm.groups import copies
from interlace.comm.groups.group import Workspace
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import Launch, cut_rows, describe_ranks, known_factor
from interlace.comm.replay.deferred import DeferredCall, New
from interlace.comm.runtime.dlpack import tensor_at
from interlace.comm.runtime.interpreter import require
from interlace.costs.known_profiles import profile_of
from interlace.costs.time import SizedCall
from interlace.gemm import launch
from interlace.gemm.call import GemmCall
from interlace.gemm.config import GemmConfig
from interlace.gemm.kernels import layout
from interlace.gemm.operands import Operands, RowPart, Weight
from interlace.gemm.products import multiply_into
from interlace.tuning.gpu import Gpu
from interlace.units import ceil_div, round_up

NAME = "gemm_reduce_scatter"

_PIECES = 2  # of the rows for one rank, at most
_LINK_BYTES_PER_NS = 380  # of a copy engine to one peer of an H200


def run(call: GemmCall) -> DeferredCall | torch.Tensor:
    """Return this rank's rows ``[rows, N]`` of the product, summed over ranks."""
    return run_products([call.operands], call.rows.by_rank, call.group, call.config, call.mark)


def _size(ranks: int, slot_bytes: int) -> WorkspaceSize:
    """Return the size of the workspace with one set of slots, in both halves."""
    signals = layout.HEADER + ranks * _PIECES
    return WorkspaceSize(f"{NAME}.chunked", ceil_div(ranks * slot_bytes, 2), signals)


def reservation(call: GemmCall) -> Reservation:
    """Return the symmetric memory of a call."""
    columns, dtype = call.operands.columns, call.operands.out_dtype
    slot_bytes = launch.output_bytes(max(call.rows.by_rank), columns, dtype)
    return Reservation((_size(call.group.world_size, slot_bytes),))


def run_products(
    given: Sequence[Operands], splits: Sequence[int], group: Group, config: GemmConfig, mark: int
) -> DeferredCall | torch.Tensor:
    """Return this rank's rows ``[splits[rank], N]`` of a product, or of a sum of products, summed
    over ranks. Collective when the workspace must grow.

    Args:
        given: Operands of the same rows, columns and dtypes. Only the first may have a bias.
        splits: The rows that each rank owns.
        group: The ranks.
        config: The configuration of the kernel that multiplies this rank's own rows.
        mark: The number from the ranks' agreement.
    """
    products = [product.with_contiguous_rows() for product in given]
    operands, *other_products = products
    rank, ranks, dtype = group.rank, group.world_size, operands.out_dtype
    rows, columns = max(splits), operands.columns
    stride = launch.padded_columns(columns, dtype)
    weights = [product.weight() for product in products]
    if ranks == 1:
        y = operands.x.new_empty([splits[rank], stride], dtype=dtype)
        multiply_sum_into(
            y[:, :columns], [product.all_rows() for product in products], weights, operands.bias
        )
        return launch.without_padding(y, columns)
    require(group.backend)
    from interlace.operators.gemm_reduce_scatter import kernel

    row_bytes = stride * dtype.itemsize
    piece_rows = _piece_rows(rows, row_bytes, operands.inner, config)
    # A copy's addresses are known before its epoch is, so there is one set of slots, in both halves
    # of the workspace.
    workspace = group.workspace(*_size(ranks, rows * row_bytes))
    context, signals, address = (
        group.context(NAME),
        workspace.signals.address,
        workspace.data.address,
    )
    key = (f"{NAME}, pieces", tuple(splits), piece_rows, row_bytes, address, signals)
    pieces = group.once(
        key, lambda: _Pieces.of(group, splits, piece_rows, row_bytes, address, signals)
    )
    by_library = group.once(
        (f"{NAME}, own rows", rows, config, *(product.signature() for product in products)),
        lambda: _is_by_library(products, rows, group, config),
    )
    notes = workspace.notes
    own_x_scale = operands.x_scale
    if own_x_scale is not None and own_x_scale.numel() > 1:
        own_x_scale = own_x_scale[pieces.own_rows]
    own_rows = dataclasses.replace(operands, x=operands.x[pieces.own_rows], x_scale=own_x_scale)
    own_product = own_rows if by_library else own_rows.for_kernel()

    def enqueue(y: torch.Tensor, sent: torch.Tensor) -> None:
        # A view costs the host as much time as enqueueing a copy, so each tensor is split once.
        inputs = list(zip(*(product.split(pieces.rows) for product in products), strict=True))
        parts = (sent if stride == columns else sent[:, :columns]).split(pieces.sent)
        # 1. Wait, on the copies' stream only, until the peers have read the previous call's parts.
        # The products need not wait: they write to memory of this rank.
        with copies.beside(group):
            admission = {
                "signals": signals,
                "epochs": workspace.epochs,
                "ctx": context,
                "notes": notes,
                "call": mark,
            }
            Launch(kernel.admit_parts, (1,), admission, {"WORLD_SIZE": ranks, "num_warps": 1})()
            admitted = copies.so_far(group)
        # 2. Multiply a piece, and copy it to its owner. The stamp is a second copy on the same
        # stream, so it cannot arrive before the piece.
        for piece in pieces.order:
            multiply_sum_into(parts[piece.part], inputs[piece.input], weights)
            part_transfer = copies.Transfer(
                piece.slot, sent.data_ptr() + piece.offset, piece.nbytes, piece.to
            )
            copies.push(
                group,
                [part_transfer, copies.Transfer(piece.signal, notes.data_ptr() + 4, 4, piece.to)],
            )
        own_inputs = inputs[pieces.own_index]
        arriving = {
            "slot_address": address,
            "signals": signals,
            "ctx": context,
            "notes": notes,
            "call": mark,
            "most_rows": rows,
            "rows": len(y),
            "piece_rows": piece_rows,
        }
        if by_library:
            # 3. Multiply this rank's rows; the kernel below adds the parts.
            multiply_sum_into(y[:, :columns], own_inputs, weights)
            last = _add_pieces(group, y, columns, operands.bias, arriving)
        else:
            # 3. The kernel below multiplies one product. The others of this rank's rows go into
            # this rank's own slot, which the kernel adds like a peer's part.
            if other_products and len(y):
                slot_address = address + rank * group.stride + rank * rows * row_bytes
                part = tensor_at(slot_address, y.shape, dtype, group.device, workspace)
                multiply_sum_into(part[:, :columns], own_inputs[1:], weights[1:])
            last = _multiply_and_sum(
                group, workspace, own_product, y, config, arriving, own_part=bool(other_products)
            )
        # 4. Multiply this rank's rows, if that is not done, and add the parts. The kernel signals
        # DONE of this call, so it must follow the admission, which waits for DONE of the previous
        # one.
        copies.wait_for(group, admitted)
        if group.members.ranks_per_gpu > 1:
            # Copies within a GPU are kernels, for which the next one, which waits for the peers'
            # copies, would leave no SM.
            copies.join(group)
        last()
        copies.join(group)

    return DeferredCall(
        (
            *key,
            config,
            by_library,
            mark,
            own_product.memory(),
            *(product.memory() for product in products),
        ),
        New(
            group.device,
            (([splits[rank], stride], dtype), ([sum(pieces.sent), stride], dtype)),
        ),
        lambda y, sent: functools.partial(enqueue, y, sent),
        functools.partial(_result, columns=columns),
        copied=(1,),
        is_of_operands=own_product is own_rows and all(map(operator.is_, products, given)),
    )


def _result(y: torch.Tensor, sent: torch.Tensor, *, columns: int) -> torch.Tensor:
    return launch.without_padding(y, columns)


def _multiply_and_sum(
    group: Group,
    workspace: Workspace,
    own_product: Operands,
    y: torch.Tensor,
    config: GemmConfig,
    arriving: Mapping[str, Any],
    *,
    own_part: bool,
) -> Launch:
    """Return the launch that multiplies this rank's own rows and adds the received parts, into ``y
    [own rows, padded columns]``.

    Args:
        group: The ranks.
        workspace: The memory of slots and signals.
        own_product: The operands of this rank's own rows.
        y: The result, which the kernel writes.
        config: The kernel's configuration.
        arriving: The arguments that say where parts arrive and when.
        own_part: Whether this rank's own slot holds a part of the sum as well.
    """
    from interlace.operators.gemm_reduce_scatter import kernel

    dtype, stride, tiles = y.dtype, y.shape[1], launch.moves_tiles(group.device)
    rows = arriving["most_rows"]
    slots = results = None
    if tiles:
        elements = 2 * workspace.half_bytes // dtype.itemsize
        sizes = [
            (1, elements),
            (group.world_size, rows * stride),
            (rows, stride),
            (own_product.columns, 1),
        ]
        slots = describe_ranks(
            group, workspace.data.address, dtype, sizes, [config.block_m, config.block_n]
        )
        results = launch.describe_own(y, own_product.columns, [config.block_m, config.block_n])
    operands = launch.operand_arguments(own_product, config, tiles)
    del operands["scales"]  # the kernel takes no float8
    arguments = {
        **operands,
        **arriving,
        "slots": slots,
        "results": results,
        "y_address": y.data_ptr(),
    }
    shared = launch.constants(own_product, config, group, descriptors=tiles, tile_stores=tiles)
    flags = {"PIECES": _PIECES, "OWN_PART": own_part}
    return Launch(
        kernel.multiply_and_sum,
        (launch.programs(group, config),),
        arguments,
        shared | flags,
    )


def _add_pieces(
    group: Group,
    y: torch.Tensor,
    columns: int,
    bias: torch.Tensor | None,
    arriving: Mapping[str, Any],
) -> Launch:
    """Return the launch that adds the received parts, and the bias, to this rank's own, which ``y
    [own rows, padded columns]`` holds.

    Args:
        columns: The columns of y that are not padding.
        arriving: The arguments that say where parts arrive and when.
    """
    from interlace.operators.gemm_reduce_scatter import kernel

    programs, tile = cut_rows(len(y), columns, group)
    arguments = {**arriving, "y": y, "bias": bias, "N": columns, "row_stride": y.shape[1]}
    constants = {
        "PIECES": _PIECES,
        "WORLD_SIZE": group.world_size,
        "FACTOR": known_factor(columns, y.shape[1]),
        **tile,
    }
    return Launch(kernel.add_pieces, (programs,), arguments, constants)


def _is_by_library(
    products: Sequence[Operands], rows: int, group: Group, config: GemmConfig
) -> bool:
    """Return whether the library multiplies this rank's own rows, too, before a kernel that adds
    the parts. Peers see no difference.

    Args:
        products: The products whose sum is taken.
        rows: The most rows that a rank owns.
        group: The ranks.
        config: The configuration of the kernel that would multiply them.
    """
    first = products[0]
    if first.x_scale is not None:
        return True  # the kernel takes no float8
    if group.backend == "cpu":
        # No profile knows the interpreter.
        return rows < config.block_m
    gpu = Gpu.of(group.device)
    call = SizedCall.of_dtype(
        str(first.x.dtype).removeprefix("torch."),
        rows * group.world_size,
        first.columns,
        sum(product.inner for product in products),
        group.world_size,
        w_along_k=first.w_along_k,
    )
    times_us = profile_of(gpu.name, gpu.processors).own_rows_us(
        call, (config.block_m, config.block_n)
    )
    return times_us["library"] < times_us["kernel"]


def multiply_sum_into(
    out: torch.Tensor,
    inputs: Sequence[RowPart],
    weights: Sequence[Weight],
    bias: torch.Tensor | None = None,
) -> None:
    """Write the sum of products into ``out``. A product of float8 is the only one."""
    multiply_into(out, inputs[0], weights[0], bias)
    for rows, weight in zip(inputs[1:], weights[1:], strict=True):
        out.addmm_(rows.x, weight.transposed)


class _Piece(NamedTuple):
    """Rows for a peer: their indices among the pieces of the inputs and of the sent products, their
    bytes, and the addresses that they go to.
    """

    input: int
    part: int
    offset: int
    nbytes: int
    slot: int
    signal: int
    to: int


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """The division of a call's rows into pieces, which is the same in every call.

    Attributes:
        rows: The rows of each piece of x, in order; this rank's own rows are one piece.
        own: Which one that is.
        own_rows: And where.
        sent: The rows of each piece that is sent.
        order: The pieces in the order of their products: the first pieces of all peers, from the
            neighbour on, and then their second pieces.
    """

    rows: list[int]
    own_index: int
    own_rows: slice
    sent: list[int]
    order: list[_Piece]

    @staticmethod
    def of(
        group: Group,
        splits: Sequence[int],
        piece_rows: int,
        row_bytes: int,
        slots: int,
        signals: int,
    ) -> _Pieces:
        """Return the pieces for slots and signals at these addresses of rank 0."""
        rank, ranks, most_rows = group.rank, group.world_size, max(splits)
        rows: list[int] = []
        sent: list[int] = []
        own_index, by_turn = 0, {}
        for to, count in enumerate(splits):
            if to == rank:
                own_index = len(rows)
                rows.append(count)
                continue
            for index, first in enumerate(range(0, count, piece_rows)):
                peer_offset, size = to * group.stride, min(piece_rows, count - first)
                slot = slots + peer_offset + (rank * most_rows + first) * row_bytes
                signal = signals + peer_offset + 4 * (layout.HEADER + rank * _PIECES + index)
                offset, nbytes = sum(sent) * row_bytes, size * row_bytes
                by_turn[index, (to - rank) % ranks] = _Piece(
                    len(rows), len(sent), offset, nbytes, slot, signal, to
                )
                rows.append(size)
                sent.append(size)
        start = sum(rows[:own_index])
        return _Pieces(
            rows,
            own_index,
            slice(start, start + splits[rank]),
            sent,
            [piece for _, piece in sorted(by_turn.items())],
        )


def _piece_rows(rows: int, row_bytes: int, inner: int, config: GemmConfig) -> int:
    """Return the number of rows that are multiplied and copied at a time.

    The last copy is hidden by the first tiles of the own product. If it takes longer, pieces make
    it shorter; else they would only make cuBLAS's products smaller.
    """
    tile_ns = launch.tile_ns(config.block_m, config.block_n, inner)
    if rows * row_bytes < tile_ns * _LINK_BYTES_PER_NS:
        return rows
    return min(rows, round_up(ceil_div(rows, _PIECES), config.block_m))
