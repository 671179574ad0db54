"""How ``all_gather_gemm`` cuts its work; chosen by the tuned table, or given by the caller."""

from __future__ import annotations

import dataclasses

from interlace.products.config import ProductConfig

OPERATOR = "all_gather_gemm"


@dataclasses.dataclass(frozen=True)
class AllGatherGemmConfig(ProductConfig):
    """One way to run the fused kernel of ``all_gather_gemm``; see :class:`ProductConfig` for the fields."""
