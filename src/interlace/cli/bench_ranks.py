"""The work of each rank of ``interlace bench`` and ``interlace tune``.

Every rank calls :func:`run_rank` with the shapes and a function of :mod:`interlace.bench.measures`,
to which the command has bound its options by name. After each shape rank 0 writes the results so
far to the file of ``--json``, so a long run that is cut off is not lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.cli.ranks import advance
from interlace.documents import to_json

Result = dict[str, Any]
Measure = Callable[[Any], list[Result]]
"""A function that benchmarks the sizes of one shape. Ranks are processes, so it can be pickled."""


def run_rank(
    folder: str,
    work: Iterable[Any],
    measure: Measure,
    budget_s: float,
    header: Result,
    file: str | None,
) -> list[Result]:
    """Measure one shape after the other; return all results.

    Args:
        folder: Folder in which progress is written.
        work: Sizes of each shape, as ``measure`` takes them.
        measure: Function that benchmarks one shape; collective.
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
