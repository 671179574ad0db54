"""``interlace trace``: one call of an operator, seen from inside its kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from interlace.cli.bench import require_dtype
from interlace.cli.console import make_console, run_ranks
from interlace.cli.gpus import choose_backend, gpu_named
from interlace.cli.options import MOST_RANKS
from interlace.cli.outputs import Outputs
from interlace.cli.ranks import trace_calls
from interlace.cli.trace_simulated import comparison, simulate
from interlace.costs.known_profiles import profile_of
from interlace.documents import read_json, reading
from interlace.errors import ArgumentError
from interlace.testing.cases import IMPLEMENTATIONS, Case, every_case
from interlace.tracing import simulated_document
from interlace.tracing.picture import draw_trace
from interlace.tuning.gpu import Gpu
from interlace.units import format_ns, parse_count, shortened

_MODEL = "h200"
"""The GPU that is simulated beside the CPU backend."""

_SIMULATED_RANKS = 4

_MOST_WORK = 1 << 27
"""Multiplications of all ranks' calls for which the CPU backend, an interpreter, takes minutes."""

_LEAST_WORK = 1 << 20
"""What a call of the CPU backend takes at least, as multiplications."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of ``interlace trace``.

    Attributes:
        operator: Name of the operator.
        shape: Sizes such as ``"8192x8192x2048"``, in the order of the case's fields; empty for
            those of the operator's smallest case.
        impl: The implementation, as ``IMPLEMENTATIONS`` lists it; empty for the first one.
        dtype: The dtype of the operands; empty for the case's.
        world_size: Number of ranks; None for all GPUs, at most 8, else 2, or 4 that are simulated.
        backend: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        calls: Number of calls in the trace; others before it compile the kernels.
        is_simulated: Whether the simulated timeline of the call is drawn under the measured one.
        gpu: The name of a profiled GPU, if the call is simulated only.
    """

    operator: str
    shape: str
    impl: str
    dtype: str
    world_size: int | None
    backend: str
    calls: int
    is_simulated: bool
    gpu: str


def run_trace(request: Request, outputs: Outputs) -> None:
    """Trace calls, write the trace for Perfetto and a picture, and print the summary.

    Raises:
        ArgumentError: There is no such operator, implementation or dtype, the shape is none, or
            the simulator has no such call.
        BackendError: There are no GPUs for ``backend="cuda"``.
    """
    console = make_console()
    if request.gpu:
        gpu, ranks = gpu_named(request.gpu), request.world_size or _SIMULATED_RANKS
        case = case_of(request, ranks)
        simulated = simulate(case, ranks, gpu)
        title = f"{case.label}, {ranks} x {gpu.name}, simulated"
        _write(simulated_document(simulated, title), outputs)
        console.print(title)
        console.print(simulated.summary(), highlight=False)
        console.print(
            f"Simulated, not measured: {profile_of(gpu.name, gpu.processors).source}.", style="dim"
        )
    else:
        _run_measured(request, outputs, console)
    console.print(f"{outputs.trace}: open it on https://ui.perfetto.dev")


def _run_measured(request: Request, outputs: Outputs, console: Console) -> None:
    gpus = torch.cuda.device_count()
    backend = choose_backend("trace", request.backend)
    ranks = request.world_size or (min(gpus, MOST_RANKS) if backend == "cuda" else 2)
    case = case_of(request, ranks)
    # Refused before anything is measured.
    work = max(case.work, _LEAST_WORK) * ranks * request.calls
    if backend == "cpu" and work > _MOST_WORK:
        raise ArgumentError(
            f"{case.label}: SHAPE, ranks and calls must be at most {_MOST_WORK:.1e} "
            "multiplications on the CPU backend, whose kernels run in an interpreter; got "
            f"{work:.1e}. Make it smaller, or say --gpu {_MODEL}, which simulates a product "
            "without a GPU."
        )
    gpu = Gpu.of(torch.device("cuda", 0)) if backend == "cuda" else gpu_named(_MODEL)
    simulated = simulate(case, ranks, gpu) if request.is_simulated else None
    title = f"Trace of {case.label} on {ranks} ranks of the {backend} backend"
    trace, *_ = run_ranks(
        console, title, 1, trace_calls, ranks, case, request.calls, backend=backend
    )
    machine = f"{ranks} ranks, CPU backend"
    if backend == "cuda":
        machine = f"{ranks} x {gpu.name}"
        if gpus < ranks:
            machine = f"{ranks} ranks that share {gpus} x {gpu.name}"
    _write(trace.to_perfetto(simulated, f"{case.label}, {machine}"), outputs)
    console.print(case.label)
    console.print(trace.summary(), highlight=False)
    if trace.is_timed:
        errors = ", ".join(format_ns(clock.error_ns) for clock in trace.clocks[1:])
        console.print(f"clocks against rank 0's: within {errors}")
        console.print(f"timer: steps of {format_ns(trace.timer_step_ns)}")
    if simulated is None or simulated.account is None:
        return
    if trace.account is None:
        console.print(f"simulated on {gpu.name}: {simulated.account.finding()}")
        return
    console.print()
    console.print(comparison(trace.account, simulated.account))


def _write(document: dict[str, Any], outputs: Outputs) -> None:
    outputs.write_trace(lambda: document)
    outputs.write_plot(lambda file: draw_trace(document, file))


def run_picture(file: Path, rows: int, width: float, outputs: Outputs) -> None:
    """Draw the trace of a file.

    Raises:
        ArgumentError: The file holds no trace of ``interlace trace``.
    """
    meaning = "a trace that `interlace trace` has written"
    document = read_json(file, meaning)
    with reading([file], meaning):
        outputs.write_plot(lambda plot: draw_trace(document, plot, rows=rows, width=width))
    outputs.say_written(make_console())


def case_of(request: Request, ranks: int) -> Case:
    """Return the call that a request describes.

    Raises:
        ArgumentError: See :func:`run_trace`.
    """
    operator, shape = request.operator, request.shape
    if operator not in IMPLEMENTATIONS:
        raise ArgumentError(
            f"OPERATOR must be one of {', '.join(IMPLEMENTATIONS)}; got {operator!r}. To trace an "
            "operator or a kernel of your own, put interlace.trace() around calls of it."
        )
    if request.dtype:
        require_dtype(request.dtype)
    impl = request.impl or IMPLEMENTATIONS[operator][0]
    cases = [case for case in every_case(ranks, [operator]) if case.impl == impl]
    if not cases:
        raise ArgumentError(
            f"--impl must be one of {', '.join(IMPLEMENTATIONS[operator])}; got {impl!r}."
        )
    case = dataclasses.replace(cases[0], backward=False, dtype=request.dtype or cases[0].dtype)
    if not shape:
        return case
    names, sizes = case.size_names, [parse_count(size) for size in shape.lower().split("x")]
    if len(sizes) > len(names) or not all(
        size or (size == 0 and name in case.may_be_zero)
        for name, size in zip(names, sizes, strict=False)
    ):
        raise ArgumentError(
            f"SHAPE must be whole numbers from 1 to 2^30 for {' x '.join(names)}, or the first of "
            f"them; got {shortened(shape)}."
        )
    fields: dict[str, Any] = dict(zip(names, sizes, strict=False))
    return dataclasses.replace(case, **fields)
