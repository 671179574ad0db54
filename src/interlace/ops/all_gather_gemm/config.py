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
        push_programs: programs that send this rank's rows before others take their processors; 0 to have copy engines fetch
            the peers' rows, which takes no processor.
        pieces: copies that fetch a peer's rows; the product begins with a piece when it is here.
    """

    group_m: int = 16
    push_programs: int = 0
    pieces: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.push_programs <= 1024:
            raise ArgumentError(f"AllGatherGemmConfig: push_programs must be between 0 and 1024; got {self.push_programs}.")
        if not 1 <= self.pieces <= 64:
            raise ArgumentError(f"AllGatherGemmConfig: pieces must be between 1 and 64; got {self.pieces}.")
