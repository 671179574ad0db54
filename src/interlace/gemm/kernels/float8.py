"""Numbers that become float8 with a scale for each block of them."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.tiles import SCALED

LARGEST_FLOAT8 = tl.constexpr(448.0)  # of float8_e4m3fn


@triton.jit
def scales_of_blocks(blocked, AXIS: tl.constexpr):
    """Return the scale of each block of float32 numbers, which lies along one axis: the block's
    largest number becomes the largest float8. A block with NaN has the scale NaN.
    """
    # A maximum of numbers leaves out NaN. As integers, without the sign, they are in the same
    # order, and NaN is above infinity.
    magnitude = blocked.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale = tl.max(magnitude, AXIS).to(tl.float32, bitcast=True) / LARGEST_FLOAT8
    # A block of zeros has any scale but 0, and so has one of numbers too small for a scale.
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def clamp_to_float8(value):
    """Return float32 numbers within the range of float8; NaN stays."""
    # A comparison with NaN is false.
    value = tl.where(value > LARGEST_FLOAT8, LARGEST_FLOAT8, value)
    return tl.where(value < -LARGEST_FLOAT8, -LARGEST_FLOAT8, value)


@triton.jit
def quantise_rows(value):
    """Divide rows ``[rows, columns]`` by a scale for each 128 columns.

    Returns:
        The rows in the range of float8, float32, and the scales, float32 ``[rows, columns / 128]``.
    """
    ROWS: tl.constexpr = value.shape[0]
    COLUMNS: tl.constexpr = value.shape[1]
    blocked = tl.reshape(value.to(tl.float32), [ROWS, COLUMNS // SCALED, SCALED])
    scale = scales_of_blocks(blocked, 2)
    return clamp_to_float8(tl.reshape(blocked / scale[:, :, None], [ROWS, COLUMNS])), scale


@triton.jit
def words_of_float8(value):
    """Round ``[rows, columns]`` in the range of float8 to it, and return four columns in a word:
    int32 ``[rows, columns / 4]``.

    Words are stored in one piece: Triton 3.6 stores tiles of single bytes wrongly where a thread
    does not store what it has computed.
    """
    ROWS: tl.constexpr = value.shape[0]
    COLUMNS: tl.constexpr = value.shape[1]
    octets = il.to_float8(value).to(tl.uint8, bitcast=True).to(tl.int32)
    low, high = tl.split(tl.reshape(octets, [ROWS, COLUMNS // 2, 2]))
    low, high = tl.split(tl.reshape(low | (high << 8), [ROWS, COLUMNS // 4, 2]))
    return low | (high << 16)


@triton.jit(do_not_specialize=["rows", "L"])
def quantise(
    values, counts, words, scales, rows, L, width, COLS: tl.constexpr, LANES: tl.constexpr,
):
    """Turn ``values [rows, width]`` into float8 ``words [rows, width / 4]``, four numbers in each,
    and their ``scales [rows, width / 128]``.

    Args:
        counts: Of ``L`` experts' rows, which lie one behind the other, those that there are; None
            for all ``rows``.
        COLS: The columns that a program takes at a time.
        LANES: A power of two from ``L`` on.

    **Protocol.** No peer takes part.

    **Example.** A row of 128 numbers up to 2 gets the scale 2 / 448.
    """
    total = rows
    if counts is not None:
        lanes = tl.arange(0, LANES)
        total = tl.sum(tl.load(counts + lanes, mask=lanes < L, other=0))
    width = il.multiple_of(width, SCALED)
    pieces = (width + COLS - 1) // COLS
    for task in range(tl.program_id(0), total * pieces, tl.num_programs(0)):
        first = width.to(tl.int64) * (task // pieces)
        column = task % pieces * COLS + tl.arange(0, COLS)
        value = tl.load(values + first + column, mask=column < width, other=0.0)
        quantised, scale = quantise_rows(value[None, :])
        word = task % pieces * (COLS // 4) + tl.arange(0, COLS // 4)
        tl.store(words + first // 4 + word, tl.ravel(words_of_float8(quantised)), word < width // 4)
        block = task % pieces * (COLS // SCALED) + tl.arange(0, COLS // SCALED)
        tl.store(scales + first // SCALED + block, tl.ravel(scale), mask=block < width // SCALED)
