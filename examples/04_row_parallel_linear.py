"""A tensor-parallel MLP with ``interlace.nn.RowParallelLinear``: one step, checked on all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu

import interlace

WIDTH, HIDDEN = 32, 128


def worker() -> tuple[float, float]:
    """Do one step, and return the relative errors of the output and of the weight's gradient."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = interlace.group_of().device
    # One seed for all ranks, so that every rank has the same full layers.
    torch.manual_seed(0)
    up, down = nn.Linear(WIDTH, HIDDEN, device=device), nn.Linear(HIDDEN, WIDTH, device=device)
    # Two sequences of three tokens.
    x = torch.randn(2, 3, WIDTH, device=device)

    # Each rank has HIDDEN / R hidden features: a slice of the rows of ``up``, and of the columns of
    # ``down``.
    features = slice(rank * HIDDEN // world_size, (rank + 1) * HIDDEN // world_size)
    down_shard_k = interlace.nn.RowParallelLinear.from_linear(down)
    hidden_shard = gelu(nn.functional.linear(x, up.weight[features], up.bias[features]))
    # y [2, 3, WIDTH] is the same on every rank.
    y = down_shard_k(hidden_shard)
    y.square().mean().backward()

    # The full layers on this rank alone.
    expected = down(gelu(up(x)))
    expected.square().mean().backward()
    if rank == 0:
        print(f"{down}  ->  {down_shard_k}", flush=True)
    gradient_error = relative_error(down_shard_k.weight.grad, down.weight.grad[:, features])
    return relative_error(y.detach(), expected.detach()), gradient_error


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of ``expected``."""
    return float((result - expected).norm() / expected.norm())


def main() -> None:
    for rank, (output, gradient) in enumerate(interlace.launch(worker, 2)):
        print(
            f"rank {rank}: relative error of y {output:.1e}, of the weight's gradient "
            f"{gradient:.1e}"
        )
        assert max(output, gradient) < 1e-5


if __name__ == "__main__":
    main()
