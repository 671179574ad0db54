"""``impl="decode"``: few tokens per rank, in three kernels that read each weight once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from interlace.comm import Workspace
from interlace.comm.groups.group import MAX_PROGRAMS
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import Launch, processors, triton_dtype
from interlace.comm.replay.deferred import DeferredCall, New
from interlace.comm.runtime.interpreter import require
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.operators.mixture_of_experts import layout
from interlace.operators.mixture_of_experts.call import LayerCall
from interlace.operators.mixture_of_experts.choice import ExpertTerms, unmet
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig
from interlace.operators.mixture_of_experts.fused import temporary_bytes
from interlace.operators.mixture_of_experts.layout import (
    DECODE_SIGNALS,
    MAX_DECODE_TOKENS,
    SENDERS,
    ExpertSizes,
    Saved,
)
from interlace.tuning.gpu import Gpu
from interlace.units import alignment, ceil_div, next_power_of_2, round_up

WORKSPACE = f"{OPERATOR}.decode"
_RESULTS = f"{WORKSPACE}.results"

_COLUMNS = 1024
"""Columns of a token that a program sends or adds at a time."""

_MOST_RESIDENT = 4
"""Programs of the products per processor: while one begins a tile, the others read weights."""

_FEW_SUMS = 2048
"""Sums of a tile of float8 with which three programs have registers on a processor, and not two."""

_FEW_SUMS_ALONG_N = 4096
"""The same of weights of other dtypes along N."""

_OTHER_SHARED_BYTES = 2048
"""Shared memory of such a program beside its operands, about."""

_QUANTISERS = 8
"""Programs per processor that turn rows into float8."""

_MOST_SLOTS = 2048
"""Slots that a program looks through at a time."""


def refusal(terms: ExpertTerms) -> str | None:
    """Return what a call must have for ``impl="decode"`` and has not, or None."""
    # Each expert has a list with room for all slots of all ranks.
    few = terms.sizes.tokens <= MAX_DECODE_TOKENS
    return unmet((*terms.inference_rules, (few, f"at most {MAX_DECODE_TOKENS} tokens per rank")))


def run(call: LayerCall) -> DeferredCall:
    """Return the work whose result is ``y [T, hidden]``; no backward pass follows."""

    def prepared(y: torch.Tensor) -> Callable[[], None]:
        _workspaces(call)  # what may have to grow

        def enqueue() -> None:
            for launch in launches(call, y):
                launch()

        return enqueue

    return DeferredCall(
        (WORKSPACE, call.mark, *call.memory()),
        New.like(call.x, call.x.shape),
        prepared,
        lambda y: (y, Saved.nothing(y)),
        with_libraries=False,
        temporary_bytes=temporary_bytes(call, call.sizes.world_size * call.sizes.slots),
    )


def _workspaces(call: LayerCall) -> tuple[Workspace, Workspace]:
    """Return the memory of tokens and signals, and of results. Collective when it must grow."""
    tokens, results = _sizes(call.sizes, call.x.dtype)
    return call.group.workspace(*tokens), call.group.workspace(*results)


def _sizes(sizes: ExpertSizes, dtype: torch.dtype) -> tuple[WorkspaceSize, WorkspaceSize]:
    """Return the sizes of the workspaces of tokens and signals, and of results."""
    row_bytes = sizes.hidden * dtype.itemsize  # more than that of float8, with scales
    half_bytes = round_up(rows_at(sizes) + sizes.world_size * sizes.tokens * row_bytes, 16)
    return (
        WorkspaceSize(WORKSPACE, half_bytes, DECODE_SIGNALS),
        # Used as one memory: its halves need not take turns.
        WorkspaceSize(_RESULTS, ceil_div(sizes.slots * row_bytes, 2)),
    )


def reservation(terms: ExpertTerms) -> Reservation:
    """Return the symmetric memory of a call."""
    return Reservation(_sizes(terms.sizes, terms.dtype))


def rows_at(sizes: ExpertSizes) -> int:
    """Return the offset of tokens, in front of which are the experts that all ranks' slots name."""
    return round_up(4 * sizes.world_size * sizes.slots, 16)


def columns(hidden: int) -> int:
    """Return the columns of a token that a program sends or adds at a time."""
    return min(next_power_of_2(max(hidden, 16)), _COLUMNS)


def senders(tokens: int, hidden: int, config: MixtureOfExpertsConfig) -> int:
    """Return the number of programs that send tokens, a power of two."""
    pieces = next_power_of_2(max(1, tokens * ceil_div(hidden, columns(hidden))))
    most_programs = min(SENDERS, config.push_programs)
    return min(pieces, 1 << (most_programs.bit_length() - 1))


def _stage_bytes(config: MixtureOfExpertsConfig, itemsize: int) -> int:
    return (config.block_m + config.tail + config.block_n) * config.block_k * itemsize


@functools.cache
def _stages(config: MixtureOfExpertsConfig, itemsize: int, device: torch.device) -> int:
    """Return the steps in flight of a program, for which it has shared memory."""
    if device.type == "cpu":
        return config.num_stages
    stage_bytes = _stage_bytes(config, itemsize)
    return Gpu.of(device).stages_that_fit(
        config.num_stages, stage_bytes, beside=_OTHER_SHARED_BYTES
    )


@functools.cache
def resident_programs(
    config: MixtureOfExpertsConfig, itemsize: int, device: torch.device, *, along_k: bool = True
) -> int:
    """Return how many programs of the products a GPU has shared memory and registers for at once.

    More of them would begin when the others have done their share of the tiles.

    Args:
        config: The configuration.
        itemsize: Bytes of an element of the weights.
        device: The GPU, or the CPU, where two programs share the tiles.
        along_k: Whether the weights lie along K in memory.
    """
    if device.type == "cpu":
        return 2
    operands = _stages(config, itemsize, device) * _stage_bytes(config, itemsize)
    shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    resident = shared // (operands + _OTHER_SHARED_BYTES)
    most, sums = _MOST_RESIDENT, config.block_m * config.block_n
    if itemsize == 1:
        # What a step adds is in registers beside the sum: 138 to 160 of a thread, or 207 to 248.
        most = 3 if sums <= _FEW_SUMS else 2
    elif not along_k and sums > _FEW_SUMS_ALONG_N:
        # So are the addresses of more lines: 200 to 225 of a thread.
        most = 2
    return max(1, min(most, resident)) * processors(device)


def launches(call: LayerCall, y: torch.Tensor) -> list[Launch]:
    """Return the launches of a forward pass, in order. Collective when memory must grow.

    They are: tokens and lists; first product; of float8 weights the activations as float8; second
    product and sum.

    Args:
        call: The call.
        y: Where its result goes.
    """
    group, sizes, dtype = call.group, call.sizes, call.x.dtype
    require(group.backend)
    from interlace.gemm.kernels.tiles import Tiling
    from interlace.operators.mixture_of_experts.kernels import decode as kernels

    config, device = call.chosen[1], call.x.device
    ranks, local, length = sizes.world_size, sizes.local, sizes.world_size * sizes.slots
    workspace, returned = _workspaces(call)
    results = returned.data.address
    entries = torch.empty((local, length), dtype=torch.int32, device=device)
    counts = torch.empty(local + 1, dtype=torch.int32, device=device)
    # Each slot of each rank may name an expert of this rank.
    active = torch.empty((length, sizes.ffn), dtype=dtype, device=device)
    scales_at = active_scales = None
    operand = active
    if call.is_float8:
        scales_at = rows_at(sizes) + ranks * sizes.tokens * sizes.hidden
        operand = torch.empty(active.shape, dtype=call.w_in.dtype, device=device)
        shape = length, sizes.ffn // SCALE_BLOCK
        active_scales = torch.empty(shape, dtype=torch.float32, device=device)
    x, experts = call.x.contiguous(), call.experts.contiguous()
    w_in, w_out, in_order, out_order, b_in, b_out = call.parameters.readable()
    in_scale, out_scale = call.weight_scales or (None, None)
    weight_itemsize = call.w_in.dtype.itemsize
    align = alignment(weight_itemsize, sizes.hidden)
    ffn_align = alignment(weight_itemsize, sizes.ffn)
    pieces = sizes.tokens * ceil_div(sizes.hidden, columns(sizes.hidden))
    sending = senders(sizes.tokens, sizes.hidden, config)
    along_k = in_order.along_k and out_order.along_k
    programs = config.programs or resident_programs(
        config, weight_itemsize, device, along_k=along_k
    )
    programs = min(programs, MAX_PROGRAMS // 2)
    adders = min(pieces, config.sum_programs, MAX_PROGRAMS // 2)
    shared = {
        "entries": entries,
        "counts": counts,
        "epochs": workspace.epochs,
        "ctx": group.context(WORKSPACE),
        "call": call.mark,
        "L": local,
        "hidden_groups": sizes.hidden // align,
    }

    # The products look through no slots, and must not be compiled anew for each number of them.
    shares = kernels.Shares(programs, columns(sizes.hidden), sizes.top_k, align, ffn_align, slots=0)
    block = min(next_power_of_2(max(length, 16)), _MOST_SLOTS)
    gather = Launch(
        kernels.gather_tokens,
        (sending + local,),
        {
            **shared,
            "x": x,
            "experts": experts,
            "landing": workspace.data.address,
            "signals": workspace.signals.address,
            "half": workspace.half_bytes,
            "rows_at": rows_at(sizes),
            "tokens": sizes.tokens,
            "scales_at": scales_at,
        },
        {
            "WORLD_SIZE": ranks,
            "DTYPE": triton_dtype(dtype),
            "SHARES": shares._replace(programs=sending, slots=block),
            "num_warps": 4,
        },
    )
    tiling = Tiling(
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        group_m=1,
        descriptors=False,
        w_along_k=True,
    )

    def tiles(order: layout.Order, inner: int) -> kernels.DecodeTiling:
        """Return how the product with a weight of this order in memory is cut into tiles."""
        return kernels.DecodeTiling(
            tiling._replace(w_along_k=order.along_k),
            config.tail,
            inner % config.block_k == 0,
            next_power_of_2(max(local, 2)),
        )

    products = {
        "DTYPE": triton_dtype(dtype),
        "SHARES": shares,
        "num_warps": config.num_warps,
        "num_stages": _stages(config, weight_itemsize, device),
    }
    first = Launch(
        kernels.decode_first_gemm,
        (programs,),
        {
            **shared,
            "weights": w_in.data_ptr(),
            "weight_scales": in_scale,
            "bias": b_in,
            "active": active.data_ptr(),
            "landing": workspace.data.address,
            "half": workspace.half_bytes,
            "rows_at": rows_at(sizes),
            "scales_at": scales_at,
            "length": length,
            "ffn_groups": sizes.ffn // ffn_align,
        },
        {**products, "TILES": tiles(in_order, sizes.hidden), "FORM": call.form},
        (w_in, active),
    )
    second = Launch(
        kernels.decode_second_gemm,
        (programs + adders,),
        {
            **shared,
            "weights": w_out.data_ptr(),
            "weight_scales": out_scale,
            "bias": b_out,
            "active": operand.data_ptr(),
            "active_scales": active_scales,
            "experts": experts,
            "scales": call.weights.contiguous(),
            "y": y,
            "results": results,
            "signals": workspace.signals.address,
            "length": length,
            "tokens": sizes.tokens,
            "ffn_groups": sizes.ffn // ffn_align,
        },
        {**products, "WORLD_SIZE": ranks, "TILES": tiles(out_order, sizes.ffn)},
        (w_out, operand, active_scales),
    )
    if active_scales is None:
        return [gather, first, second]
    quantise = quantising(active, operand, active_scales, counts[:local])
    return [gather, first, quantise, second]


def quantising(
    values: torch.Tensor,
    float8: torch.Tensor,
    scales: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> Launch:
    """Return the launch that turns ``values`` into ``float8`` with a scale for each block of a row.

    Args:
        values: ``[rows, width]`` of 16 bits, contiguous; the width is a multiple of 128.
        float8: ``[rows, width]`` of float8_e4m3fn.
        scales: float32 ``[rows, width / 128]``.
        counts: int32, on the device: the sum of these is the number of rows that there are, the
            first ones; None for all.
    """
    from interlace.gemm.kernels.float8 import quantise

    rows, width = values.shape
    piece = columns(width)
    programs = _QUANTISERS * processors(values.device) if values.is_cuda else 2
    count = 0 if counts is None else len(counts)
    arguments = {
        "values": values,
        "counts": counts,
        "words": float8.view(torch.int32),
        "scales": scales,
        "rows": rows,
        "L": count,
        "width": width,
    }
    grid = (max(1, min(rows * ceil_div(width, piece), programs)),)
    constants = {"COLS": piece, "LANES": next_power_of_2(max(count, 2)), "num_warps": 4}
    return Launch(quantise, grid, arguments, constants)
