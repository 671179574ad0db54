"""``interlace trace``: one call of an operator, seen from inside its kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from interlace.cli.console import make_console, run_ranks
from interlace.cli.outputs import Outputs
from interlace.cli.trace_ranks import trace_rank
from interlace.errors import ArgumentError, BackendError
from interlace.testing.cases import IMPLEMENTATIONS, Case, every_case

_BASE_FIELDS = {field.name for field in dataclasses.fields(Case)}


def run_trace(
    operator: str,
    shape: str,
    impl: str,
    dtype: str,
    world_size: int | None,
    backend: str,
    calls: int,
    path: Path,
) -> None:
    """Trace ``calls`` calls, write the trace for Perfetto, and print its summary.

    Args:
        operator: Name of the operator.
        shape: Sizes such as ``"8192x8192x2048"``, in the order of the case's fields; empty for
            those of the operator's smallest case.
        impl: The implementation, as ``IMPLEMENTATIONS`` lists it; empty for the first one.
        calls: Number of calls in the trace; others before it compile the kernels.
        path: The file.

    Raises:
        ArgumentError: There is no such operator or implementation, or the shape is none.
        BackendError: There are no GPUs for ``backend="cuda"``.
    """
    outputs = Outputs(trace=path)
    gpus = torch.cuda.device_count()
    if backend == "cuda" and not gpus:
        raise BackendError(
            "interlace trace --backend cuda must have CUDA GPUs; got none. `interlace doctor` says "
            "what is missing."
        )
    backend = ("cuda" if gpus else "cpu") if backend == "auto" else backend
    ranks = world_size or (min(gpus, 8) if backend == "cuda" else 2)
    case = case_of(operator, shape, impl, dtype, ranks)
    console = make_console()
    title = f"Trace of {case.label} on {ranks} ranks of the {backend} backend"
    document, summary = run_ranks(
        console, title, 1, trace_rank, ranks, case, calls, backend=backend
    )[0]
    outputs.write_trace(lambda: document)
    console.print(case.label)
    console.print(summary, highlight=False)
    console.print(f"{path}: open it on https://ui.perfetto.dev")


def case_of(operator: str, shape: str, impl: str, dtype: str, ranks: int) -> Case:
    """Return the call that the arguments describe.

    Raises:
        ArgumentError: See :func:`run_trace`.
    """
    if operator not in IMPLEMENTATIONS:
        raise ArgumentError(
            f"OPERATOR must be one of {', '.join(IMPLEMENTATIONS)}; got {operator!r}."
        )
    impl = impl or IMPLEMENTATIONS[operator][0]
    cases = [case for case in every_case(ranks, [operator]) if case.impl == impl]
    if not cases:
        raise ArgumentError(
            f"--impl must be one of {', '.join(IMPLEMENTATIONS[operator])}; got {impl!r}."
        )
    case = dataclasses.replace(cases[0], backward=False, dtype=dtype or cases[0].dtype)
    if not shape:
        return case
    names = [
        field.name
        for field in dataclasses.fields(case)
        if field.name not in _BASE_FIELDS and type(getattr(case, field.name)) is int
    ]
    sizes = shape.lower().split("x")
    if len(sizes) > len(names) or not all(size.isdigit() for size in sizes):
        raise ArgumentError(
            f"SHAPE must be whole numbers for {' x '.join(names)}, or the first of them; got "
            f"{shape!r}."
        )
    fields: dict[str, Any] = dict(zip(names, map(int, sizes), strict=False))
    return dataclasses.replace(case, **fields)
