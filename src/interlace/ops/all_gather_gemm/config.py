"""How ``all_gather_gemm`` cuts its work; chosen by the tuned table, or given by the caller."""

from __future__ import annotations

import dataclasses

from interlace.errors import ArgumentError
from interlace.products.config import ProductConfig

OPERATOR = "all_gather_gemm"


@dataclasses.dataclass(frozen=True)
class AllGatherGemmConfig(ProductConfig):
    """One way to run the fused kernel of ``all_gather_gemm``; see :class:`ProductConfig` for the other fields.

    Attributes:
        push_programs: programs that send this rank's rows before others take their processors.
    """

    group_m: int = 16
    push_programs: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.push_programs <= 1024:
            raise ArgumentError(f"AllGatherGemmConfig: push_programs must be between 1 and 1024; got {self.push_programs}.")
