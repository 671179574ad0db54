"""The ways to run a module that contains collectives: eager, and compiled by PyTorch or Interlace.

The module's results in higher precision are the truth. The eager module comes first, and its errors
are the measure for the others: they have the same roundings in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch._dynamo.exc
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import interlace
import interlace.compile
from interlace.bench.timing import Timing, host_us, measure_step
from shared.errors import Judge, errors_of

ASYNCHRONOUS = "Inductor, async-TP"

Step = Callable[[Callable[..., Any], nn.Module, torch.Tensor], dict[str, torch.Tensor]]
"""A forward and a backward pass of a call of a module; returns output and gradients by name."""

Way = tuple[str, dict[str, float], list[str]]
"""A way's name, its errors, and its times as text, on one rank."""


# Ways to run a module


def run_ways(
    step: Step,
    module: nn.Module,
    x: torch.Tensor,
    exact: dict[str, torch.Tensor],
    *,
    times: bool,
    steps: int,
) -> list[Way]:
    """Run a module eagerly and compiled, on this rank.

    Args:
        step: Forward and backward pass.
        module: The module.
        x: Its input.
        exact: The results of ``step`` in higher precision.
        times: Whether Inductor compiles the module too and, on GPUs, steps are timed.
        steps: Number of steps to time.
    """
    ways = []
    for name, make in _ways(times).items():
        torch.compiler.reset()
        call = make(module)
        try:
            errors = errors_of(step(call, module, x), exact)
        except torch._dynamo.exc.TorchDynamoException as error:
            if name != ASYNCHRONOUS:
                raise
            # PyTorch's asynchronous pass may fail; the other ways are still compared.
            if dist.get_rank() == 0:
                print(f"{name} does not compile this module: {type(error).__name__}", flush=True)
            continue
        is_timed = times and x.device.type == "cuda"
        ways.append((name, errors, _times_of(step, call, module, x, steps) if is_timed else []))
    return ways


def _ways(times: bool) -> dict[str, Callable[[nn.Module], Callable[..., Any]]]:
    """Return the ways to run a module, by name; eager first, by which the others are judged."""
    # Inductor takes a while to compile, so it runs only for times.
    if not times:
        return {
            "eager": lambda module: module,
            "interlace, pass alone": lambda module: torch.compile(
                module, backend=interlace.compile.eager_backend, fullgraph=True
            ),
        }
    return {
        "eager": lambda module: module,
        "Inductor": lambda module: torch.compile(module, fullgraph=True),
        ASYNCHRONOUS: _asynchronous,
        "interlace": lambda module: torch.compile(
            module, backend=interlace.compile.backend, fullgraph=True
        ),
    }


def _asynchronous(module: nn.Module) -> Callable[..., Any]:
    """Compile with PyTorch's own fusion of matrix products with gathers and scatters.

    It works through symmetric memory, and has no fusion with an all-to-all.
    """
    if torch.cuda.is_available():
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        assert dist.group.WORLD is not None
        enable_symm_mem_for_group(dist.group.WORLD.group_name)
    return torch.compile(module, fullgraph=True, options={"_micro_pipeline_tp": True})


def _times_of(
    step: Step, call: Callable[..., Any], module: nn.Module, x: torch.Tensor, steps: int
) -> list[str]:
    """Return times, as text: of the forward pass, of a step, and of the host to enqueue a step."""
    # An input that needs a gradient, as in a step: otherwise the layers would be compiled again.
    x = x.detach().requires_grad_()
    device_times = [
        _milliseconds(measure_step(call_once, samples=steps))
        for call_once in (lambda: call(x), lambda: step(call, module, x))
    ]
    host_time = host_us(lambda _: step(call, module, x), device=x.device, calls=2) / 1e3
    return [*device_times, f"{host_time:.2f}"]


def _milliseconds(time: Timing) -> str:
    """Format the median and spread of the slowest rank, in ms."""
    return f"{time.median_us / 1e3:.2f} ({time.p10_us / 1e3:.2f} to {time.p90_us / 1e3:.2f})"


# The report


def print_findings(console: Console, findings: Iterable[interlace.compile.Finding]) -> None:
    """Print the findings of the fusing pass, a line each."""
    for finding in findings:
        # On the CPU the reason for every choice is the same.
        console.print(f"  {str(finding).split(': the cpu backend')[0]}", markup=False)


def print_ways(console: Console, ranks: Sequence[Sequence[Way]], dtype: str, title: str) -> None:
    """Print a row for each way to run a module, of its worst rank.

    Args:
        console: Where to print.
        ranks: For each rank what :func:`run_ways` has returned.
        dtype: The module's dtype.
        title: The module, for a failure.

    Raises:
        AssertionError: an error is larger than rounding explains.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="Times: median (p10 to p90) of the slowest rank. Host: time to enqueue a step, "
        "which may be the time of the step.",
    )
    for heading in (
        "way",
        "error of output",
        "worst of gradients",
        "forward ms",
        "step ms",
        "host ms",
    ):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    judge = Judge(dtype)
    for ways in zip(*ranks, strict=True):
        # Every rank has the slowest rank's times.
        name, _, times = ways[0]
        errors = judge.worst(f"{title}, {name}", [errors for _, errors, _ in ways])
        gradients = max(error for key, error in errors.items() if key != "output")
        table.add_row(name, f"{errors['output']:.1e}", f"{gradients:.1e}", *times)
    console.print(table)
    assert not judge.failures, judge.failures
