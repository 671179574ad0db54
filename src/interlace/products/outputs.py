"""Products whose output carries itself to the peers: ``impl="mapped"`` and ``impl="triggered"`` of the operators."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.distributed as dist

from interlace.comm import Group
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, describe_parts
from interlace.errors import ArgumentError
from interlace.mapped import Fused, fuse
from interlace.products.config import ProductConfig
from interlace.products.launch import has_descriptors, operand_arguments, options, programs
from interlace.products.operands import ALIGNMENT_BYTES, Operands
from interlace.units import ceil_div

_MOST = 8  # products whose memory a group keeps


def run_into_output(
    how: str,
    collective: str,
    operands: Operands,
    group: Group,
    process_group: dist.ProcessGroup | None,
    config: ProductConfig,
    *,
    replace: bool,
) -> torch.Tensor | None:
    """``x @ w.T`` and the collective of its rows; None if there is no output for these sizes. Collective where it is new.

    A group keeps the outputs of a few sizes until ``Group.release``. A new one takes tens of milliseconds, so a program whose sizes
    never settle should not have one made for each.

    Args:
        how: ``"mapped"``: cuBLAS, whose stores go to the peers; ``"triggered"``: a kernel that counts its tiles, and copy engines.
        collective: of :data:`interlace.mapped.COLLECTIVES`.
        config: of the kernel that counts.
        replace: the implementation was asked for: where there are as many as are kept, give up the one that was not used for
            longest (but none that a CUDA graph has captured). Else there is none for new sizes: on every rank, since all make the
            same calls.

    Raises:
        ArgumentError: with ``replace``: a mapped output would be padded to more than twice its size.
    """
    settings: dict[str, Any] = {"producer": torch.mm, "shape": (operands.rows, operands.columns)}
    if how == "triggered":
        rows = operands.rows // group.world_size
        tiles = ceil_div(rows, config.block_m) * ceil_div(operands.columns, config.block_n)
        shape = group.world_size, rows, operands.columns
        settings = {"producer": functools.partial(count_product, group), "shape": shape, "tiles": tiles}
    key = (how, collective, settings["shape"], operands.out_dtype, settings.get("tiles"))
    product = group.kept.get(key)
    if product is None:
        kept = [one for one, value in group.kept.items() if isinstance(value, Fused) and not value.output.captured]
        if len(kept) >= _MOST and not replace:
            return None
        try:
            product = fuse(collective=collective, dtype=operands.out_dtype, group=process_group, device=group.device, **settings)
        except ArgumentError:  # rows that would be padding more than anything else: on every rank alike
            if replace:
                raise
            return None
        for one in kept[: max(0, len(kept) + 1 - _MOST)]:
            del group.kept[one]
        group.kept[key] = product
    group.kept.move_to_end(key)
    run = cast("Fused", product)
    if how == "mapped":
        y = run(operands.x, operands.w.T)
    else:
        y = run(operands.for_kernel(), config, own_bias=collective != "all_to_all")
    # Sums for one rank are new tensors; anything else is memory that the call after the next writes.
    return y if collective == "reduce_scatter" else y.clone(memory_format=torch.contiguous_format).view(-1, operands.columns)


def count_product(
    group: Group, operands: Operands, config: ProductConfig, *, out: torch.Tensor, counters: torch.Tensor, own_bias: bool
) -> None:
    """Launch the product that counts its tiles, into ``out``: ``[R, M/R, N]``, for rank r at r."""
    require(group.backend)
    prepare(group, operands, config, out, counters, own_bias)()


def prepare(
    group: Group, operands: Operands, config: ProductConfig, out: torch.Tensor, counters: torch.Tensor, own_bias: bool
) -> Launch:
    """The launch of :func:`count_product`."""
    from interlace.products.counted import counted_product

    pieces = counters.numel() // group.world_size
    rows = operands.rows // counters.numel()
    descriptors = has_descriptors(group)
    # A whole tile at the end of a piece would cover the next one of its rank.
    tiles = descriptors and out.stride(1) * out.itemsize % ALIGNMENT_BYTES == 0 and (pieces == 1 or rows % config.block_m == 0)
    result = describe_parts(out, [config.block_m, config.block_n]) if tiles else None
    x, w, bias, x_scale, w_scale, *strides = operand_arguments(operands, config, descriptors)
    arguments = (
        x, w, bias, x_scale, w_scale, result, out.data_ptr(), counters.data_ptr(), group.rank, pieces, rows, operands.columns,
        operands.inner, *strides, out.stride(0), out.stride(1),
    )  # fmt: skip
    constants = options(operands, config, group, descriptors) | {"TILES": tiles, "OWN_BIAS": own_bias}
    return Launch(counted_product, (programs(group, config),), arguments, constants, (operands, out, counters))
