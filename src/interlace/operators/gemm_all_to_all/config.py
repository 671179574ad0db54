"""How ``gemm_all_to_all`` cuts its work; chosen by the tuned table, or given by the caller."""

from __future__ import annotations

import dataclasses

from interlace.gemm.config import ProductConfig

OPERATOR = "gemm_all_to_all"
BATCH = "bmm_all_to_all"
"""The same for a batch of products."""


@dataclasses.dataclass(frozen=True)
class GemmAllToAllConfig(ProductConfig):
    """One way to run the fused kernel of ``gemm_all_to_all``; see :class:`ProductConfig` for the
    fields.
    """
