"""Layers of experts without their router: tensors, the stock layer, and Interlace."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
from benchmarks.peers.case import Call, Case, Sizes, device, random, ways_of

EXPERT_SIZES: tuple[Sizes, ...] = (
    (4096, 2048, 768, 128, 8), (8192, 2048, 768, 128, 8), (4096, 4096, 14336, 8, 2),
    (4096, 2048, 1408, 64, 6), (512, 2048, 768, 128, 8), (2048, 4096, 14336, 8, 2),
    (4096, 4096, 1536, 128, 8), (8192, 2048, 1408, 64, 6),
)  # fmt: skip
"""Tokens of a rank, hidden and inner width, experts of all ranks, experts of a token."""


def experts(tokens: int, hidden: int, inner: int, count: int, top_k: int) -> Case:
    """A layer of experts with SiLU and a gate, without its router."""
    own = count // dist.get_world_size()
    scores, chosen = torch.randn(tokens, count, device=device()).topk(top_k)
    inputs = SimpleNamespace(
        x=random(tokens, hidden), chosen=chosen, count=count, top_k=top_k,
        # Values that bfloat16 has, as some peers take no others.
        scores=torch.softmax(scores, -1).bfloat16(),
        gate=random(own, inner, hidden, scale=hidden**-0.5),
        up=random(own, inner, hidden, scale=hidden**-0.5),
        down=random(own, hidden, inner, scale=inner**-0.5),
        grad=random(tokens, hidden),
    )  # fmt: skip
    weights, w_in = inputs.scores.float(), torch.stack((inputs.gate, inputs.up), 2).contiguous()
    rows = random(tokens * top_k, hidden)
    # As many rows as a rank has if all experts are chosen equally often.
    ends = (torch.arange(1, own + 1, device=device()) * len(rows) // own).int()

    def alone(i: int) -> torch.Tensor:
        both = torch._grouped_mm(rows, w_in.view(own, 2 * inner, hidden).transpose(1, 2), offs=ends)
        gate, up = both.view(-1, inner, 2).unbind(2)
        return torch._grouped_mm(F.silu(gate) * up, inputs.down.transpose(1, 2), offs=ends)

    def layer(i: int, impl: str) -> torch.Tensor:
        return interlace.mixture_of_experts(
            inputs.x, chosen, weights, w_in, inputs.down, impl=impl
        )  # fmt: skip

    inputs.w_in, inputs.weights = w_in, weights
    pair, ours = (functools.partial(layer, impl=impl) for impl in ("unfused", "auto"))
    return Case(
        _of_experts(inputs, inner), inputs, ways_of(alone, pair, ours), calls=8, settling=12
    )


def experts_both(tokens: int, hidden: int, inner: int, count: int, top_k: int) -> Case:
    """The same with its backward pass: gradients of tokens and of the three weights.

    The stock layer computes gradients one expert after another, as no program does, so it is left
    out, and the peer's are compared with Interlace's.
    """
    case = experts(tokens, hidden, inner, count, top_k)
    inputs = case.inputs
    leaves = [each.detach().requires_grad_() for each in (inputs.x, inputs.w_in, inputs.down)]

    def ours(i: int) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            y = interlace.mixture_of_experts(
                leaves[0], inputs.chosen, inputs.weights, leaves[1], leaves[2]
            )
            x_grad, in_grad, out_grad = torch.autograd.grad(y, leaves, inputs.grad)
        return y.detach(), x_grad, in_grad[:, :, 0], in_grad[:, :, 1], out_grad

    ways: dict[str, Call] = {"Interlace": ours}
    return dataclasses.replace(
        case, ways=ways, reference="Interlace", is_captured=False, calls=4, tolerance=2e-2
    )


def _of_experts(inputs: Any, inner: int) -> str:
    tokens, hidden = inputs.x.shape
    return f"{tokens} tokens, {inputs.count} x {hidden} x {inner}, top {inputs.top_k}"
