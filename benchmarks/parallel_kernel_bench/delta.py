"""The recurrence of delta rules, for the solutions that share it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_V = 16


@triton.jit
def delta_kernel(
    q, k, v, decay, beta, out, LENGTH: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DECAY_STRIDE: tl.constexpr,
):  # fmt: skip
    """Go through a head's steps with some columns of its state in registers.

    ``state = decay * state; state += k (v - k state) beta; out = q state``, one program per head
    and ``BLOCK_V`` columns. The decay is a number, or one per key.
    """
    head = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for step in range(LENGTH):
        at = head * LENGTH + step
        key = tl.load(k + at * KEYS + i, mask=i < KEYS, other=0.0)
        query = tl.load(q + at * KEYS + i, mask=i < KEYS, other=0.0)
        value = tl.load(v + at * VALUES + j, mask=j < VALUES, other=0.0)
        if DECAY_STRIDE == 1:
            state *= tl.load(decay + at)
        else:
            state *= tl.load(decay + at * KEYS + i, mask=i < KEYS, other=0.0)[:, None]
        update = (value - tl.sum(key[:, None] * state, 0)) * tl.load(beta + at)
        state += key[:, None] * update[None, :]
        tl.store(out + at * VALUES + j, tl.sum(query[:, None] * state, 0), mask=j < VALUES)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return the outputs ``[batch, steps, heads, values]``, float32.

    Args:
        q, k: ``[batch, steps, heads, keys]``.
        v: ``[batch, steps, heads, values]``.
        decay: As q, or ``[batch, steps, heads]``.
        beta: ``[batch, steps, heads]``.
    """
    by_head = [t.float().transpose(1, 2).contiguous() for t in (q, k, v, decay, beta)]
    (batch, heads, length, keys), values = by_head[0].shape, v.shape[-1]
    out = torch.empty_like(by_head[2])
    delta_kernel[(batch * heads, triton.cdiv(values, BLOCK_V))](
        *by_head, out, LENGTH=length, KEYS=keys, VALUES=values,
        BLOCK_K=triton.next_power_of_2(keys), BLOCK_V=BLOCK_V,
        DECAY_STRIDE=1 if decay.dim() == 3 else keys,
    )  # fmt: skip
    return out.transpose(1, 2)
