"""The configuration of ``mixture_of_experts``, tuned or set by the caller."""

from __future__ import annotations

import dataclasses
import math

from interlace.costs.mixture_of_experts import ExpertsCall
from interlace.errors import ArgumentError
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.operators.mixture_of_experts.layout import ROWS
from interlace.tuning.configuration import Configuration, between, one_of, power_of_two

OPERATOR = "mixture_of_experts"


@dataclasses.dataclass(frozen=True)
class MixtureOfExpertsConfig(Configuration):
    """One way to run the fused kernels. Every rank of a call must use the same one.

    Of float8 weights, a step has 128 elements, as many as share a scale. A tile of ``impl="fused"``
    has 128 columns, one of ``impl="decode"`` at most as many lines; where the first product becomes
    float8, a program computes twice as many lines of gate and up one after another.

    In ``impl="decode"`` a tile's rows are those of weights: it has ``block_n`` of them and
    ``block_m`` tokens, loads by pointers, and neither groups tiles nor staggers programs.

    Attributes:
        block_m: Rows of a tile of every product; a power of two from 16 to 128.
        block_n: Columns of a tile; a power of two from 32 on.
        block_k: Steps along the products' inner dimension; a power of two from 16 on.
        group_m: Tiles of rows that share columns of weights before the next columns, so that these
            are in the L2.
        num_warps: Warps per program of the products.
        num_stages: Steps in flight in the products' software pipeline; in decoding at most that
            many, as there is shared memory for them.
        programs: Programs that compute; 0 for one per SM, in decoding and with float8 weights for
            as many as fit.
        push_programs: Programs that send tokens, in front of those and at the same time; in
            decoding at most that many, and at most 64.
        push_rows: Rows of one expert that such a program sends at a time; a power of two.
        sum_programs: Maximum number of programs that add results.
        stagger: The programs of the second product start one after another, over this percentage of
            the time that a tile takes.
        tail: In decoding, rows that an expert's last tile may have beyond ``block_m``, so that few
            more rows do not need another tile; 0 or a power of two from 16 on.
    """

    block_m: int = power_of_two(128, 16, ROWS)
    block_n: int = power_of_two(256, 32, 512)
    block_k: int = power_of_two(64, 16, 512)
    group_m: int = between(8, 1, 64)
    num_warps: int = power_of_two(8, 1, 32)
    num_stages: int = between(3, 1, 8)
    programs: int = between(0, 0, 2048)
    push_programs: int = between(32, 1, 2048)
    push_rows: int = power_of_two(64, 1, 1024)
    sum_programs: int = between(2112, 1, 4096)
    stagger: int = between(100, 0, 1000)
    tail: int = one_of(0, (0, 16, 32, 64, 128))

    def require_blocks(self, impl: str) -> None:
        """Refuse a configuration with which kernels of float8 weights do not work.

        Raises:
            ArgumentError: Tiles or steps are not of as many elements as share a scale.
        """
        is_decode = impl == "decode"
        has_block = self.block_n <= SCALE_BLOCK if is_decode else self.block_n == SCALE_BLOCK
        if self.block_k != SCALE_BLOCK or not has_block or self.tail:
            columns = f"block_n {'of at most' if is_decode else '='} {SCALE_BLOCK}"
            raise ArgumentError(
                f"{OPERATOR}: config must have block_k = {SCALE_BLOCK}, {columns} and tail = 0 for "
                f"float8 weights; got {self}."
            )


# From this inner width on, tiles take twice as long to compute as the links take for all programs'
# tiles, so the links are not crowded.
_CALM = 4096


def untuned_config(impl: str, call: ExpertsCall) -> MixtureOfExpertsConfig:
    """Return the configuration of an implementation for sizes that have not been measured.

    With the tile of the fused kernels Triton is as fast as cuBLAS on H200s.
    """
    if impl == "decode":
        return _decode_config(call)
    stagger = 100 if call.ffn < _CALM else 0
    if call.is_float8:
        return MixtureOfExpertsConfig(
            block_m=64, block_n=SCALE_BLOCK, block_k=SCALE_BLOCK, group_m=16, num_warps=4,
            num_stages=4, push_programs=128, push_rows=32, stagger=stagger,
        )  # fmt: skip
    if call.itemsize == 4:
        return MixtureOfExpertsConfig(
            block_m=64, block_n=64, block_k=32, num_warps=4, stagger=stagger
        )
    return MixtureOfExpertsConfig(stagger=stagger)


def _decode_config(call: ExpertsCall) -> MixtureOfExpertsConfig:
    rows = call.tokens * call.world_size * call.top_k / call.experts
    # Nearly all experts have at most two standard deviations more rows than the mean; a second tile
    # of rows would read the weights again, though from the L2.
    most_rows = rows + 2 * math.sqrt(rows)
    if call.itemsize == 4:
        return MixtureOfExpertsConfig(
            block_m=16, block_n=64, block_k=32, num_warps=4, push_programs=64
        )
    if call.is_float8:
        # Faster than tiles of more rows in all of three layers, up to 64 rows an expert (decision
        # 0031): a step's sum is in registers beside the whole one.
        return MixtureOfExpertsConfig(
            block_m=16 if most_rows <= 16 else 32,
            block_n=SCALE_BLOCK,
            block_k=SCALE_BLOCK,
            num_warps=4,
            num_stages=3,
            push_programs=64,
        )
    if most_rows > 32:
        # Long pipelines of one program per processor are worth their ramp if K is long; else short
        # ones of three (decision 0022). There, a tail keeps all but a few experts at one tile.
        tiles = (64, 128, 64, 4, 3, 0)
        if min(call.hidden, call.ffn) >= _CALM:
            tiles = (
                (64, 128, 128, 8, 4, 0) if most_rows <= 64
                else (64, 128, 128, 8, 4, 32) if most_rows <= 96
                else (128, 128, 64, 8, 6, 32) if most_rows <= 160
                else (128, 256, 64, 8, 4, 0)
            )  # fmt: skip
        block_m, block_n, block_k, warps, stages, tail = tiles
        return MixtureOfExpertsConfig(
            block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages,
            push_programs=64, tail=tail,
        )  # fmt: skip
    return MixtureOfExpertsConfig(
        block_m=16 if most_rows <= 16 else 32,
        block_n=64,
        block_k=128,
        num_warps=4,
        num_stages=3,
        push_programs=64,
    )
