"""Residual, norm and cast of some tokens' sums, which programs may share by columns."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.float8 import LARGEST_FLOAT8, clamp_to_float8, scales_of_blocks
from interlace.gemm.kernels.tiles import SCALED
from interlace.language.sizes import next_power_of_2


class NormForm(NamedTuple):
    """The constants that say what is computed.

    Attributes:
        norm: ``"rms"`` or ``"layer"``.
        quantization: ``"none"``, ``"tensor"``, ``"row"`` or ``"block"``; with blocks, a program has
            whole ones.
        sections: Number of programs that share a token's columns.
        factor: Of the columns; see ``il.multiple_of``.
    """

    norm: Any
    quantization: Any
    sections: Any
    factor: Any = 1


class NormInputs(NamedTuple):
    """Hold the operands of the norm after the sums ``[B, N]``: None for those that are absent."""

    bias: Any
    residual: Any
    norm_weight: Any
    norm_bias: Any
    scale: Any
    eps: Any


class NormOutputs(NamedTuple):
    """Pointers to the results: y and the new residual ``[B, N]``, and the scales of rows ``[B]``, or
    of blocks ``[B, ceil(N / 128)]``.
    """

    y: Any
    residual: Any
    scales: Any


class NormPart(NamedTuple):
    """The part of the sums that a program has: some columns of some tokens, ``[columns, tokens]``.

    Attributes:
        columns: int32 ``[columns, 1]``.
        tokens: int32 ``[1, tokens]``.
        inside: Which elements exist, ``[columns, tokens]``.
        section: Number of this program among those that share the tokens.
        N, B: All columns, and all tokens.
    """

    columns: Any
    tokens: Any
    inside: Any
    section: Any
    N: Any
    B: Any


class Meeting(NamedTuple):
    """Words of this rank by which the programs of a token tell each other numbers.

    Attributes:
        words: Pointer to ``[numbers][tokens][sections]`` packed words (rank 0's copy).
        tokens: Number of tokens that there is room for.
        stamp: The call's stamp.
        slice: Number of the awaited slice, for the error.
        group: The value of ``il.join``.
    """

    words: Any
    tokens: Any
    stamp: Any
    slice: Any
    group: Any


@triton.jit
def place_of(section, columns_per_section, first_token, N, B, COLUMNS: tl.constexpr,
             TOKENS: tl.constexpr):
    """Return the place of ``COLUMNS`` columns and ``TOKENS`` tokens."""
    columns = (section * columns_per_section + tl.arange(0, COLUMNS))[:, None]
    tokens = (first_token + tl.arange(0, TOKENS))[None, :]
    return NormPart(columns, tokens, (columns < N) & (tokens < B), section, N, B)


@triton.jit
def load_inputs(inputs, place):
    """Load what a place of the sums needs, before the sums are there.

    Returns:
        What is to be added to the sums, the norm's weight and its bias: float32 tiles, or 0 and 1
        where they are absent.
    """
    exists = place.columns < place.N
    added = tl.zeros(place.inside.shape, tl.float32)
    if inputs.residual is not None:
        offsets = place.tokens.to(tl.int64) * place.N + place.columns
        residual = tl.load(inputs.residual + offsets, mask=place.inside, other=0.0)
        added += residual.to(tl.float32)
    if inputs.bias is not None:
        added += tl.load(inputs.bias + place.columns, mask=exists, other=0.0).to(tl.float32)
    weight = tl.full(place.columns.shape, 1.0, tl.float32)
    if inputs.norm_weight is not None:
        weight = tl.load(inputs.norm_weight + place.columns, mask=exists, other=0.0).to(tl.float32)
    offset = tl.zeros(place.columns.shape, tl.float32)
    if inputs.norm_bias is not None:
        offset = tl.load(inputs.norm_bias + place.columns, mask=exists, other=0.0).to(tl.float32)
    return added, weight, offset


@triton.jit
def norm_and_store(total, loaded, inputs, outputs, place, meeting, FORM: tl.constexpr):
    """Add the residual, normalise, and store both.

    Args:
        total: float32 ``[columns, tokens]``: the sums over ranks; NaN where they did not arrive.
        loaded: The value of :func:`load_inputs`.
        meeting: A :class:`Meeting`; None if one program has all columns.
    """
    added, weight, offset = loaded
    offsets = place.tokens.to(tl.int64) * place.N + place.columns
    residual = (total + added).to(outputs.residual.dtype.element_ty)
    tl.store(outputs.residual + offsets, residual, mask=place.inside)
    # The norm is of what was stored, so that a program that goes on from the residual agrees.
    value = tl.where(place.inside, residual.to(tl.float32), 0.0)
    if FORM.norm == "layer":
        mean = _over_sections(_sum(value), 0, place, meeting, "sum", FORM) / place.N
        value = tl.where(place.inside, value - mean, 0.0)
    square = _over_sections(_sum(value * value), 1, place, meeting, "sum", FORM)
    y = value * tl.rsqrt(square / place.N + inputs.eps) * weight + offset
    if FORM.quantization == "tensor":
        y = y / tl.load(inputs.scale)
    elif FORM.quantization == "row":
        own = tl.max(tl.where(place.inside, tl.abs(y), 0.0), 0)[None, :] + 0.0 * _sum(
            tl.where(place.inside & (y != y), y, 0.0)
        )
        largest = _over_sections(own, 2, place, meeting, "max", FORM)
        # A row of zeros has any scale but 0, and so has one of numbers too small for a scale.
        scale = largest / LARGEST_FLOAT8
        scale = tl.where(scale == 0.0, 1.0, scale)
        if place.section == 0:
            tl.store(outputs.scales + place.tokens, scale, mask=place.tokens < place.B)
        y = y / scale
    elif FORM.quantization == "block":
        y = _scale_blocks(y, outputs, place)
    if FORM.quantization != "none":
        y = il.to_float8(clamp_to_float8(y))
    tl.store(outputs.y + offsets, y.to(outputs.y.dtype.element_ty), mask=place.inside)


@triton.jit
def _scale_blocks(y, outputs, place):
    """Store a scale for each block of columns, and return y divided by them."""
    COLUMNS: tl.constexpr = y.shape[0]
    TOKENS: tl.constexpr = y.shape[1]
    BLOCKS: tl.constexpr = COLUMNS // SCALED
    blocked = tl.reshape(tl.where(place.inside, y, 0.0), [BLOCKS, SCALED, TOKENS])
    scale = scales_of_blocks(blocked, 1)
    all_blocks = (place.N + SCALED - 1) // SCALED
    first = tl.min(place.columns) // SCALED
    block = first + tl.arange(0, BLOCKS)[:, None]
    cells = place.tokens.to(tl.int64) * all_blocks + block
    tl.store(outputs.scales + cells, scale, mask=(block < all_blocks) & (place.tokens < place.B))
    return tl.reshape(blocked / scale[:, None, :], [COLUMNS, TOKENS])


@triton.jit
def _sum(value):
    """Return the sums over columns, ``[1, tokens]``."""
    return tl.sum(value, 0)[None, :]


@triton.jit
def _over_sections(own, number, place, meeting, COMBINE: tl.constexpr, FORM: tl.constexpr):
    """Combine a number of every token over the programs that share its columns.

    Args:
        own: float32 ``[1, tokens]``, of this program's columns.
        number: Which of the numbers of a call this is.
        COMBINE: ``"sum"``, in the order of the columns, or ``"max"`` of numbers that are not
            negative.
    """
    SECTIONS: tl.constexpr = FORM.sections
    if SECTIONS == 1:
        return own
    else:
        me = il.rank(meeting.group)
        line = meeting.words + (number * meeting.tokens + place.tokens).to(tl.int64) * SECTIONS
        exists = place.tokens < place.B
        # The own number goes through memory as well, so that all sections combine the same numbers
        # in the same order. Packed words carry the call's stamp, so they are not cleared between
        # calls.
        il.put_packed(line + place.section, own, meeting.stamp, me, meeting.group, exists)
        part = tl.arange(0, next_power_of_2(SECTIONS))[:, None]
        mask = (part < SECTIONS) & exists
        numbers = il.get_packed(
            line + part, meeting.stamp, me + part * 0, meeting.slice, meeting.group, mask
        )
        if COMBINE == "sum":
            return tl.sum(numbers, 0)[None, :]
        else:
            # A maximum leaves out NaN, which a sum keeps.
            nan = tl.sum(tl.where(numbers != numbers, numbers, 0.0), 0)
            return (tl.max(numbers, 0) + nan)[None, :]
