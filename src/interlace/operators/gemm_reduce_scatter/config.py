"""How ``gemm_reduce_scatter`` cuts its work; chosen by the tuned table, or given by the caller."""

from __future__ import annotations

import dataclasses

from interlace.gemm.config import ProductConfig

OPERATOR = "gemm_reduce_scatter"


@dataclasses.dataclass(frozen=True)
class GemmReduceScatterConfig(ProductConfig):
    """One way to run the fused kernel of ``gemm_reduce_scatter``; see :class:`ProductConfig` for
    the fields.

    ``interleave`` counts programs that begin a round of tiles with the same rank.
    """

    group_m: int = 4
    interleave: int = 1
