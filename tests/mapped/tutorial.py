"""A matrix product as Triton's tutorials write it: it knows nothing of other ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def matmul(x, w, y, M, N, K, x_stride, w_stride, y_stride, BLOCK: tl.constexpr):
    """``y [M, N] = x [M, K] @ w [N, K].T``; a program a tile."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(x + m * x_stride + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        b = tl.load(w + n * w_stride + k[:, None], mask=(n < N) & (k[:, None] < K), other=0.0)
        total = tl.dot(a, b, total)
    tl.store(y + m * y_stride + n, total.to(y.dtype.element_ty), mask=(m < M) & (n < N))


def product(
    x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor, block: int = 64
) -> torch.Tensor:
    """``x @ w.T`` into ``out``, whose rows may be any distance apart."""
    (m, k), n = x.shape, len(w)
    grid = (triton.cdiv(m, block), triton.cdiv(n, block))
    matmul[grid](x, w, out, m, n, k, x.stride(0), w.stride(0), out.stride(0), BLOCK=block)
    return out
