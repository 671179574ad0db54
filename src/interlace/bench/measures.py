"""One function for each kind of work of ``interlace bench`` and ``interlace tune``, for every rank.

Each is collective, takes the sizes of one shape, and returns its results. A command binds the
options by name and sends the function to the ranks, which are processes: it can be pickled. A
benchmark is imported when it runs.
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.bench.draws import Draw

Result = dict[str, Any]


def measure_gemv(sizes: tuple[int, int, int], *, dtype: str, tunes: bool) -> list[Result]:
    """Benchmark an all-reduce of ``(M, N, K)`` with few rows, with the best configuration if
    ``tunes``.
    """
    from interlace.bench import gemv_all_reduce as operator

    shape = operator.GemvShape(operator.OPERATOR, *sizes, getattr(torch, dtype))
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
    shape = batches.BatchShape(operator, rows, columns, inner, getattr(torch, dtype), batch=count)
    return [batches.bench(shape)]


def measure_batch_invariance(work: tuple[str, int, int, int], *, dtype: str) -> list[Result]:
    """Benchmark ``(operator, tokens, N, K)`` with and without batch invariance."""
    from interlace.bench import batch_invariance

    return [batch_invariance.bench(*work, getattr(torch, dtype))]


def measure_draw(draw: Draw, *, dtype: str) -> list[Result]:
    """Measure every implementation of one drawn call."""
    from interlace.bench import sweep

    return [sweep.bench(draw, getattr(torch, dtype))]
