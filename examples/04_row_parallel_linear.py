"""A tensor-parallel MLP: the second layer is ``interlace.nn.RowParallelLinear``, trained for a step
and checked.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu

import interlace

WIDTH, HIDDEN = 32, 128


def worker() -> tuple[float, float]:
    """Every rank runs this; the result is the relative error of the output and of the weight's
    gradient.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = interlace.group_of().device
    torch.manual_seed(0)  # the same full layers on every rank
    up, down = nn.Linear(WIDTH, HIDDEN, device=device), nn.Linear(HIDDEN, WIDTH, device=device)
    x = torch.randn(2, 3, WIDTH, device=device)  # two sequences of three tokens

    # Each rank has HIDDEN / R hidden features: a slice of up's rows, and of down's columns.
    features = slice(rank * HIDDEN // world_size, (rank + 1) * HIDDEN // world_size)
    down_shard_k = interlace.nn.RowParallelLinear.from_linear(down)
    hidden_shard = gelu(nn.functional.linear(x, up.weight[features], up.bias[features]))
    y = down_shard_k(hidden_shard)  # [2, 3, WIDTH], the same on every rank
    y.square().mean().backward()

    expected = down(gelu(up(x)))
    expected.square().mean().backward()
    if rank == 0:
        print(f"{down}  ->  {down_shard_k}", flush=True)
    return relative(y.detach(), expected.detach()), relative(
        down_shard_k.weight.grad, down.weight.grad[:, features]
    )


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def main() -> None:
    for rank, (output, gradient) in enumerate(interlace.launch(worker, 2)):
        print(
            f"rank {rank}: relative error of y {output:.1e}, of the weight's gradient "
            f"{gradient:.1e}"
        )
        assert max(output, gradient) < 1e-5


if __name__ == "__main__":
    main()
