"""The work of each rank of ``interlace bench`` and ``interlace tune``.

Every function here is called as ``worker(folder, work, *more, header, file)`` on every rank. After
each shape rank 0 writes ``header`` and the results so far to ``file``, so a long run that is cut
off is not lost; every rank advances the progress bar by a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench.draws import Draw
from interlace.cli.ranks import advance
from interlace.errors import BackendError

Result = dict[str, Any]


def run_rank(
    folder: str,
    shapes: list[tuple[int, int, int]],
    dtype: str,
    tune: bool,
    header: Result,
    file: str | None,
) -> list[Result]:
    """Benchmark every ``(tokens, rows, columns)``, with its best configuration if ``tune``."""
    from interlace.bench import gemv_all_reduce as operator
    from interlace.operators.gemv_all_reduce.config import GemvAllReduceConfig

    def measure(sizes: tuple[int, int, int]) -> list[Result]:
        shape = operator.Shape(*sizes, getattr(torch, dtype))
        config = None
        if tune:
            config = GemvAllReduceConfig.parse(
                _best(operator.OPERATOR, shape, operator.tune(shape))
            )
        return [operator.bench(shape, config)]

    return _measure_all(shapes, measure, folder, header, file)


def run_embedding_rank(
    folder: str,
    shapes: list[Result],
    dtype: str,
    kind: str,
    header: Result,
    file: str | None,
) -> list[Result]:
    """Benchmark pooled embeddings of every shape.

    Args:
        folder: Folder in which progress is written.
        shapes: Sizes by name; a shape may name its own dtype.
        dtype: Dtype of the other shapes.
        kind: ``"forward"``, ``"backward"``, ``"tune"`` (then both directions, in the forward's
            result) or ``"study"``.
        header: Entries of the file besides results.
        file: File for the results so far, on rank 0.
    """
    from interlace.bench import embedding_all_to_all as operator
    from interlace.operators.embedding_all_to_all.config import EmbeddingAllToAllConfig

    def measure(sizes: Result) -> list[Result]:
        shape = operator.Shape(**{**sizes, "dtype": getattr(torch, sizes.get("dtype", dtype))})
        if kind == "study":
            return [operator.study(shape)]
        if kind == "tune":
            config = _best(operator.OPERATOR, shape, operator.tune(shape))
            return [operator.bench(shape, EmbeddingAllToAllConfig.parse(config))]
        return [operator.bench(shape, backwards=kind == "backward")]

    return _measure_all(shapes, measure, folder, header, file)


def run_experts_rank(
    folder: str,
    shapes: list[Result],
    dtype: str,
    part: str,
    config: str,
    header: Result,
    file: str | None,
) -> list[Result]:
    """Benchmark a mixture of experts of every shape.

    Args:
        folder: Folder in which progress is written.
        shapes: Sizes by name.
        dtype: Dtype of all shapes.
        part: A part of the layer, ``"all"``, or ``"tune"``: then the forward part with the best
            configuration.
        config: The configuration; empty for the default one.
        header: Entries of the file besides results.
        file: File for the results so far, on rank 0.
    """
    from interlace.bench import mixture_of_experts as operator
    from interlace.operators.mixture_of_experts.config import MixtureOfExpertsConfig

    parts = {"all": operator.PARTS, "tune": ("forward",)}.get(part, (part,))

    def measure(sizes: Result) -> list[Result]:
        shape = operator.Shape(**{**sizes, "dtype": getattr(torch, dtype)})
        text = _best(operator.OPERATOR, shape, operator.tune(shape)) if part == "tune" else config
        chosen = MixtureOfExpertsConfig.parse(text) if text else None
        return operator.bench(shape, chosen, parts=parts)

    return _measure_all(shapes, measure, folder, header, file)


def run_product_rank(
    folder: str,
    shapes: list[tuple[str, int, int, int]],
    dtype: str,
    kind: str,
    header: Result,
    file: str | None,
) -> list[Result]:
    """Benchmark every ``(operator, M, N, K)`` of the operators around a product.

    Args:
        folder: Folder in which progress is written.
        shapes: Operators and sizes.
        dtype: Dtype of all shapes.
        kind: ``"bench"``, ``"tune"`` (then benchmarked with the best configuration) or
            ``"transports"``.
        header: Entries of the file besides results.
        file: File for the results so far, on rank 0.
    """
    from interlace.bench import products, transports

    def measure(work: tuple[str, int, int, int]) -> list[Result]:
        shape = products.Shape(*work, getattr(torch, dtype))
        if kind == "transports":
            return [transports.compare(shape)]
        return [products.bench(shape, products.tune(shape) if kind == "tune" else None)]

    return _measure_all(shapes, measure, folder, header, file)


def run_batch_rank(
    folder: str,
    shapes: list[tuple[str, int, int, int, int]],
    dtype: str,
    header: Result,
    file: str | None,
) -> list[Result]:
    """Benchmark every ``(operator, B, M, N, K)`` of the operators on batches of products."""
    from interlace.bench import batches

    def measure(work: tuple[str, int, int, int, int]) -> list[Result]:
        operator, count, rows, columns, inner = work
        shape = batches.Shape(operator, rows, columns, inner, getattr(torch, dtype), count)
        return [batches.bench(shape)]

    return _measure_all(shapes, measure, folder, header, file)


def run_sweep_rank(
    folder: str,
    drawn: list[Draw],
    dtype: str,
    budget_s: float,
    header: Result,
    file: str | None,
) -> list[Result]:
    """Measure drawn calls until the time is over, as rank 0 sees it."""
    from interlace.bench import sweep

    def measure(draw: Draw) -> list[Result]:
        return [sweep.bench(draw, getattr(torch, dtype))]

    return _measure_all(_within(budget_s, drawn), measure, folder, header, file)


def _within(budget_s: float, drawn: list[Draw]) -> Iterator[Draw]:
    """Return drawn calls until the time is over, as rank 0 sees it. Each step is collective."""
    end = time.monotonic() + budget_s
    for draw in drawn:
        is_over = torch.tensor(float(time.monotonic() > end), device="cuda")
        dist.broadcast(is_over, 0)
        if is_over.item():
            return
        yield draw


def _measure_all(
    work: Iterable[Any],
    measure: Callable[[Any], list[Result]],
    folder: str,
    header: Result,
    file: str | None,
) -> list[Result]:
    """Measure one shape after the other; return all results."""
    results: list[Result] = []
    for sizes in work:
        results += measure(sizes)
        # The next shape's operands may need all of the GPU's memory.
        torch.cuda.empty_cache()
        if file is not None and dist.get_rank() == 0:
            document = {**header, "results": results}
            Path(file).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        advance(folder)
    return results


def _best(operator: str, shape: object, times: list[tuple[float, str]]) -> str:
    """Return the fastest configuration of those that were tuned.

    Raises:
        BackendError: There is none.
    """
    if not times:
        raise BackendError(
            f"{operator} {shape}: some configuration must run and be right; none did on this GPU."
        )
    return times[0][1]
