"""The configuration of ``gemm_all_reduce_norm``'s fused kernel."""

from __future__ import annotations

import dataclasses

from interlace.tuning.configuration import Configuration, between, power_of_two
from interlace.units import ceil_div, next_power_of_2

MOST_ROWS = 256
"""Rows (tokens) up to which the operator is faster than the sum and the norm one after the other:
with more, both are bound by bytes, and nothing is left to hide.
"""

MOST_FUSED_ROWS = 64
"""Rows that the fused kernel takes: its receivers keep a token's part of the sums in registers."""

_LEAST_COLUMNS = 256
_WARP = 32


@dataclasses.dataclass(frozen=True)
class GemmAllReduceNormConfig(Configuration):
    """One way to run the fused kernel. Every rank of a call must use the same one.

    Attributes:
        block_n: Rows of the weight that a tile covers; a power of two.
        block_k: Columns of the weight that a program loads at a time; a power of two.
        num_warps: Warps per program.
        num_stages: Loads in flight in the software pipeline (with several tokens).
        max_programs: Maximum number of programs that multiply, which then compute several tiles
            each; 0 for one program per tile.
        max_registers: Maximum number of registers per thread; 0 for the compiler's choice.
        columns: Columns of the sums that a program receives and normalises; a power of two; 0 for
            as few as there are processors for.
    """

    block_n: int = power_of_two(4, 1, 1024)
    block_k: int = power_of_two(512, 16, 1 << 16)
    num_warps: int = power_of_two(1, 1, 32)
    num_stages: int = between(1, 1, 32)
    max_programs: int = between(0, 0, 1 << 20)
    max_registers: int = between(0, 0, 255)
    columns: int = between(0, 0, 1 << 16)

    def received_columns(self, *, rows: int, tokens: int, most_programs: int) -> int:
        """Return the columns that a program receives, a power of two.

        Args:
            rows: N, the columns of the sums (rows of the weight).
            tokens: B, the rows of the sums.
            most_programs: Number of receiving programs that can run at once.
        """
        # Each thread must have a column of its own.
        threads = _WARP * self.num_warps
        if self.columns:
            return max(next_power_of_2(self.columns), threads)
        columns = max(_LEAST_COLUMNS, 2 * threads)
        while tokens * ceil_div(rows, columns) > most_programs and columns < rows:
            columns *= 2
        return max(min(columns, next_power_of_2(rows)), threads)
