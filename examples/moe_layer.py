"""A mixture-of-experts layer, its experts shared out over ranks: equal to one device's computation,
forward and backward.

Tiny without arguments, and on a CPU. Mixtral's layer on four GPUs, with times:

    python examples/moe_layer.py --world-size 4 --hidden 4096 --ffn 14336 --tokens 4096 --dtype
    bfloat16 --times
"""

from __future__ import annotations

import os
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer

import interlace


def worker(
    hidden: int, ffn: int, experts: int, top_k: int, tokens: int, dtype: str, times: bool
) -> tuple[dict[str, float], ...]:
    """Every rank runs this: relative errors of y and of every gradient; and, if ``times``,
    microseconds.
    """
    device, rank = interlace.group_of().device, dist.get_rank()
    layer = interlace.nn.MoE(
        hidden, ffn, experts, top_k, device=device, dtype=getattr(torch, dtype)
    )
    generator = torch.Generator(device).manual_seed(1 + rank)  # tokens of this rank
    x = (
        torch.randn(tokens, hidden, generator=generator, device=device)
        .to(layer.w_in.dtype)
        .requires_grad_()
    )
    upstream = torch.randn(tokens, hidden, generator=generator, device=device).to(x.dtype)
    y, routing = layer(x)
    y.backward(upstream)
    found = {
        "y": y,
        "x": x.grad,
        "w_in": layer.w_in.grad,
        "w_out": layer.w_out.grad,
        "router": layer.router.weight.grad,
    }

    # The same on one device, with the tokens and the experts of all ranks.
    every = [
        everyone(each.detach()).requires_grad_()
        for each in (x, routing.weights, layer.w_in, layer.w_out)
    ]
    every_x, every_weight, w_in, w_out = every
    chosen = everyone(routing.experts)
    total = torch.zeros(every_x.shape, device=device)
    for expert in range(experts):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        row = F.silu(every_x[token] @ w_in[expert, :, 0].T) * (
            every_x[token] @ w_in[expert, :, 1].T
        )
        total = total.index_add(
            0, token, (row @ w_out[expert].T).float() * every_weight[token, slot, None]
        )
    total.backward(everyone(upstream).float())
    tokens_here, experts_here = (
        slice(rank * count, (rank + 1) * count) for count in (tokens, len(layer.w_in))
    )
    layer.router.zero_grad()
    again = x.detach().requires_grad_()
    layer.route(again).weights.backward(every_weight.grad[tokens_here])
    expected = {
        "y": total[tokens_here],
        "x": every_x.grad[tokens_here] + again.grad,
        "w_in": w_in.grad[experts_here],
        "w_out": w_out.grad[experts_here],
        "router": layer.router.weight.grad,
    }
    return {name: relative(found[name], expected[name]) for name in found}, (
        measured(layer, x, upstream) if times else {}
    )


def everyone(mine: torch.Tensor) -> torch.Tensor:
    """All ranks' rows, one after the other."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return torch.cat(parts)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


def measured(layer: interlace.nn.MoE, x: torch.Tensor, upstream: torch.Tensor) -> dict[str, float]:
    """Mean microseconds of ten calls, fused and unfused, forward alone and with the backward pass;
    of this rank's GPU.
    """
    found = {}
    for impl in ("fused", "unfused"):
        layer.impl = impl
        for name, step in (
            ("forward", lambda: forward(layer, x)),
            ("forward and backward", lambda: layer(x)[0].backward(upstream)),
        ):
            for _ in range(3):
                step()
            dist.barrier()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(10):
                step()
            end.record()
            torch.cuda.synchronize()
            found[f"{impl}, {name}"] = 100 * start.elapsed_time(end)
    return found


@torch.no_grad()
def forward(layer: interlace.nn.MoE, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]


def main(
    hidden: Annotated[int, typer.Option(help="Width of a token.")] = 32,
    ffn: Annotated[int, typer.Option(help="Width of an expert's inner layer.")] = 56,
    experts: Annotated[int, typer.Option(help="Experts of all ranks.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts a token.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of each rank.")] = 12,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "float32",
    world_size: Annotated[
        int | None, typer.Option("--world-size", "-n", help="Ranks; default: torchrun's, or 2.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    times: Annotated[bool, typer.Option("--times", help="Measure as well, on GPUs.")] = False,
) -> None:
    """Run one layer of Mixtral's shape on all ranks, and check it."""
    if times and not torch.cuda.is_available():
        raise typer.BadParameter("--times needs GPUs; no time measured on a CPU means anything.")
    ranks = world_size or int(os.environ.get("WORLD_SIZE", "2"))
    limit = {"float32": 1e-5}.get(dtype, 0.03)
    for rank, (errors, clocked) in enumerate(
        interlace.launch(
            worker, ranks, hidden, ffn, experts, top_k, tokens, dtype, times, backend=backend
        )
    ):
        print(
            f"rank {rank}: relative errors",
            ", ".join(f"{name} {error:.1e}" for name, error in errors.items()),
        )
        for name, microseconds in clocked.items():
            print(f"rank {rank}: {name}: {microseconds:.0f} us")
        assert max(errors.values()) < limit, errors


if __name__ == "__main__":
    typer.run(main)
