"""How ``all_gather_gemm`` cuts its work; chosen by the tuned table, or given by the caller."""

from __future__ import annotations

import dataclasses

from interlace.errors import ArgumentError
from interlace.gemm.config import ProductConfig

OPERATOR = "all_gather_gemm"
IMPLS = ("auto", "fused", "pushed", "chunked", "unfused")


@dataclasses.dataclass(frozen=True)
class AllGatherGemmConfig(ProductConfig):
    """One way to run the fused kernel of ``all_gather_gemm``; see :class:`ProductConfig` for the
    other fields.

    Attributes:
        stage_first: 1 to give staging this rank's rows for the others priority over the product; 0
            to let it share.
    """

    group_m: int = 16
    stage_first: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage_first not in (0, 1):
            raise ArgumentError(
                f"AllGatherGemmConfig: stage_first must be 0 or 1; got {self.stage_first}."
            )
