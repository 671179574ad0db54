"""Products of few rows by a kernel of our own, in place of cuBLAS.

Such a product takes the time of reading its weight. The kernel has enough of the weight under way
to read it as fast as the memory allows, and takes several weights at once, so that small ones do
not leave most of a GPU idle. It also adds up every element in one order whatever the number of rows
is, as cuBLAS does not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.launching.kernels import (
    Launch,
    capability,
    describe_matrix,
    known_factor,
    triton_dtype,
)
from interlace.comm.runtime.interpreter import require
from interlace.errors import ArgumentError
from interlace.gemm.invariance import has_one_arithmetic
from interlace.gemm.launch import moves_tiles, row_stride, scale_stride
from interlace.gemm.operands import contiguous_dimension, is_aligned
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.tuning.configuration import Configuration, between, power_of_two
from interlace.tuning.gpu import Gpu
from interlace.units import ceil_div, next_power_of_2

MOST_WEIGHTS = 3

_MOST_ROWS = 32
_MEASURED_CAPABILITY = (9, 0)
"""Where the kernel was measured to be faster than cuBLAS: on H200s, for so many rows."""


@dataclasses.dataclass(frozen=True)
class FewRowsConfig(Configuration):
    """One way to cut products of few rows into tiles, of which a program has one.

    Attributes:
        rows: Rows of x that a tile covers; a power of two, at least 16, or 1 to multiply one row
            without the matrix unit.
        columns: Rows of the weight, which are columns of the result, that a tile covers; a power of
            two, at least 16 unless ``rows`` is 1.
        block_k: Of K, that a program loads at a time; a power of two, at least 16.
        num_warps: Warps per program.
        num_stages: Loads in flight in the software pipeline.
        weight_first: 1 if the weight is the matrix unit's first operand, whose tiles have at least
            64 rows on Hopper; 0 if x is, as for any weight that is contiguous along N.
    """

    rows: int = power_of_two(16, 1, 1024)
    columns: int = power_of_two(64, 1, 1024)
    block_k: int = power_of_two(128, 16, 1024)
    num_warps: int = power_of_two(4, 1, 32)
    num_stages: int = between(4, 1, 32)
    weight_first: int = between(1, 0, 1)


_SAME_FOR_ALL = FewRowsConfig(64, 64, 32, num_stages=3, weight_first=0)
"""The tiles of all batch-invariant products on GPUs where tiles may change bits."""

_SAME_ON_CPU = FewRowsConfig(columns=32, block_k=32, weight_first=0)


def multiply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    results: Sequence[torch.Tensor],
    config: FewRowsConfig | None = None,
    *,
    is_batch_invariant: bool = False,
    leaves: int = 1,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Compute ``x @ w.T, + bias`` for each weight, in one kernel on the current stream.

    Args:
        x: ``[M, K]``, contiguous along K.
        weights: One to three, ``[N, K]``, of x's dtype; all contiguous along K, or a single one
            along N.
        biases: ``[N]`` for each weight, or None for all.
        results: ``[M, N]`` for each weight, contiguous.
        config: The tiles; default: :func:`default_config`.
        is_batch_invariant: Whether one row must be multiplied as several are.
        leaves: Parts of K whose sums are added in a tree of pairs, rounded to the dtype of the
            results; see :func:`interlace.batch_invariant`.
        scales: ``x_scale`` and ``w_scale`` of float8 operands with a single weight along K, as
            ``Operands`` has them; None for other dtypes.

    Raises:
        ArgumentError: One of several weights is not contiguous along K.
    """
    require(x.device.type)
    from interlace.gemm.kernels.few_rows import multiply_few_rows
    from interlace.gemm.kernels.tiles import Scales

    along_k = all(contiguous_dimension(w) == 1 for w in weights)
    if not along_k and len(weights) > 1:
        raise ArgumentError("several weights must be contiguous along K; copy those that are not.")
    if config is None and is_batch_invariant and not has_one_arithmetic(x.device, x.dtype):
        config = _SAME_FOR_ALL if x.device.type == "cuda" else _SAME_ON_CPU
    elif config is None:
        by_matrix_unit = is_batch_invariant or not along_k
        config = default_config(
            x, sum(map(len, weights)), along_k=along_k, by_matrix_unit=by_matrix_unit
        )
    x_scale = w_scale = None
    in_blocks = False
    if scales is not None:
        x_scale, w_scale = (scale.contiguous() for scale in scales)
        in_blocks = x_scale.dim() == 2
    if in_blocks:
        config = _within_blocks(config, x, weights[0])
    if leaves > 2:
        config = _beside_waiting(config, x)
    # Through descriptors the hardware loads whole tiles, but of aligned rows only.
    is_row = config.rows == 1
    descriptors = not is_row and moves_tiles(x.device) and all(map(is_aligned, (x, *weights)))
    x_block, w_block = [config.rows, config.block_k], [config.columns, config.block_k]
    tiles = [ceil_div(len(w), config.columns) * ceil_div(len(x), config.rows) for w in weights]
    arguments: dict[str, Any] = {
        "x": describe_matrix(x, row_stride(x), x_block, leaves) if descriptors else x,
        "x_stride": row_stride(x),
        "M": len(x),
        "K": x.shape[1],
        "first_1": tiles[0],
        "first_2": sum(tiles[:2]),
        "scales": Scales(x_scale, w_scale, scale_stride(x_scale), scale_stride(w_scale)),
    }
    # The kernel has arguments for three weights; none of its programs is for an absent one.
    for index in range(MOST_WEIGHTS):
        if index > 0 and len(weights) == 1:
            arguments |= {f"{name}_{index}": None for name in ("w", "bias", "y")}
            arguments |= {f"N_{index}": 0, f"stride_{index}": 0}
            continue
        weight_index = min(index, len(weights) - 1)
        w = weights[weight_index] if along_k else weights[weight_index].T
        arguments |= {
            f"w_{index}": (
                _described(w, w_block, along_k, leaves) if descriptors else weights[weight_index]
            ),
            f"bias_{index}": biases[weight_index],
            f"y_{index}": results[weight_index],
            f"N_{index}": len(weights[weight_index]),
            f"stride_{index}": row_stride(w),
        }
    weight_first = bool(config.weight_first) and along_k
    constants = {
        "FIRST": "row" if is_row else "w" if weight_first else "x",
        "TILING": (
            _tiling_of_a_row(x, weights, config)._replace(block_scales=in_blocks)
            if is_row
            else _tiling(config, weight_first, along_k, descriptors, _factor(x, weights))._replace(
                leaves=leaves,
                node=triton_dtype(results[0].dtype).name,
                # Of the operand that comes second where the weight is the first.
                block_scales="" if not in_blocks else "w" if weight_first else "x",
            )
        ),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    with torch.cuda.device(x.device if x.device.type == "cuda" else -1):
        Launch(multiply_few_rows, (sum(tiles),), arguments, constants)()


def _beside_waiting(config: FewRowsConfig, x: torch.Tensor) -> FewRowsConfig:
    """Return tiles beside which several sums wait: as these leave no registers for a second program
    of large tiles, whose loads would be in flight meanwhile, more of the one are.
    """
    if config.rows * config.columns < 128 * 128 or x.device.type == "cpu":
        return config
    return _with_stages(config, 5, Gpu.of(x.device), x.element_size())


def _with_stages(config: FewRowsConfig, most: int, gpu: Gpu, itemsize: int) -> FewRowsConfig:
    """Return tiles with as many loads in flight as a GPU has shared memory for, up to ``most``."""
    stage_bytes = (config.rows + config.columns) * config.block_k * itemsize
    stages = gpu.stages_that_fit(most, stage_bytes, beside=1024)
    return dataclasses.replace(config, num_stages=stages)


def _within_blocks(config: FewRowsConfig, x: torch.Tensor, w: torch.Tensor) -> FewRowsConfig:
    """Return tiles for float8 operands with a scale for each block, whose steps along K, and tiles'
    rows of the weight, are within one.

    The sizes are those that were the fastest of some 20 at 20 shapes on an H200 (decision 0031).
    """
    columns, block_k = min(config.columns, SCALE_BLOCK), min(config.block_k, SCALE_BLOCK)
    if config.rows == 1 or x.device.type == "cpu":
        return dataclasses.replace(config, columns=columns, block_k=block_k)
    rows, (width, inner) = config.rows, w.shape
    if len(x) > 64:
        return FewRowsConfig(128, SCALE_BLOCK, SCALE_BLOCK, 8, 3, weight_first=0)
    processors = Gpu.of(x.device).processors
    is_wide = rows == 64 and ceil_div(width, 64) > 2 * processors
    stages = 6 if inner > 4096 and not is_wide else 4
    return FewRowsConfig(rows, 128 if is_wide else 64, SCALE_BLOCK, 4, stages)


def _tiling(
    config: FewRowsConfig, weight_first: bool, along_k: bool, descriptors: bool, factor: int
) -> Any:
    """Return the tiles of a product by the matrix unit, as a kernel's constant."""
    from interlace.gemm.kernels.tiles import Tiling

    first, second = config.rows, config.columns
    if weight_first:
        first, second = second, first
    return Tiling(
        block_m=first,
        block_n=second,
        block_k=config.block_k,
        group_m=1,
        descriptors=descriptors,
        # x, which is the second operand where the weight is the first, is along K.
        w_along_k=along_k,
        factor=factor,
    )


def _tiling_of_a_row(
    x: torch.Tensor, weights: Sequence[torch.Tensor], config: FewRowsConfig
) -> Any:
    """Return the tiles of one row's product without the matrix unit, as a kernel's constant."""
    from interlace.gemm.kernels.gemv import GemvTiling

    return GemvTiling(
        block_n=config.columns,
        block_b=1,
        block_k=config.block_k,
        even=all(len(w) % config.columns == 0 for w in weights),
        even_k=x.shape[1] % config.block_k == 0,
        word_values=1,
        factor=_factor(x, weights),
    )


def _factor(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """Return what divides the sizes and strides of all operands, as kernels are told it."""
    strides = [row_stride(w if contiguous_dimension(w) == 1 else w.T) for w in weights]
    return known_factor(x.shape[1], row_stride(x), *map(len, weights), *strides)


def _described(w: torch.Tensor, block: list[int], along_k: bool, leaves: int) -> Any:
    """Return a descriptor of a weight ``[N, K]``, or of its transpose ``[K, N]``, whose K is in
    leaves.
    """
    return describe_matrix(
        w, row_stride(w), block if along_k else block[::-1], leaves, int(along_k)
    )


def is_faster(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return whether the kernel multiplies ``x [M, K]`` by ``w [N, K]`` in less time than cuBLAS.

    On an H200 and on an H100 it takes 0.89 to 0.96 of the time at the median of 24 shapes, for up
    to 32 rows (decision 0027). cuBLAS is faster for sums much longer than a weight has rows, which
    it divides among programs, and for rows that do not begin at a multiple of 128 bytes.
    """
    return (
        x.itemsize == 2
        and x.device.type == "cuda"
        and capability(x.device) == _MEASURED_CAPABILITY
        and 0 < len(x) <= _MOST_ROWS
        and 0 < w.shape[1] <= 4 * len(w)
        and w.stride(0) % 64 == 0
        and contiguous_dimension(x) == contiguous_dimension(w) == 1
        and is_aligned(x)
        and is_aligned(w)
    )


def default_config(
    x: torch.Tensor, columns: int, *, along_k: bool = True, by_matrix_unit: bool = False
) -> FewRowsConfig:
    """Return the tiles for ``x [M, K]`` and weights of ``columns`` rows in all.

    Args:
        along_k: Whether the weights are contiguous along K.
        by_matrix_unit: Whether one row must be multiplied as several are.
    """
    rows, inner = x.shape
    if rows == 1 and not by_matrix_unit:
        return FewRowsConfig(1, 4, 1024 // x.element_size(), 1, 1)
    if x.device.type == "cpu":
        return dataclasses.replace(_SAME_ON_CPU, weight_first=int(along_k))
    return tiles_for(Gpu.of(x.device), rows, columns, inner, x.element_size(), along_k)


@functools.lru_cache(maxsize=4096)
def tiles_for(
    gpu: Gpu, rows: int, columns: int, inner: int, itemsize: int, along_k: bool = True
) -> FewRowsConfig:
    """Return the tiles of a product by the matrix unit.

    As many programs as there are processors read a weight at full speed if each has about 160 KB of
    it under way; where there are more programs, several share a processor and have less each. The
    sizes are those that were the fastest at 28 shapes on an H200.

    Args:
        gpu: The GPU.
        rows: Rows of x, M.
        columns: Rows of all weights, N.
        inner: K.
        itemsize: Bytes of an element.
        along_k: Whether the weights are contiguous along K; else x is the first operand.
    """
    config = _tiles(rows, columns, inner, gpu.processors, along_k)
    config = dataclasses.replace(config, block_k=max(16, config.block_k * 2 // itemsize))
    return _with_stages(config, config.num_stages, gpu, itemsize)


def _tiles(
    rows: int, columns: int, inner: int, processor_count: int, along_k: bool
) -> FewRowsConfig:
    """Return the tiles for elements of two bytes and an H200's shared memory."""

    def tiles(height: int, width: int) -> int:
        return ceil_div(rows, height) * ceil_div(columns, width)

    # 1. Few columns: with tiles of 64 columns most processors would be idle.
    if rows > 32 or not along_k:
        for width in (16, 32) if along_k else (16, 32, 64):
            if tiles(64, width) <= processor_count:
                return FewRowsConfig(64, width, 128, num_stages=6, weight_first=0)
        if not along_k:
            return FewRowsConfig(128, 128, 64, 8, 3, weight_first=0)
    # 2. A program for each processor.
    height = min(max(16, next_power_of_2(rows)), 128)
    if rows > 64 and tiles(64, 64) <= processor_count:
        height = 64
    if tiles(height, 64) <= processor_count:
        block_k, stages = {16: (256, 5), 32: (256, 4), 64: (128, 6), 128: (64, 8)}[height]
        return FewRowsConfig(height, 64, block_k, num_stages=stages)
    # 3. More: tiles of 128 columns, as long as K fills their pipelines.
    if height == 128:
        return FewRowsConfig(128, 128, 64, 8, 6 if tiles(128, 128) <= processor_count else 3)
    if tiles(height, 64) <= 2 * processor_count or inner >= 4096:
        return FewRowsConfig(height, 128, 128, 8, 4)
    return FewRowsConfig(height, 64, 64, num_stages=4)
