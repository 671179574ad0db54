"""How ``gemm_all_reduce`` cuts its work; chosen by the tuned table, or given by the caller."""

from __future__ import annotations

import dataclasses

from interlace.gemm.config import ProductConfig

OPERATOR = "gemm_all_reduce"


@dataclasses.dataclass(frozen=True)
class GemmAllReduceConfig(ProductConfig):
    """One way to run the fused kernel of ``gemm_all_reduce``; see :class:`ProductConfig` for the
    fields.

    ``interleave`` counts programs that begin a round of tiles with the same rank.
    """

    group_m: int = 4
    interleave: int = 1
