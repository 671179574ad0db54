"""Tiles of a matrix product, for the kernels of the operators around one."""

import triton
import triton.language as tl

import interlace.language as il


@triton.jit
def tile_place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile among ``tiles_m x tiles_n``: ``GROUP_M`` rows at a time, so that
    neighbours share operands in the L2.
    """
    width = GROUP_M * tiles_n
    first = tile // width * GROUP_M
    # A tile beyond the last one is nobody's, but has a place
    height = tl.maximum(tl.minimum(tiles_m - first, GROUP_M), 1)
    return first + tile % width % height, tile % width // height


@triton.jit
def multiply_tile(
    x, w, row, column, rows, N, K, x_stride, w_stride,
    DESCRIPTORS: tl.constexpr, W_ALONG_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, w_first=0,
):  # fmt: skip
    """``x[row :] @ w[column :].T``, float32 ``[BLOCK_M, BLOCK_N]``.

    Args:
        x, w: tensor descriptors (``DESCRIPTORS``), or pointers.
        rows: of x; rows of the result beyond them are anything.
        x_stride, w_stride: elements between two rows of x, and two rows (``W_ALONG_K``) or columns
            of w.
        w_first: where K begins in a descriptor of several weights, one behind the other, if not
            ``W_ALONG_K``.
    """
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if DESCRIPTORS:
        for k in range(0, K, BLOCK_K):
            left = x.load([row, k])
            right = w.load([column, k]).T if W_ALONG_K else w.load([w_first + k, column])
            total = tl.dot(left, right, total, input_precision=PRECISION)
    else:
        m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        lines = x + m.to(tl.int64)[:, None] * x_stride
        columns = w + n.to(tl.int64)[None, :] * (w_stride if W_ALONG_K else 1)
        for k in range(0, K, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K)
            left = tl.load(lines + inner[None, :], mask=(m < rows)[:, None] & (inner < K)[None, :], other=0.0)
            step = inner[:, None] if W_ALONG_K else inner.to(tl.int64)[:, None] * w_stride
            right = tl.load(columns + step, mask=(inner < K)[:, None] & (n < N)[None, :], other=0.0)
            if PRECISION == "upcast":
                total += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
            else:
                total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def multiply_tile_of(
    which, x, w, row, column, rows, N, K, x_stride, w_stride,
    DESCRIPTORS: tl.constexpr, W_ALONG_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """:func:`multiply_tile` by one of several weights, which lie one behind the other."""
    # The next weight's rows beyond N are columns of the result that are nobody's; beyond K they
    # meet zeros of x
    if DESCRIPTORS:
        return multiply_tile(
            x, w, row, which * N + column if W_ALONG_K else column, rows, N, K, x_stride, w_stride,
            True, W_ALONG_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, which * K,
        )  # fmt: skip
    else:
        return multiply_tile(
            x, w + which.to(tl.int64) * (N if W_ALONG_K else K) * w_stride, row, column, rows, N, K,
            x_stride, w_stride, False, W_ALONG_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def scale_tile(total, x_scale, w_scale, row, column, rows, N, x_scale_stride, w_scale_stride):
    """A product of float8 operands times their scales: one a row of each operand, or one in all
    (stride 0).
    """
    m, n = row + tl.arange(0, total.shape[0]), column + tl.arange(0, total.shape[1])
    left = tl.load(x_scale + m * x_scale_stride, mask=m < rows, other=0.0)
    right = tl.load(w_scale + n * w_scale_stride, mask=n < N, other=0.0)
    return total * left[:, None] * right[None, :]


@triton.jit
def add_bias(total, bias, column, N):
    n = column + tl.arange(0, total.shape[1])
    return total + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def start_in_turn(spread_ns):
    """Let programs begin one after another, over ``spread_ns``.

    Programs in step finish their tiles at the same time; the links are then crowded, and idle until
    the next tiles. Those of the lowest index, which have most tiles if any have more, begin first.
    """
    lanes = tl.arange(0, 32)
    start = tl.max(il.clock_ns(lanes), 0)
    while tl.max(il.clock_ns(lanes), 0) - start < spread_ns.to(tl.int64) * tl.program_id(0) // tl.num_programs(0):
        pass
