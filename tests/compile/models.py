"""Models as their authors write them: a Llama block, and a layer of experts. Nothing in them knows
of Interlace.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from interlace.comm import default_device_type

WIDTH, HEADS, HIDDEN = 16, 2, 24


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        return self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )


class FeedForward(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=bias), nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """``[batch, sequence, width]``."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(bias), FeedForward(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def parallel_block(sequence_parallel: bool, bias: bool) -> Block:
    """Sharded by PyTorch's own plans."""
    torch.manual_seed(3)
    device = default_device_type()
    block = Block(bias).to(device)
    columns = {f"attention.w{name}": ColwiseParallel() for name in "qkv"} | {
        f"feed_forward.w{n}": ColwiseParallel() for n in "13"
    }
    out = Shard(1) if sequence_parallel else Replicate()
    plan = columns | {
        name: RowwiseParallel(output_layouts=out) for name in ("attention.wo", "feed_forward.w2")
    }
    if sequence_parallel:
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": gather,
            "feed_forward": gather,
        }
    return parallelize_module(block, init_device_mesh(device, (dist.get_world_size(),)), plan)


class Experts(nn.Module):
    """Experts on each rank, the best for each token, and room for as many tokens from each rank as
    it has. ``[tokens, width]``.
    """

    def __init__(self, experts: int, separate: bool = False) -> None:
        """``separate``: gate and up are two products."""
        super().__init__()
        self.ranks, self.experts = dist.get_world_size(), experts  # a rank
        torch.manual_seed(5)
        self.router = nn.Linear(WIDTH, self.ranks * experts, bias=False)
        torch.manual_seed(6 + dist.get_rank())
        w_in, w_out = (
            torch.randn(experts, *shape) / WIDTH for shape in ((2 * HIDDEN, WIDTH), (WIDTH, HIDDEN))
        )
        self.w_in = (
            nn.ParameterList(half.clone() for half in w_in.chunk(2, 1))
            if separate
            else nn.ParameterList([w_in])
        )
        self.w_out = nn.Parameter(w_out)
        self.to(default_device_type())

    def exchanged(self, rows: torch.Tensor) -> torch.Tensor:
        splits = [rows.shape[0] // self.ranks] * self.ranks
        return funcol.all_to_all_single_autograd(rows, splits, splits, dist.group.WORLD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)
        # [experts of all, tokens, width]
        sent = x * F.one_hot(expert, self.ranks * self.experts).t()[..., None].to(x.dtype)
        arrived = self.exchanged(sent.flatten(0, 1)).view(self.ranks, self.experts, len(x), WIDTH)
        rows = arrived.transpose(0, 1).flatten(1, 2)  # [experts, tokens of all, width]
        gate, up = torch.cat([torch.bmm(rows, w.mT) for w in self.w_in], -1).chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, self.w_out.mT)
        back = self.exchanged(y.unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 2))
        return weight[:, None] * back.unflatten(0, (-1, len(x))).sum(0)
