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
import os
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch._dynamo.exc
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import interlace
import interlace.compile
from interlace.bench.timing import Timing, host_us, measure_step

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

ASYNCHRONOUS = "Inductor, async-TP"
_CAPTION = (
    "Times: median (p10 to p90) of the slowest rank. Host: time to enqueue a step, which may be "
    "the time of the step."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings, the same on every rank: experts of all ranks together, tokens of each rank."""

    hidden: int = 32
    ffn: int = 48
    experts: int = 4
    top_k: int = 2
    tokens: int = 24
    capacity_factor: float = 1.25
    dtype: str = "float32"
    separate: bool = False
    times: bool = False
    steps: int = 20

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


def errors_of(
    results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return each tensor's error: the norm of the difference, relative to the expected norm."""
    return {
        name: float((results[name] - value).norm() / value.norm())
        for name, value in expected.items()
    }


def compare(settings: Settings) -> dict[str, Any]:
    """Run the layer in every way on this rank.

    Returns:
        The pass's findings, and for every way its name, errors and times.
    """
    device, dtype = interlace.group_of().device, DTYPES[settings.dtype]
    if settings.times:
        # Findings in graphs that come from Inductor's cache are not recorded.
        torch._inductor.config.force_disable_caches = True
    higher = torch.float64 if settings.dtype == "float32" else torch.float32
    layer = MoE(settings).to(device, dtype)
    # A rounded score could send a token to another expert.
    layer.router.float()
    x = torch.randn(settings.tokens, settings.hidden).to(device, dtype)
    exact_layer = copy.deepcopy(layer).to(higher)
    exact = step(exact_layer, exact_layer, x.to(higher))
    del exact_layer
    ways: list[tuple[str, dict[str, float], list[str]]] = []
    with interlace.compile.recording() as findings:
        for name, make in ways_to_run(settings).items():
            torch.compiler.reset()
            call = make(layer)
            try:
                errors = errors_of(step(call, layer, x), exact)
            except torch._dynamo.exc.TorchDynamoException as error:
                if name != ASYNCHRONOUS:
                    raise
                # PyTorch's asynchronous pass may fail; the other ways are still compared.
                if dist.get_rank() == 0:
                    print(f"{name} does not compile this layer: {type(error).__name__}", flush=True)
                continue
            measured = settings.times and device.type == "cuda"
            ways.append((name, errors, times_of(call, layer, x, settings) if measured else []))
    return {"findings": findings, "ways": ways, "device": device.type}


def ways_to_run(settings: Settings) -> dict[str, Callable[[MoE], Callable[..., Any]]]:
    """Return the ways to run the layer, by name; eager first, by which the others are judged."""
    # Inductor takes a while to compile, so it runs only for times.
    if not settings.times:
        return {
            "eager": lambda layer: layer,
            "interlace, pass alone": lambda layer: torch.compile(
                layer, backend=interlace.compile.eager_backend, fullgraph=True
            ),
        }
    return {
        "eager": lambda layer: layer,
        "Inductor": lambda layer: torch.compile(layer, fullgraph=True),
        ASYNCHRONOUS: asynchronous,
        "interlace": lambda layer: torch.compile(
            layer, backend=interlace.compile.backend, fullgraph=True
        ),
    }


def asynchronous(layer: MoE) -> Callable[..., Any]:
    """Compile with PyTorch's own fusion of matrix products with gathers and scatters.

    It works through symmetric memory, and has no fusion with an all-to-all.
    """
    if torch.cuda.is_available():
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        assert dist.group.WORLD is not None
        enable_symm_mem_for_group(dist.group.WORLD.group_name)
    return torch.compile(layer, fullgraph=True, options={"_micro_pipeline_tp": True})


def times_of(
    call: Callable[..., Any], layer: MoE, x: torch.Tensor, settings: Settings
) -> list[str]:
    """Return times, as text: of the forward pass, of a step, and of the host to enqueue a step."""
    # An input that needs a gradient, as in a step: otherwise the layers would be compiled again.
    x = x.detach().requires_grad_()
    device_times = [
        milliseconds(measure_step(call_once, samples=settings.steps))
        for call_once in (lambda: call(x), lambda: step(call, layer, x))
    ]
    return [
        *device_times,
        f"{host_us(lambda _: step(call, layer, x), device=x.device, calls=2) / 1e3:.2f}",
    ]


def report(ranks: list[dict[str, Any]], settings: Settings) -> None:
    """Print the findings, and a row for each way to run the layer, of its worst rank.

    Fails if an error is larger than rounding explains.
    """
    console = Console(highlight=False, soft_wrap=True, quiet=os.environ.get("RANK", "0") != "0")
    console.print(
        f"[bold]{settings.experts} experts, {len(ranks)} ranks, {settings.capacity} tokens each, "
        f"{settings.dtype}[/bold]"
    )
    for finding in ranks[0]["findings"]:
        console.print(f"  {str(finding).split(': the cpu backend')[0]}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=_CAPTION)
    for heading in (
        "way",
        "error of output",
        "worst of gradients",
        "forward ms",
        "step ms",
        "host ms",
    ):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    allowed: dict[str, float] = {}
    failures = []
    for ways in zip(*(rank["ways"] for rank in ranks), strict=True):
        # Every rank has the slowest rank's times.
        name, _, times = ways[0]
        errors = {key: max(way[1][key] for way in ways) for key in ways[0][1]}
        gradients = max(error for key, error in errors.items() if key != "output")
        table.add_row(name, f"{errors['output']:.1e}", f"{gradients:.1e}", *times)
        if not allowed:
            eps = torch.finfo(DTYPES[settings.dtype]).eps
            allowed = {key: 4 * max(error, eps) for key, error in errors.items()}
        wrong = {key: error for key, error in errors.items() if not error <= allowed[key]}
        failures += [
            f"{name}: {key} {error:.1e}, allowed {allowed[key]:.1e}" for key, error in wrong.items()
        ]
    console.print(table)
    assert not failures, failures
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


def milliseconds(time: Timing) -> str:
    """Format the median and spread of the slowest rank, in ms."""
    return f"{time.median_us / 1e3:.2f} ({time.p10_us / 1e3:.2f} to {time.p90_us / 1e3:.2f})"


def main(
    world_size: Annotated[
        int | None, typer.Option("--world-size", "-n", help="Ranks; default: torchrun's, or 2.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    hidden: Annotated[int, typer.Option(help="Width of a token.")] = Settings.hidden,
    ffn: Annotated[int, typer.Option(help="Width of an expert's inner layer.")] = Settings.ffn,
    experts: Annotated[
        int, typer.Option(help="Experts of all ranks, which must divide them.")
    ] = Settings.experts,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = Settings.top_k,
    tokens: Annotated[int, typer.Option(help="Tokens of each rank.")] = Settings.tokens,
    capacity_factor: Annotated[
        float, typer.Option(help="Room for an expert's even share of tokens, times this.")
    ] = 1.25,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = Settings.dtype,
    separate: Annotated[
        bool, typer.Option("--separate", help="w1 and w3 as two matrix products.")
    ] = Settings.separate,
    times: Annotated[
        bool, typer.Option("--times", help="Compile with Inductor too and, on GPUs, time steps.")
    ] = Settings.times,
    steps: Annotated[int, typer.Option(help="Steps to time.")] = Settings.steps,
) -> None:
    """Compile an expert-parallel layer with the fusing pass and compare it with eager execution."""
    ranks = world_size or int(os.environ.get("WORLD_SIZE", "2"))
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype}.")
    if experts % ranks:
        raise typer.BadParameter(f"--experts must divide evenly over {ranks} ranks; got {experts}.")
    if not 1 <= top_k <= experts:
        raise typer.BadParameter(f"--top-k must be from 1 to {experts} experts; got {top_k}.")
    if min(hidden, ffn, tokens, steps) < 1 or not 0 < capacity_factor < math.inf:
        raise typer.BadParameter(
            "--hidden, --ffn, --tokens, --steps and --capacity-factor must be positive."
        )
    settings = Settings(
        hidden, ffn, experts, top_k, tokens, capacity_factor, dtype, separate, times, steps
    )
    try:
        report(interlace.launch(compare, ranks, settings, backend=backend), settings)
    except interlace.InterlaceError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"Error: {error.line}", style="bold red", markup=False
        )
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
