"""The configurations of ``gemm_all_reduce``'s kernels: ``"fused"``, ``"gemv"``, and with a norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from interlace.comm import MAX_PROGRAMS
from interlace.gemm import invariance
from interlace.gemm.config import SumConfig
from interlace.tuning.configuration import Configuration, between, one_of, power_of_two
from interlace.units import ceil_div, next_power_of_2

PROTOCOLS = ("one_shot", "two_phase")

# Above this many packed words from a rank, the two-phase protocol's fewer bytes are worth its two
# signals (8 tokens of 8192 rows on four H200s).
_ONE_SHOT_WORDS = 8 * 8192 * 3

_NARROW_TILE = 16
"""Rows of the smallest tile of the matrix unit, which one warp multiplies."""

_MOST_TOKENS_OF_NARROW_TILES = 16
"""More tokens are read too often by narrow tiles, each of which reads all of them."""

_PROCESSORS = 132
"""Streaming multiprocessors of an H100 or an H200. Where each has one narrow tile at most, it needs
more loads in flight.
"""

_FEWEST_COLUMNS_OF_WIDE_TILES = 6144
"""With fewer columns, which are rows of the weight, tiles of 64 of them leave many processors
without one.
"""


MOST_NORMED_ROWS = 256
"""Rows (tokens) for which times of ``gemm_all_reduce_norm`` are predicted."""

MOST_PUSHED_BYTES = 32 << 20
"""Bytes of parts that arrive at a rank up to which, with more rows than that, one kernel behind the
product is faster than the sum and the norm one after the other (two H200s, decision 0020).
"""

MOST_FUSED_ROWS = 64
"""Rows that its fused kernel takes: receivers keep a token's part of the sums in registers."""

_LEAST_COLUMNS = 256
_WARP = 32


@dataclasses.dataclass(frozen=True)
class GemmAllReduceConfig(SumConfig):
    """One way to run the fused kernel of ``gemm_all_reduce``."""


@dataclasses.dataclass(frozen=True)
class GemvAllReduceConfig(Configuration):
    """One way to run the kernel for few rows, ``impl="gemv"``. Every rank of a call must use the
    same one.

    Attributes:
        protocol: ``"one_shot"`` (packed words to every peer) or ``"two_phase"`` (owner reduces,
            then broadcasts).
        block_n: Rows of the weight that a tile covers; a power of two.
        block_k: Columns of the weight that a program loads at a time; a power of two.
        num_warps: Warps per program.
        num_stages: Loads in flight in the software pipeline (with several tokens).
        max_programs: Maximum number of programs, which then compute several tiles each; 0 for one
            program per tile.
        max_registers: Maximum number of registers per thread, so that more programs are resident;
            0 for the compiler's choice.
    """

    protocol: str = one_of("one_shot", PROTOCOLS)
    block_n: int = power_of_two(4, 1, 1024)
    block_k: int = power_of_two(1024, 16, 1 << 16)
    num_warps: int = power_of_two(4, 1, 32)
    num_stages: int = between(1, 1, 32)
    max_programs: int = between(0, 0, 1 << 20)
    max_registers: int = between(0, 0, 255)

    @staticmethod
    def regime(sizes: Mapping[str, int]) -> object:
        """Return which code suits a call's sizes: that of a single token, narrow tiles, or others.

        A single token's products are added within threads; those of several tokens are multiplied
        in tiles, for which a tuned configuration for one token takes 1.7 times as long as reading
        the weight. Several tokens were tuned with weights of 8192 rows, whose wide tiles take up to
        1.7 times as long as narrow ones where there are fewer rows.
        """
        tokens, columns = sizes["rows"], sizes["columns"]
        if tokens <= 1:
            return "one token"
        few = tokens <= _MOST_TOKENS_OF_NARROW_TILES and columns < _FEWEST_COLUMNS_OF_WIDE_TILES
        return "narrow tiles" if few else "wide tiles"


@dataclasses.dataclass(frozen=True)
class GemmAllReduceNormConfig(Configuration):
    """One way to run the fused kernel of ``gemm_all_reduce_norm``. Every rank of a call must use
    the same one.

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


FEWEST_TOKENS_BY_MATRIX_UNIT = 2
"""Tokens of the smallest tiles of batch-invariant calls. Such a tile is multiplied by the matrix
unit, as larger ones are, and two of its tokens share a word, so parts are rounded alike.
"""

FEWEST_TOKENS_OF_ONE_INSTRUCTION = 16
"""The same where tiles of fewer tokens may be multiplied by another instruction, with other bits.
"""


def block_tokens(tokens: int, fewest: int = 1) -> int:
    """Return the number of tokens that a tile covers: a power of two, ``fewest`` to 64."""
    return min(64, max(fewest, next_power_of_2(tokens)))


def fewest_tokens(device: torch.device, dtype: torch.dtype) -> int:
    """Return the tokens of the smallest tiles of batch-invariant calls on a device."""
    if invariance.has_one_arithmetic(device, dtype):
        return FEWEST_TOKENS_BY_MATRIX_UNIT
    return FEWEST_TOKENS_OF_ONE_INSTRUCTION


def default_config(
    *, rows: int, columns: int, world_size: int, itemsize: int
) -> GemvAllReduceConfig:
    """Return a configuration for sizes that have not been measured.

    Its tiles fit the shared memory of small GPUs too.

    Args:
        rows, columns: M and N of the product: tokens, and rows of the weight.
        itemsize: Bytes of an element.
    """
    if rows <= 1:
        block_n = 4
        while columns > block_n * MAX_PROGRAMS:
            block_n *= 2
        return GemvAllReduceConfig(
            "one_shot", block_n=block_n, block_k=1024 // itemsize, num_warps=1
        )
    if rows * columns * max(1, world_size - 1) > _ONE_SHOT_WORDS:
        return GemvAllReduceConfig("two_phase", block_n=64, block_k=256 // itemsize, num_stages=3)
    # Narrow tiles of one warp read the weight fastest (decision 0005). The tokens are read again
    # for each tile, so more of them need wider tiles, where the weight has rows for these. Elements
    # of four bytes are multiplied without tensor cores, for which a warp may be too little.
    is_one_wave = columns <= _NARROW_TILE * _PROCESSORS
    most_rows = _MOST_TOKENS_OF_NARROW_TILES * (2 if is_one_wave else 1)
    if rows > most_rows or itemsize > 2:
        return GemvAllReduceConfig("one_shot", block_n=32, block_k=256 // itemsize, num_stages=3)
    return GemvAllReduceConfig(
        "one_shot",
        block_n=_NARROW_TILE if rows <= 8 or is_one_wave else 2 * _NARROW_TILE,
        block_k=512 // itemsize,
        num_warps=1 if rows <= 8 else 2,
        num_stages=5 if is_one_wave and rows <= 16 else 4,
    )
