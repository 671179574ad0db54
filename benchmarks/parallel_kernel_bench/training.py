"""A step of training, for the solutions that share it: gradients, and Adam in one launch with the
sum of the gradients before it and the gather of the weights behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

import interlace.language as il
from benchmarks.parallel_kernel_bench.exchange import (
    DTYPES,
    begin,
    move,
    programs_for,
    received,
    replayed,
    run,
)


def gradients(x: torch.Tensor, y: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradients of a squared error of two layers, as one vector.

    Args:
        x, y: Inputs and targets of this rank.
        params: Weight and bias of the first layer, and those of the second.
    """
    w1, b1, w2, b2 = params
    hidden = F.relu(F.linear(x, w1, b1))
    out = F.linear(hidden, w2, b2)
    d_out = torch.ops.aten.mse_loss_backward(out.new_ones(()), out, y, 1)
    d_hidden = torch.ops.aten.threshold_backward(d_out @ w2, hidden, 0)
    parts = d_hidden.T @ x, d_hidden.sum(0), d_out.T @ hidden, d_out.sum(0)
    return torch.cat([part.flatten() for part in parts])


def unflattened(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the parts of a vector as tensors of these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(*shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def broadcast(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rank 0's tensors as one vector."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sizes, strides = (1, 1, flat.numel()), (0, 0, 0)
    return move(flat, torch.empty_like(flat), sizes, strides, strides, root=0)


@triton.jit(do_not_specialize=["data", "signals", "mark", "half"])
def adam_kernel(
    grad, weight, m, v, weight_out, m_out, v_out, lr, beta1, beta2, eps, decay, bc1, bc2,
    data, signals, epochs, ctx, mark, half,
    COUNT: tl.constexpr, SUM: tl.constexpr, CUT: tl.constexpr, GATHER: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Update ``COUNT`` weights.

    With SUM the gradient is the mean over the ranks; with CUT each rank has gradients for all
    ranks' parts, one part after another. With GATHER ``weight_out`` gets all ranks' weights.
    """
    epoch, stamp, group, me, half_at, flags = begin(
        data, signals, epochs, ctx, mark, half, WORLD_SIZE
    )
    slots = il.pointer(half_at, DTYPE)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(grad + (me * COUNT if CUT else 0) + i, mask=i < COUNT, other=0.0)
    g = own.to(tl.float32)
    if SUM:
        for step in tl.static_range(1, WORLD_SIZE):
            peer = (me + step) % WORLD_SIZE
            part = tl.load(grad + (peer * COUNT if CUT else 0) + i, mask=i < COUNT)
            il.put(slots + me * COUNT + i, part, peer, group, i < COUNT)
        arrived = il.barrier(flags, stamp, group, WORLD_SIZE)
        g = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(WORLD_SIZE):
            g += received(slots, i, own, arrived, source, me, group, COUNT, i < COUNT)
        g /= WORLD_SIZE
    first = tl.load(m + i, mask=i < COUNT, other=0.0).to(tl.float32) * beta1 + g * (1 - beta1)
    second = tl.load(v + i, mask=i < COUNT, other=0.0).to(tl.float32) * beta2 + g * g * (1 - beta2)
    w = tl.load(weight + i, mask=i < COUNT, other=0.0).to(tl.float32)
    w = w - lr * (first / bc1 / (tl.sqrt(second / bc2) + eps) + decay * w)
    tl.store(m_out + i, first, mask=i < COUNT)
    tl.store(v_out + i, second, mask=i < COUNT)
    tl.store(weight_out + (me * COUNT if GATHER else 0) + i, w, mask=i < COUNT)
    if GATHER:
        landing = slots + WORLD_SIZE * COUNT + i
        for step in tl.static_range(1, WORLD_SIZE):
            peer = (me + step) % WORLD_SIZE
            il.put(landing + me * COUNT, w.to(DTYPE), peer, group, i < COUNT)
        more_flags = flags + tl.num_programs(0) * 2 * WORLD_SIZE
        complete = il.barrier(more_flags, stamp, group, WORLD_SIZE).to(tl.int32)
        for step in tl.static_range(1, WORLD_SIZE):
            source = (me + step) % WORLD_SIZE
            value = il.nan_unless(complete, il.get(landing + source * COUNT, me, group, i < COUNT))
            tl.store(weight_out + source * COUNT + i, value, mask=i < COUNT)
    il.advance_epoch(epochs, epoch)


def adam(
    grad: torch.Tensor, weight: torch.Tensor, m: torch.Tensor, v: torch.Tensor,
    numbers: tuple[Any, ...], *, summed: bool, gather: bool, decay: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the weights, and the first and second moments after a step of Adam.

    Args:
        grad: The gradients of as many weights as ``weight`` has, or of all ranks' weights.
        weight, m, v: Vectors of one dtype.
        numbers: Learning rate, both betas, epsilon, and the number of the step, from 1.
        summed: The gradient is the mean over the ranks.
        gather: Return the weights of all ranks, one rank's after another's.
        decay: What the weight is multiplied by and added to the step.
    """
    lr, beta1, beta2, eps, step = numbers
    count, ranks = weight.numel(), dist.get_world_size()
    programs, block = programs_for(count, weight.element_size())
    new = (
        weight.new_empty(count * ranks if gather else count),
        m.new_empty(count),
        v.new_empty(count),
    )
    run(
        adam_kernel, programs, 2 * ranks * count * weight.element_size(), grad, weight, m, v, *new,
        float(lr), float(beta1), float(beta2), float(eps), float(decay), 1.0 - beta1**step,
        1.0 - beta2**step, COUNT=count, SUM=summed, CUT=grad.numel() > count, GATHER=gather,
        BLOCK=block, DTYPE=DTYPES[weight.dtype],
    )  # fmt: skip
    return new


@replayed
@torch.no_grad()
def sharded_step(
    X_local: Tensor, y_local: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor,
    exp_avg_part: Tensor, exp_avg_sq_part: Tensor, lr: float, beta1: float, beta2: float,
    eps: float, step: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the weights after a step of Adam, and the moments that this rank keeps: gradients go
    to the ranks that need them and new weights back to all, in one launch.
    """
    params = [W1, b1, W2, b2]
    shapes, flat = [param.shape for param in params], broadcast(params)
    grad = gradients(X_local, y_local, unflattened(flat, shapes))
    weight = flat.chunk(dist.get_world_size())[dist.get_rank()]
    numbers = lr, beta1, beta2, eps, step
    moments = exp_avg_part, exp_avg_sq_part
    flat, m, v = adam(grad, weight, *moments, numbers, summed=True, gather=True)
    return *unflattened(flat, shapes), m, v
