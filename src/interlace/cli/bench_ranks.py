"""What each rank of ``interlace bench`` and ``interlace tune`` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.cli.ranks import advance
from interlace.errors import BackendError


def run_rank(
    folder: str,
    shapes: list[tuple[int, int, int]],
    dtype: str,
    tune: bool,
    header: dict[str, Any],
    file: str | None,
) -> list[dict[str, Any]]:
    """Benchmark every ``(tokens, rows, columns)``, each with its best configuration if ``tune``;
    advances once a shape.

    After each shape, rank 0 writes ``header`` and the results so far to ``file``: a long run that
    is cut off is not lost.
    """
    from interlace.bench import gemv_all_reduce as operator
    from interlace.operators.gemv_all_reduce.config import GemvAllReduceConfig

    results = []
    for tokens, rows, columns in shapes:
        shape = operator.Shape(tokens, rows, columns, getattr(torch, dtype))
        config = None
        if tune:
            found = operator.tune(shape)
            if not found:
                raise BackendError(
                    f"{operator.OPERATOR} {shape}: some configuration must run and be right; none did "
                    "on this GPU."
                )
            config = GemvAllReduceConfig.parse(found[0][1])
        results.append(operator.bench(shape, config))
        _keep(results, header, file)
        advance(folder)
    return results


def run_embedding_rank(
    folder: str,
    shapes: list[dict[str, Any]],
    dtype: str,
    kind: str,
    header: dict[str, Any],
    file: str | None,
) -> list[dict[str, Any]]:
    """The same for ``embedding_all_to_all`` and shapes by name; ``dtype`` is that of shapes that
    name none.

    Args:
        kind: ``"forward"``, ``"backward"``, ``"tune"`` (then both directions, in the forward's
            result) or ``"study"``.
    """
    from interlace.bench import embedding_all_to_all as operator
    from interlace.operators.embedding_all_to_all.config import EmbeddingAllToAllConfig

    results: list[dict[str, Any]] = []
    for each in shapes:
        shape = operator.Shape(**{**each, "dtype": getattr(torch, each.get("dtype", dtype))})
        if kind == "study":
            results.append(operator.study(shape))
        elif kind == "tune":
            ((_, config),) = operator.tune(shape)
            results.append(operator.bench(shape, EmbeddingAllToAllConfig.parse(config)))
        else:
            results.append(operator.bench(shape, backwards=kind == "backward"))
        torch.cuda.empty_cache()  # the next shape's tables fill the GPU again
        _keep(results, header, file)
        advance(folder)
    return results


def run_experts_rank(
    folder: str,
    shapes: list[dict[str, Any]],
    dtype: str,
    part: str,
    config: str,
    header: dict[str, Any],
    file: str | None,
) -> list[dict[str, Any]]:
    """The same for ``mixture_of_experts``, with ``config`` if it is not empty.

    Args:
        part: one of ``PARTS``, ``"all"``, or ``"tune"``: then the forward part with the best
            configuration.
    """
    from interlace.bench import mixture_of_experts as operator
    from interlace.operators.mixture_of_experts.config import MixtureOfExpertsConfig

    results: list[dict[str, Any]] = []
    for each in shapes:
        shape = operator.Shape(**{**each, "dtype": getattr(torch, dtype)})
        if part == "tune":
            found = operator.tune(shape)
            if not found:
                raise BackendError(
                    f"{operator.OPERATOR} {shape}: some configuration must run and be right; none "
                    "did on this GPU."
                )
            config = found[0][1]
        chosen = MixtureOfExpertsConfig.parse(config) if config else None
        parts = {"all": operator.PARTS, "tune": ("forward",)}.get(part, (part,))
        results += operator.bench(shape, chosen, parts=parts)
        torch.cuda.empty_cache()
        _keep(results, header, file)
        advance(folder)
    return results


def run_product_rank(
    folder: str,
    shapes: list[tuple[str, int, int, int]],
    dtype: str,
    kind: str,
    header: dict[str, Any],
    file: str | None,
) -> list[dict[str, Any]]:
    """The same for the operators around a product: ``(operator, M, N, K)``.

    Args:
        kind: ``"bench"``, ``"tune"`` (then benchmarked with the best configuration) or
            ``"transports"``.
    """
    from interlace.bench import products, transports

    results: list[dict[str, Any]] = []
    for operator, rows, columns, inner in shapes:
        shape = products.Shape(operator, rows, columns, inner, getattr(torch, dtype))
        if kind == "transports":
            results.append(transports.compare(shape))
        else:
            results.append(products.bench(shape, products.tune(shape) if kind == "tune" else None))
        torch.cuda.empty_cache()
        _keep(results, header, file)
        advance(folder)
    return results


def run_batch_rank(
    folder: str,
    shapes: list[tuple[str, int, int, int, int]],
    dtype: str,
    header: dict[str, Any],
    file: str | None,
) -> list[dict[str, Any]]:
    """The same for batches of products before or after an all-to-all: ``(operator, B, M, N, K)``."""
    from interlace.bench import batches

    results: list[dict[str, Any]] = []
    for operator, count, rows, columns, inner in shapes:
        results.append(
            batches.bench(
                batches.Shape(operator, rows, columns, inner, getattr(torch, dtype), count)
            )
        )
        torch.cuda.empty_cache()
        _keep(results, header, file)
        advance(folder)
    return results


def _keep(results: list[dict[str, Any]], header: dict[str, Any], file: str | None) -> None:
    if file is not None and dist.get_rank() == 0:
        Path(file).write_text(
            json.dumps({**header, "results": results}, indent=1) + "\n", encoding="utf-8"
        )
