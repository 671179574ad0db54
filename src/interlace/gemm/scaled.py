"""Products of float8 operands times their scales, by torch.

A float8 matrix has one scale, one for each row, or one for each block. Blocks of x are 1 x 128 and
those of w 128 x 128, as DeepSeek V3 and the models after it are published: ``x_scale`` is then
``[M, ceil(K / 128)]`` and ``w_scale`` ``[ceil(N / 128), ceil(K / 128)]``.

Source: ``torch.nn.functional.scaled_mm`` of PyTorch 2.11, which is cuBLAS.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from interlace.units import ceil_div, round_up

SCALE_BLOCK = 128
"""Elements of K, and rows of w, that share a scale."""

_ALIGNMENT = 16
"""cuBLAS takes N and K of float8 operands that are multiples of this."""

ROWS_OF_BLOCKS = 4
"""cuBLAS takes rows of x with block scales that are a multiple of this, as they are padded to here,
and reads as many scales of a block of w's rows: with fewer, ``torch._scaled_mm`` reads others
instead and says nothing.
"""

_BLOCK_CAPABILITY = (9, 0)
"""The GPUs on which cuBLAS multiplies by scales of blocks: 10.0 has other ones."""


def has_block_scales(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
) -> bool:
    """Return whether scales are those of blocks, by their shapes.

    A matrix that is one block has one scale, whatever its shape is called.
    """
    if x_scale is None or w_scale is None or not x_scale.dim() == w_scale.dim() == 2:
        return False
    of_x, of_w = block_scale_shapes(x, w)
    is_one = of_w == (1, 1)
    return not is_one and tuple(x_scale.shape) == of_x and tuple(w_scale.shape) == of_w


def has_wide_rows(x_scale: torch.Tensor) -> bool:
    """Return whether a row of x has several scales, which may have any strides."""
    return x_scale.dim() == 2 and x_scale.shape[1] > 1


def kind_of(x_scale: torch.Tensor, w_scale: torch.Tensor) -> Literal["matrix", "row", "block"]:
    """Return of what each scale is, given those of a product."""
    if x_scale.dim() == 2:
        return "block"
    return "matrix" if x_scale.numel() == w_scale.numel() == 1 else "row"


def block_scale_shapes(x: torch.Tensor, w: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of ``x_scale`` and ``w_scale`` for blocks."""
    blocks = ceil_div(x.shape[1], SCALE_BLOCK)
    return (x.shape[0], blocks), (ceil_div(w.shape[0], SCALE_BLOCK), blocks)


def dequantised(matrix: torch.Tensor, scale: torch.Tensor, block_rows: int) -> torch.Tensor:
    """Return float32 ``matrix * scale``.

    Args:
        matrix: ``[rows, K]``, float8.
        scale: ``[1]``, ``[rows]``, or two dimensions for blocks.
        block_rows: Rows of a block: 1 of x, and 128 of w.
    """
    wide = matrix.float()
    if scale.dim() == 1:
        return wide * scale.reshape(-1, 1)
    rows, columns = matrix.shape
    by_row = scale.repeat_interleave(block_rows, 0)[:rows]
    return wide * by_row.repeat_interleave(SCALE_BLOCK, 1)[:, :columns]


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x [rows, K]``, K a multiple of 128, as float8, and the scales of its blocks."""
    blocks = x.float().unflatten(1, (-1, SCALE_BLOCK))
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = blocks.abs().amax(2) / limit
    # A block of zeros has any scale but 0, and so has one of numbers too small for a scale.
    scale = torch.where(scale == 0, 1.0, scale)
    values = (blocks / scale[..., None]).clamp(-limit, limit).flatten(1)
    return values.to(torch.float8_e4m3fn), scale


def multiply_into(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> bool:
    """Compute ``x @ w.T`` times the scales, ``+ bias``, into ``out`` by cuBLAS.

    Args:
        out: ``[M, N]``, with contiguous rows.
        x: ``[M, K]``, float8, with contiguous rows.
        w: ``[N, K]``, float8, contiguous along K.
        x_scale, w_scale: float32: ``[1]``, or ``[M]`` and ``[N]``; or both those of blocks.
        bias: ``[N]`` of out's dtype, or None.

    Returns:
        Whether cuBLAS takes such a product; else nothing was computed.
    """
    kind = kind_of(x_scale, w_scale)
    takes = (
        x.is_cuda
        and len(x) > 0
        and w.shape[0] % _ALIGNMENT == w.shape[1] % _ALIGNMENT == 0
        # Parts of a larger matrix may begin anywhere.
        and all(_is_aligned(matrix) for matrix in (x, w, out))
        # Its results with a scale for each row are bfloat16, and it adds no float32 bias.
        and (out.dtype == torch.bfloat16 or (bias is None and kind != "row"))
    )
    if kind == "block":
        takes = (
            takes
            and torch.version.hip is None
            and torch.cuda.get_device_capability(x.device) == _BLOCK_CAPABILITY
        )
    if not takes:
        return False
    if kind == "block":
        _multiply_blocks_into(out, x, w, x_scale, w_scale, bias)
        return True
    if kind == "matrix":
        x_scale, w_scale = x_scale.reshape(()), w_scale.reshape(())
    else:
        x_scale = _aligned(x_scale.reshape(-1, 1).expand(len(x), 1).contiguous())
        w_scale = _aligned(w_scale.reshape(1, -1).expand(1, len(w)).contiguous())
    # The left operand must be row-major, the right one column-major.
    torch._scaled_mm(x, w.T, x_scale, w_scale, bias=bias, out_dtype=out.dtype, out=out)
    return True


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Return whether rows begin at multiples of 16 bytes, as cuBLAS needs them."""
    row_bytes = matrix.stride(0) * matrix.itemsize
    return matrix.data_ptr() % _ALIGNMENT == row_bytes % _ALIGNMENT == 0


def _aligned(scale: torch.Tensor) -> torch.Tensor:
    """Return a contiguous scale that begins at a multiple of 16 bytes, copied where it does not:
    the scales of a part of x begin where those of the part before it end.
    """
    return scale if scale.data_ptr() % _ALIGNMENT == 0 else scale.clone()


def _multiply_blocks_into(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Compute a product with scales of blocks, which cuBLAS reads along rows of x, and along K of w
    with padding.
    """
    lacking_rows, lacking = (
        round_up(count, ROWS_OF_BLOCKS) - count for count in (len(x), w_scale.shape[1])
    )
    if lacking:
        w_scale = F.pad(w_scale, (0, lacking))
    if lacking_rows:
        # Bytes: torch pads no float8.
        x = F.pad(x.view(torch.uint8), (0, 0, 0, lacking_rows)).view(x.dtype)
        x_scale = F.pad(x_scale, (0, 0, 0, lacking_rows))
        y = out.new_empty([len(x), len(w)])
        _multiply_blocks_into(y, x, w, x_scale, w_scale, bias)
        out.copy_(y[: len(out)])
        return
    torch._scaled_mm_v2(
        x, w.T,
        [_aligned(x_scale.T.contiguous()).T], [F.ScalingType.BlockWise1x128.value], [],
        [_aligned(w_scale.contiguous()).T], [F.ScalingType.BlockWise128x128.value], [],
        bias, out.dtype, out=out,
    )  # fmt: skip
