"""PyTorch's operators of asynchronous tensor parallelism, run by Interlace: one call before the
program, which itself calls ``torch.ops.symm_mem``.

    python examples/integrations/async_tp.py          # two ranks, on GPUs or without

It prints how many calls Interlace took, and checks results and gradients against plain products.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem

import interlace
from interlace.integrations import symm_mem

TOKENS, HIDDEN, INNER = 64, 32, 128


class Mlp(torch.autograd.Function):
    """A sequence-parallel MLP ``reduce_scatter(all_gather(x) @ up @ down)``, written for
    ``torch.ops.symm_mem``.
    """

    @staticmethod
    def forward(ctx, x, up, down, group_name):
        gathered, (hidden,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [up], 0, group_name)
        ctx.save_for_backward(gathered, hidden, up, down)
        ctx.group_name = group_name
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(hidden, down, "sum", 0, group_name)

    @staticmethod
    def backward(ctx, grad):
        gathered, hidden, up, down = ctx.saved_tensors
        grads, (grad_hidden,) = torch.ops.symm_mem.fused_all_gather_matmul(
            grad.contiguous(), [down.T], 0, ctx.group_name
        )
        grad_x = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            grad_hidden, up.T, "sum", 0, ctx.group_name
        )
        return grad_x, gathered.T @ grad_hidden, hidden.T @ grads, None


def worker() -> tuple[float, dict[str, int]]:
    symm_mem.install()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    full = [torch.randn(size, device=device) for size in ((TOKENS, HIDDEN), (HIDDEN, INNER))]
    x, up = (tensor.requires_grad_() for tensor in full)
    down = torch.randn(INNER, HIDDEN, device=device, requires_grad=True)

    expected = x @ up @ down
    expected.square().sum().backward()

    shards = [x.chunk(ranks)[rank], up.chunk(ranks, 1)[rank], down.chunk(ranks)[rank]]
    leaves = [shard.detach().contiguous().requires_grad_() for shard in shards]
    y = Mlp.apply(*leaves, dist.group.WORLD.group_name)
    y.square().sum().backward()

    pairs = [
        (y, expected.chunk(ranks)[rank]),
        (leaves[0].grad, x.grad.chunk(ranks)[rank]),
        (leaves[1].grad, up.grad.chunk(ranks, 1)[rank]),
        (leaves[2].grad, down.grad.chunk(ranks)[rank]),
    ]
    error = max(
        float((found - full).detach().norm() / full.detach().norm()) for found, full in pairs
    )
    return error, dict(symm_mem.calls.taken)


def main() -> None:
    results = interlace.launch(worker, 2)
    print("calls by Interlace:", results[0][1])
    error = max(error for error, _ in results)
    print(f"largest relative difference of results and gradients: {error:.1e}")
    assert error < 1e-3
    assert results[0][1] == {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}


if __name__ == "__main__":
    main()
