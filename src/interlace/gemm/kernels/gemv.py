"""A tile of the product of one rank: its rows and tokens, its operands, its sum.

Nothing here communicates.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.tiles import SCALED, add_product
from interlace.language.tree import add_to_tree


class GemvTiling(NamedTuple):
    """The constants that say how a kernel cuts the product into tiles.

    Attributes:
        block_n: Rows of the weight that a tile covers.
        block_b: Tokens that a tile covers.
        block_k: Columns of the weight that a program loads at a time.
        even: Whether the tiles cover rows and tokens without a remainder.
        even_k: Whether the blocks cover the columns, or those of a leaf, without a remainder.
        word_values: Values in a packed word, 1 or 2.
        round_parts: Whether a part is rounded to the operands' dtype before it travels, as those of
            the operators around a GEMM are.
        factor: Of the operands' sizes and strides; see ``il.multiple_of``.
        leaves, node: As ``Tiling`` has them; of several tokens.
        in_tree: As ``Sending`` has it.
        block_scales: Whether operands are float8 with a scale for each block; of one token.
    """

    block_n: Any
    block_b: Any
    block_k: Any
    even: Any
    even_k: Any
    word_values: Any
    round_parts: Any = False
    factor: Any = 1
    leaves: Any = 1
    node: Any = "fp32"
    in_tree: Any = False
    block_scales: Any = False


class GemvMatrices(NamedTuple):
    """The operands of the product: x ``[B, K]`` and w ``[N, K]``, with their rows' strides."""

    x: Any
    w: Any
    N: Any
    B: Any
    K: Any
    stride_x: Any
    stride_w: Any


class Result(NamedTuple):
    """The output y ``[B, N]`` and the bias ``[N]``, or None, that is added to it."""

    y: Any
    bias: Any
    N: Any
    B: Any


@triton.jit
def matrices_of(x, w, N, B, K, stride_x, stride_w, TILING: tl.constexpr):
    """Return the operands as :class:`GemvMatrices`, with what the compiler should know of them."""
    FACTOR: tl.constexpr = TILING.factor
    return GemvMatrices(
        x, w, il.multiple_of(N, FACTOR), B, il.multiple_of(K, FACTOR),
        il.multiple_of(stride_x, FACTOR), il.multiple_of(stride_w, FACTOR),
    )


@triton.jit
def tile_at(tile, N, B, TILING: tl.constexpr):
    """Return a tile's rows, its tokens and its mask.

    Tiles of the same rows follow one another, so that weights stay in the L2.
    """
    token_tiles = (B + TILING.block_b - 1) // TILING.block_b
    rows = tile // token_tiles * TILING.block_n + tl.arange(0, TILING.block_n)
    tokens = tile % token_tiles * TILING.block_b + tl.arange(0, TILING.block_b)
    return rows, tokens, mask_of(rows, tokens, N, B, TILING)


@triton.jit
def mask_of(rows, tokens, N, B, TILING: tl.constexpr):
    """Return the mask of a tile, ``[rows, tokens]``; all true if tiles are ``even``."""
    if TILING.even:
        return tl.full([rows.shape[0], tokens.shape[0]], 1, tl.int1)
    else:
        return (rows[:, None] < N) & (tokens[None, :] < B)


@triton.jit
def point_to_operands(tile, matrices, TILING: tl.constexpr):
    """Return pointers to a tile's tokens and rows of weights.

    With one token, the columns that are loaded first come with them. Rows and tokens outside the
    matrix repeat the last one; the store of the tile masks them.
    """
    N, B = matrices.N, matrices.B
    rows, tokens, mask = tile_at(tile, N, B, TILING)
    w = matrices.w + tl.minimum(rows, N - 1).to(tl.int64) * matrices.stride_w
    if TILING.block_b == 1:
        x = matrices.x + tl.minimum(tl.sum(tokens), B - 1).to(tl.int64) * matrices.stride_x
        return x, w, _load_last(x, w, matrices.K, TILING)
    else:
        # Triton 3.6 cannot return None in a tuple, so 0 stands for nothing.
        x = matrices.x + tl.minimum(tokens, B - 1).to(tl.int64) * matrices.stride_x
        return x, w, 0


@triton.jit
def multiply_tile(operands, K, TILING: tl.constexpr, scales=None, row=0):
    """Compute this rank's part of a tile, ``sum over k of w[rows, k] * x[tokens, k]``.

    The part is float32 ``[block_n, block_b]``.

    Args:
        scales: With ``TILING.block_scales`` a ``Scales``, and ``row`` the tile's first row of the
            weight.
    """
    x, w, last = operands
    if TILING.block_b == 1:
        part = _one_token(x, w, last, K, TILING, scales, row)
    else:
        part = _several_tokens(x, w, K, TILING)
    if TILING.round_parts:
        part = part.to(x.dtype.element_ty).to(tl.float32)
    return part


@triton.jit
def _one_token(x, w, last, K, TILING: tl.constexpr, scales, row):
    """Compute ``sum over k of w[:, k] * x[k]`` without the matrix unit.

    w is a tile of pointers to rows.
    """
    BLOCK_N: tl.constexpr = TILING.block_n
    BLOCK_K: tl.constexpr = TILING.block_k
    # The remainder of K is used last: kept in registers, it costs no trip to memory of its own.
    # A full block in registers would take registers that other programs need.
    whole = (K - 1) // BLOCK_K * BLOCK_K
    last_value = _scaled(last[1], whole + tl.arange(0, BLOCK_K), K, scales, row, TILING)
    if TILING.even_k:
        accumulator = _multiply(last[0], last_value)
    else:
        accumulator = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for start in range(0, whole, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        value = _scaled(tl.load(x + k), k, K, scales, row, TILING)
        accumulator += _multiply(_load_weight(w, k, K, False), value)
    if not TILING.even_k:
        accumulator += _multiply(last[0], last_value)
    return tl.sum(accumulator, 1)[:, None]


@triton.jit
def _scaled(value, k, K, scales, row, TILING: tl.constexpr):
    """Return a token's elements k, float32, times their scale and that of a row of the weight, if
    these are of blocks.
    """
    value = value.to(tl.float32)
    if TILING.block_scales:
        block, blocks = k // SCALED, (K + SCALED - 1) // SCALED
        of_x = tl.load(scales.x_scale + block, mask=k < K, other=0.0)
        of_w = tl.load(scales.w_scale + row // SCALED * blocks + block, mask=k < K, other=0.0)
        value *= of_x * of_w
    return value


@triton.jit
def _several_tokens(x, w, K, TILING: tl.constexpr):
    """Compute ``sum over k of w[:, k] * x[:, k]`` by the matrix unit.

    x and w are tiles of pointers to rows. With several ``TILING.leaves``, these are added in a tree
    of pairs; see :func:`add_to_tree`.
    """
    BLOCK_K: tl.constexpr = TILING.block_k
    LEAVES: tl.constexpr = TILING.leaves
    k = tl.arange(0, BLOCK_K)
    BLOCK_N: tl.constexpr = TILING.block_n
    BLOCK_B: tl.constexpr = TILING.block_b
    part = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    if LEAVES == 1:
        full_blocks = K if TILING.even_k else K // BLOCK_K * BLOCK_K
        for start in range(0, full_blocks, BLOCK_K):
            part = _add_product(part, x, w, start + k, K, False)
        if not TILING.even_k:
            part = _add_product(part, x, w, full_blocks + k, K, True)
        return part
    else:
        NODE: tl.constexpr = tl.dtype(TILING.node)
        total, ones = part, part.to(NODE)
        twos, fours = ones, ones
        size = K // LEAVES
        steps = (size + BLOCK_K - 1) // BLOCK_K
        # One loop: that of each leaf would wait for its first loads.
        for step in range(LEAVES * steps):
            leaf = step // steps
            first = leaf * size
            inner = first + step % steps * BLOCK_K + k
            part = _add_product(part, x, w, inner, first + size, not TILING.even_k)
            if step % steps == steps - 1:
                total, ones, twos, fours = add_to_tree(part, ones, twos, fours, leaf, LEAVES, NODE)
                part = tl.zeros_like(part)
        return total


@triton.jit
def _load_last(x, w, K, TILING: tl.constexpr):
    """Load the last ``block_k`` columns or fewer of weight and token, before any others."""
    k = (K - 1) // TILING.block_k * TILING.block_k + tl.arange(0, TILING.block_k)
    value = tl.load(x + k) if TILING.even_k else tl.load(x + k, mask=k < K, other=0.0)
    MASKED: tl.constexpr = not TILING.even_k
    return _load_weight(w, k, K, MASKED), value


@triton.jit
def _load_weight(pointers, k, end, MASKED: tl.constexpr):
    # Each weight is used once, so it may leave the caches before anything else does.
    if MASKED:
        return tl.load(
            pointers[:, None] + k[None, :], mask=k[None, :] < end, other=0.0,
            eviction_policy="evict_first",
        )
    else:
        return tl.load(pointers[:, None] + k[None, :], eviction_policy="evict_first")


@triton.jit
def _multiply(weight, value):
    """Multiply by one token and add up eight neighbours within a thread, which saves registers."""
    products = weight.to(tl.float32) * value[None, :]
    return tl.sum(products.reshape([products.shape[0], products.shape[1] // 8, 8]), 2)


@triton.jit
def _add_product(accumulator, x, w, k, end, MASKED: tl.constexpr):
    """Advance one step along K, up to column ``end``, with several tokens, by the matrix unit."""
    weight = _load_weight(w, k, end, MASKED)
    pointers = x[None, :] + k[:, None]
    value = tl.load(pointers, mask=k[:, None] < end, other=0.0) if MASKED else tl.load(pointers)
    return add_product(accumulator, weight, value)


@triton.jit
def store_output(result, total, rows, tokens, mask, ADD_BIAS: tl.constexpr):
    """Store a tile of sums in y, with the bias if ``ADD_BIAS`` and if there is one."""
    if ADD_BIAS and result.bias is not None:
        bias = tl.load(result.bias + tl.minimum(rows, result.N - 1))
        total += bias.to(tl.float32)[:, None]
    pointers = result.y + tokens[None, :].to(tl.int64) * result.N + rows[:, None]
    tl.store(pointers, total.to(result.y.dtype.element_ty), mask=mask)
