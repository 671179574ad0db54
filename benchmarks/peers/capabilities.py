"""What peers are timed at, with its sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from benchmarks.peers.case import Case, Sizes
from benchmarks.peers.experts import EXPERT_SIZES, experts, experts_both
from benchmarks.peers.products import (
    ALL_GATHER_SIZES,
    ALL_REDUCE_SIZES,
    NORM_SIZES,
    REDUCE_SCATTER_SIZES,
    all_gather_gemm,
    gemm_all_reduce,
    gemm_all_reduce_norm,
    gemm_reduce_scatter,
)
from benchmarks.peers.tables import TABLE_SIZES, tables, tables_both

CAPABILITIES: dict[str, tuple[Callable[..., Case], tuple[Sizes, ...]]] = {
    "all-gather + GEMM": (all_gather_gemm, ALL_GATHER_SIZES),
    "GEMM + reduce-scatter": (gemm_reduce_scatter, REDUCE_SCATTER_SIZES),
    "GEMM + all-reduce": (gemm_all_reduce, ALL_REDUCE_SIZES),
    "GEMM + all-reduce + residual + norm": (gemm_all_reduce_norm, NORM_SIZES),
    "experts, forward": (experts, EXPERT_SIZES),
    "experts, forward + backward": (experts_both, EXPERT_SIZES),
    "tables, forward": (tables, TABLE_SIZES),
    "tables, forward + backward": (tables_both, TABLE_SIZES),
}
"""For each capability the function that makes a case of sizes, and the sizes."""


def cases(capability: str, sizes: Sizes | None = None) -> Iterator[functools.partial[Case]]:
    """Yield functions that make a capability's cases, or the one of ``sizes``."""
    make, known = CAPABILITIES[capability]
    for each in known if sizes is None else (sizes,):
        yield functools.partial(make, *each)
