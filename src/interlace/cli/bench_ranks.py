"""The work of each rank of ``interlace bench`` and ``interlace tune``.

Every rank calls :func:`run_rank` with the shapes and one of the ``measure_...`` functions, to which
the command has bound its options by name. After each shape rank 0 writes the results so far to the
file of ``--json``, so a long run that is cut off is not lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench.draws import Draw
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


def measure_gemv(sizes: tuple[int, int, int], *, dtype: str, tunes: bool) -> list[Result]:
    """Benchmark ``(tokens, rows, columns)``, with the best configuration if ``tunes``."""
    from interlace.bench import gemv_all_reduce as operator

    shape = operator.GemvShape(*sizes, getattr(torch, dtype))
    return [operator.bench(shape, operator.tune(shape) if tunes else None)]


def measure_embeddings(sizes: Result, *, dtype: str, kind: str) -> list[Result]:
    """Benchmark pooled embeddings.

    Args:
        sizes: Sizes by name; they may name a dtype of their own.
        dtype: Dtype of shapes that name none.
        kind: ``"forward"``, ``"backward"``, or ``"tune"`` (then both directions are tuned, and the
            forward pass is timed).
    """
    from interlace.bench import embedding_all_to_all as operator

    shape = operator.TablesShape(**{**sizes, "dtype": getattr(torch, sizes.get("dtype", dtype))})
    config = operator.tune(shape) if kind == "tune" else None
    return [operator.bench(shape, config, backwards=kind == "backward")]


def measure_experts(sizes: Result, *, dtype: str, part: str, config: str) -> list[Result]:
    """Benchmark a mixture of experts.

    Args:
        sizes: Sizes by name.
        dtype: Dtype of the layer.
        part: A part of the layer; ``"all"``; ``"decoding"``; or ``"tune"`` and ``"tune
            decoding"``: then the forward pass with the best configuration.
        config: The configuration; empty for the default one, and in decoding for several.
    """
    from interlace.bench import expert_decoding
    from interlace.bench import mixture_of_experts as operator
    from interlace.operators.mixture_of_experts.config import MixtureOfExpertsConfig

    shape = operator.ExpertsShape(**sizes, dtype=getattr(torch, dtype))
    if part == "tune":
        return operator.bench(shape, operator.tune(shape), parts=("forward",))
    chosen = MixtureOfExpertsConfig.parse(config) if config else None
    if part == "tune decoding":
        chosen = expert_decoding.tune(shape)
    if part in ("decoding", "tune decoding"):
        return [expert_decoding.bench(shape, chosen)]
    return operator.bench(shape, chosen, parts=operator.PARTS if part == "all" else (part,))


def measure_product(work: tuple[str, int, int, int], *, dtype: str, kind: str) -> list[Result]:
    """Benchmark ``(operator, M, N, K)`` of an operator around a product.

    Args:
        work: Operator and sizes.
        dtype: Dtype of the operands.
        kind: ``"bench"``, ``"tune"`` (then with the best configuration) or ``"transports"``.
    """
    from interlace.bench import products, transports

    shape = products.ProductShape(*work, getattr(torch, dtype))
    if kind == "transports":
        return [transports.compare(shape)]
    return [products.bench(shape, products.tune(shape) if kind == "tune" else None)]


def measure_batch(work: tuple[str, int, int, int, int], *, dtype: str) -> list[Result]:
    """Benchmark ``(operator, B, M, N, K)`` of an operator on a batch of products."""
    from interlace.bench import batches

    operator, count, rows, columns, inner = work
    shape = batches.BatchShape(operator, rows, columns, inner, getattr(torch, dtype), count)
    return [batches.bench(shape)]


def measure_batch_invariance(work: tuple[str, int, int, int], *, dtype: str) -> list[Result]:
    """Benchmark ``(operator, tokens, N, K)`` with and without batch invariance."""
    from interlace.bench import batch_invariance

    return [batch_invariance.bench(*work, getattr(torch, dtype))]


def measure_draw(draw: Draw, *, dtype: str) -> list[Result]:
    """Measure every implementation of one drawn call."""
    from interlace.bench import sweep

    return [sweep.bench(draw, getattr(torch, dtype))]
