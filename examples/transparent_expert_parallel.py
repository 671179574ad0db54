r"""Mixtral's layer of experts, with plain ``all_to_all_single``, fused by ``torch.compile``.

No line of the layer mentions Interlace.

Each rank holds some of the experts and brings its own tokens. An expert takes at most a fixed
number of tokens from each rank, as in the Switch Transformer, so that the splits of both exchanges
are even; a token beyond that number goes without the expert.

Without arguments it runs a tiny layer on two ranks and checks itself: output and every gradient of
the compiled layer must be as near to the layer in higher precision as the eager one is. It prints
which collectives were fused. On GPUs, with Mixtral's sizes, and times of a step, forward and
backward:

    python examples/transparent_expert_parallel.py --world-size 4 --dtype bfloat16 \
        --hidden 4096 --ffn 14336 --experts 8 --tokens 4096 --times
    torchrun --nproc-per-node 4 examples/transparent_expert_parallel.py --dtype bfloat16 ...
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
import typer
from shared import commands
from shared.errors import DTYPES, higher
from shared.ways import print_findings, print_ways, run_ways
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import interlace
import interlace.compile


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings, the same on every rank: experts of all ranks together, tokens of each rank."""

    hidden: Annotated[int, typer.Option(help="Width of a token.")] = 32
    ffn: Annotated[int, typer.Option(help="Width of an expert's inner layer.")] = 48
    experts: Annotated[int, typer.Option(help="Experts of all ranks, which must divide them.")] = 4
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 2
    tokens: Annotated[int, typer.Option(help="Tokens of each rank.")] = 24
    capacity_factor: Annotated[
        float, typer.Option(help="Room for an expert's even share of tokens, times this.")
    ] = 1.25
    dtype: commands.Dtype = "float32"
    separate: Annotated[
        bool, typer.Option("--separate", help="w1 and w3 as two matrix products.")
    ] = False
    times: commands.Times = False
    steps: commands.Steps = 20

    @property
    def capacity(self) -> int:
        """The most tokens that an expert takes from a rank: its even share, and some more."""
        return math.ceil(self.capacity_factor * self.tokens * self.top_k / self.experts)


# The layer, as it would be written without Interlace


class MoE(nn.Module):
    """A router, and this rank's experts ``w2(silu(w1(x)) * w3(x))``.

    Input and output are ``[tokens, hidden]``. With ``separate``, w1 and w3 are two matrix products,
    and otherwise one.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.ranks = settings, dist.get_world_size()
        local = settings.experts // self.ranks
        # The router is the same on every rank, and the experts are not.
        torch.manual_seed(0)
        self.router = nn.Linear(settings.hidden, settings.experts, bias=False)
        torch.manual_seed(1 + dist.get_rank())
        w13 = torch.randn(local, 2 * settings.ffn, settings.hidden) / settings.hidden**0.5
        self.w13 = nn.ParameterList(half.clone() for half in w13.chunk(1 + settings.separate, 1))
        self.w2 = nn.Parameter(
            torch.randn(local, settings.hidden, settings.ffn) / settings.ffn**0.5
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``[tokens, hidden] -> [tokens, hidden]``."""
        top_k, capacity = self.settings.top_k, self.settings.capacity
        last = self.settings.experts * capacity
        scores = self.router(x.to(self.router.weight.dtype)).softmax(-1)
        weights, chosen = scores.topk(top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        # Every expert has ``capacity`` rows in the message. A token's row is its number among the
        # tokens of its expert. Tokens without room share one more row, which is not sent.
        one_hot = chosen.view(-1, 1) == torch.arange(self.settings.experts, device=x.device)
        one_hot = one_hot.long()
        number = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1)
        row = torch.where(number < capacity, chosen.flatten() * capacity + number, last)
        sent = x.new_zeros(last + 1, x.shape[1]).index_copy(0, row, x.repeat_interleave(top_k, 0))[
            :last
        ]
        back = self.exchange(self.experts(self.exchange(sent)))
        weights = weights * (row < last).view_as(weights)
        results = back.index_select(0, row.clamp(max=last - 1)).view(*weights.shape, -1)
        return (results * weights.to(x.dtype)[..., None]).sum(1)

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """Send an equal part of the rows to every rank, in rank order."""
        splits = [rows.shape[0] // self.ranks] * self.ranks
        return all_to_all_single_autograd(rows, splits, splits, dist.group.WORLD)

    def experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply this rank's experts to ``[rank * expert * capacity, hidden]`` rows."""
        rows = (
            rows.view(self.ranks, -1, self.settings.capacity, rows.shape[1])
            .transpose(0, 1)
            .flatten(1, 2)
        )
        products = [torch.bmm(rows, w.transpose(1, 2)) for w in self.w13]
        gate, up = products if self.settings.separate else products[0].chunk(2, -1)
        rows = torch.bmm(F.silu(gate) * up, self.w2.transpose(1, 2))
        return rows.unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 2)


# The comparison


def step(call: Callable[..., Any], layer: MoE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run forward and backward pass; return this rank's output and gradients by name.

    The loss is half the sum of the output's squares, so its gradient is the output.
    """
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = call(x)
    y.backward(y.detach())
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": y.detach(), "x": x.grad} | gradients


def compare(settings: Settings) -> dict[str, Any]:
    """Run the layer in every way on this rank.

    Returns:
        The pass's findings, and for every way its name, errors and times.
    """
    device, dtype = interlace.group_of().device, DTYPES[settings.dtype]
    if settings.times:
        # Findings in graphs that come from Inductor's cache are not recorded.
        torch._inductor.config.force_disable_caches = True
    layer = MoE(settings).to(device, dtype)
    # A rounded score could send a token to another expert.
    layer.router.float()
    x = torch.randn(settings.tokens, settings.hidden).to(device, dtype)
    exact_layer = copy.deepcopy(layer).to(higher(settings.dtype))
    exact = step(exact_layer, exact_layer, x.to(higher(settings.dtype)))
    del exact_layer
    with interlace.compile.recording() as findings:
        ways = run_ways(step, layer, x, exact, times=settings.times, steps=settings.steps)
    return {"findings": findings, "ways": ways, "device": device.type}


def report(ranks: list[dict[str, Any]], settings: Settings) -> None:
    """Print the findings, and a row for each way to run the layer, of its worst rank.

    Fails if an error is larger than rounding explains.
    """
    console = commands.make_console()
    title = f"{settings.experts} experts, {len(ranks)} ranks"
    console.print(f"[bold]{title}, {settings.capacity} tokens each, {settings.dtype}[/bold]")
    print_findings(console, ranks[0]["findings"])
    print_ways(console, [rank["ways"] for rank in ranks], settings.dtype, title)
    # On the CPU the pass fuses every pair that it can.
    if ranks[0]["device"] == "cpu":
        fused = [(finding.graph, finding.operator) for finding in ranks[0]["findings"]]
        back = "bmm_all_to_all" if settings.experts > len(ranks) else "gemm_all_to_all"
        gradient = "bmm_sum_all_to_all" if settings.separate else back
        expected = [
            ("forward", "all_to_all_bmm"),
            ("forward", back),
            ("backward", "all_to_all_bmm"),
            ("backward", gradient),
        ]
        assert fused == expected, fused


def main(settings: Settings, ranks: int, backend: str) -> None:
    """Compile an expert-parallel layer with the fusing pass and compare it with eager execution."""
    commands.require_dtype(settings.dtype)
    commands.require_even(ranks, experts=settings.experts)
    if not 1 <= settings.top_k <= settings.experts:
        raise typer.BadParameter(
            f"--top-k must be from 1 to {settings.experts} experts; got {settings.top_k}."
        )
    counts = (settings.hidden, settings.ffn, settings.tokens, settings.steps)
    if min(counts) < 1 or not 0 < settings.capacity_factor < math.inf:
        raise typer.BadParameter(
            "--hidden, --ffn, --tokens, --steps and --capacity-factor must be positive."
        )
    report(interlace.launch(compare, ranks, settings, backend=backend), settings)


if __name__ == "__main__":
    commands.run_with_options(main, Settings)
