"""The work of ranks that commands start, which need neither Typer nor Rich."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.documents import to_json

if TYPE_CHECKING:
    from interlace.testing.cases import Case
    from interlace.tracing import Trace

Result = dict[str, Any]
Measure = Callable[[Any], list[Result]]
"""A function that benchmarks the sizes of one shape. Ranks are processes, so it can be pickled."""

_HOLD = 3.0  # times as long as the slowest host takes to enqueue the calls
_MIN_HOLD_S = 2e-3


def advance(folder: str) -> None:
    """Record that one more step is done on this rank, for the command's bar of progress."""
    with (Path(folder) / f"rank-{dist.get_rank()}").open("ab") as file:
        file.write(b".")


# interlace bench and interlace tune


def measure_shapes(
    folder: str,
    work: Iterable[Any],
    measure: Measure,
    budget_s: float,
    header: Result,
    file: str | None,
) -> list[Result]:
    """Measure one shape after the other; return all results.

    After each shape rank 0 writes the results so far, so a long run that is cut off is not lost.

    Args:
        folder: Folder in which progress is written.
        work: Sizes of each shape, as ``measure`` takes them.
        measure: Function that benchmarks one shape, to which the command has bound its options by
            name; collective.
        budget_s: Seconds after which no further shape is begun.
        header: Entries of the file besides results.
        file: File for the results so far, which rank 0 writes; None for no file.
    """
    results: list[Result] = []
    for sizes in _within(budget_s, work):
        results += measure(sizes)
        # The next shape's operands may need all of the GPU's memory.
        torch.cuda.empty_cache()
        if file is not None and dist.get_rank() == 0:
            document = {**header, "results": results}
            Path(file).write_text(to_json(document), encoding="utf-8")
        advance(folder)
    return results


def _within(budget_s: float, work: Iterable[Any]) -> Iterator[Any]:
    """Yield shapes until the time is over, as rank 0 sees it. Each step is collective."""
    end = time.monotonic() + budget_s
    for sizes in work:
        # Clocks of ranks differ, and a rank that began another shape alone would wait for ever.
        if math.isfinite(budget_s):
            is_over = torch.tensor(float(time.monotonic() > end), device="cuda")
            dist.broadcast(is_over, 0)
            if is_over.item():
                return
        yield sizes


# interlace trace


def trace_calls(folder: str, case: Case, calls: int) -> Trace | None:
    """Trace calls on this rank; return the trace, which has all ranks' events, on the first one.

    On GPUs the calls begin on all ranks at once, behind the time that hosts take to enqueue them.
    Collective.
    """
    group = group_of(None)
    tensors = case.tensors(group.rank, group.world_size, seed=0)
    inputs = {name: tensor.to(group.device) for name, tensor in tensors.items()}
    call = case.open(None)

    def traced(hold_s: float) -> tuple[Trace, float]:
        """Return a trace of the calls, and the seconds that this host took to enqueue them."""
        with interlace.trace(hold_s=hold_s) as trace:
            start = time.perf_counter()
            for _ in range(calls):
                call(inputs)
            seconds = time.perf_counter() - start
        return trace, seconds

    # Kernels are compiled for a trace at their first call in one.
    traced(0.0)
    hold_s = 0.0
    if group.backend == "cuda":
        _, seconds = traced(_MIN_HOLD_S)
        hold_s = max(_HOLD * max(group.exchange("tracing calls", seconds)), _MIN_HOLD_S)
    trace, _ = traced(hold_s)
    advance(folder)
    return trace if group.rank == 0 else None
