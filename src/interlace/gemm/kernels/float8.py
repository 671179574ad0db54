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
    # A maximum leaves out NaN, which a sum keeps.
    nan = tl.sum(tl.where(blocked != blocked, blocked, 0.0), AXIS)
    scale = (tl.max(tl.abs(blocked), AXIS) + nan) / LARGEST_FLOAT8
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
