r"""A mixture-of-experts layer with experts on several ranks, checked against one device.

Without arguments the layer is tiny, and runs on a CPU, too. Mixtral's layer on four GPUs, with
times::

    python examples/moe_layer.py --world-size 4 --hidden 4096 --ffn 14336 --tokens 4096 \
        --dtype bfloat16 --times
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
    """Run the layer on this rank, forward and backward, and check it.

    Returns:
        Relative errors of y and of every gradient; and, with ``times``, times in microseconds.
    """
    device, rank = interlace.group_of().device, dist.get_rank()
    layer = interlace.nn.MoE(
        hidden, ffn, experts, top_k, device=device, dtype=getattr(torch, dtype)
    )
    # Every rank has tokens of its own.
    generator = torch.Generator(device).manual_seed(1 + rank)
    x = (
        torch.randn(tokens, hidden, generator=generator, device=device)
        .to(layer.w_in.dtype)
        .requires_grad_()
    )
    upstream = torch.randn(tokens, hidden, generator=generator, device=device).to(x.dtype)
    y, routing = layer(x)
    y.backward(upstream)
    # The router has seen this rank's tokens, and the experts those of all ranks. The loss is the
    # sum of the ranks' losses.
    interlace.nn.sum_replicated_gradients(layer, average=False)
    results = {
        "y": y,
        "x": x.grad,
        "w_in": layer.w_in.grad,
        "w_out": layer.w_out.grad,
        "router": layer.router.weight.grad,
    }

    # The same layer on one device, with the tokens and the experts of all ranks: expert by expert.
    all_x, all_weights, w_in, w_out = (
        gather_rows(tensor.detach()).requires_grad_()
        for tensor in (x, routing.weights, layer.w_in, layer.w_out)
    )
    chosen = gather_rows(routing.experts)
    total = torch.zeros(all_x.shape, device=device)
    for expert in range(experts):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (all_x[token] @ w_in[expert, :, i].T for i in (0, 1))
        result = (F.silu(gate) * up) @ w_out[expert].T
        total = total.index_add(0, token, result.float() * all_weights[token, slot, None])
    total.backward(gather_rows(upstream).float())
    local_tokens, local_experts = (
        slice(rank * count, (rank + 1) * count) for count in (tokens, len(layer.w_in))
    )
    # The weights' gradients continue through the router, which every rank has for its own tokens.
    layer.router.zero_grad()
    again = x.detach().requires_grad_()
    layer.route(again).weights.backward(all_weights.grad[local_tokens])
    dist.all_reduce(layer.router.weight.grad)
    expected = {
        "y": total[local_tokens],
        "x": all_x.grad[local_tokens] + again.grad,
        "w_in": w_in.grad[local_experts],
        "w_out": w_out.grad[local_experts],
        "router": layer.router.weight.grad,
    }
    errors = {name: relative_error(results[name], expected[name]) for name in results}
    return errors, measure(layer, x, upstream) if times else {}


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return all ranks' rows, one rank after the other."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of ``expected``."""
    result, expected = result.detach().double(), expected.detach().double()
    return float((result - expected).norm() / expected.norm())


def measure(layer: interlace.nn.MoE, x: torch.Tensor, upstream: torch.Tensor) -> dict[str, float]:
    """Return mean times of ten calls on this rank's GPU, in microseconds.

    They are of both implementations, for the forward pass alone and with the backward pass.
    """
    times = {}
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
            # elapsed_time is in ms: of ten calls, 100 times as many us per call.
            times[f"{impl}, {name}"] = 100 * start.elapsed_time(end)
    return times


@torch.no_grad()
def forward(layer: interlace.nn.MoE, x: torch.Tensor) -> torch.Tensor:
    """Run the forward pass alone."""
    return layer(x)[0]


def main(
    hidden: Annotated[int, typer.Option(help="Width of a token.")] = 32,
    ffn: Annotated[int, typer.Option(help="Width of an expert's inner layer.")] = 56,
    experts: Annotated[int, typer.Option(help="Number of experts, on all ranks together.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of each rank.")] = 12,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "float32",
    world_size: Annotated[
        int | None, typer.Option("--world-size", "-n", help="Ranks; default: torchrun's, or 2.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    times: Annotated[bool, typer.Option("--times", help="Measure times, too, on GPUs.")] = False,
) -> None:
    """Run one layer of Mixtral's shape on all ranks, and check it."""
    if times and not torch.cuda.is_available():
        raise typer.BadParameter(
            "--times needs GPUs: times of the interpreter on a CPU say nothing."
        )
    ranks = world_size or int(os.environ.get("WORLD_SIZE", "2"))
    limit = {"float32": 1e-5}.get(dtype, 0.03)
    for rank, (errors, measured) in enumerate(
        interlace.launch(
            worker, ranks, hidden, ffn, experts, top_k, tokens, dtype, times, backend=backend
        )
    ):
        print(
            f"rank {rank}: relative errors",
            ", ".join(f"{name} {error:.1e}" for name, error in errors.items()),
        )
        for name, microseconds in measured.items():
            print(f"rank {rank}: {name}: {microseconds:.0f} us")
        assert max(errors.values()) < limit, errors


if __name__ == "__main__":
    typer.run(main)
