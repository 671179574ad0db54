"""What each rank of ``interlace bench`` and ``interlace tune`` does."""

from __future__ import annotations

from typing import Any

import torch

from interlace.cli.ranks import advance
from interlace.errors import BackendError


def run_rank(folder: str, shapes: list[tuple[int, int, int]], dtype: str, tune: bool) -> list[dict[str, Any]]:
    """Benchmark every ``(tokens, rows, columns)``, each with its best configuration if ``tune``; advances once a shape."""
    from interlace.bench import gemv_all_reduce as operator
    from interlace.ops.gemv_all_reduce.config import GemvAllReduceConfig

    results = []
    for tokens, rows, columns in shapes:
        shape = operator.Shape(tokens, rows, columns, getattr(torch, dtype))
        config = None
        if tune:
            found = operator.tune(shape)
            if not found:
                raise BackendError(f"gemv_all_reduce {shape}: some configuration must run and be right; none did on this GPU.")
            config = GemvAllReduceConfig.parse(found[0][1])
        results.append(operator.bench(shape, config))
        advance(folder)
    return results
