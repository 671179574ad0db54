"""Configurations of fused kernels around a matrix product: how a kernel cuts its work."""

from __future__ import annotations

import dataclasses

from interlace.tuning.configuration import Configuration, between, power_of_two

_MOST = 1 << 20  # any number beyond this is a mistake of the caller's


@dataclasses.dataclass(frozen=True)
class GemmConfig(Configuration):
    """One way to run a fused kernel. Every rank must use the same one in a call.

    Attributes:
        block_m, block_n: Rows and columns of the result that a tile covers; powers of two, at least
            16.
        block_k: Of K, that a program loads at a time; a power of two, at least 16.
        num_warps: Warps per program.
        num_stages: Loads in flight in the software pipeline.
        max_programs: Programs at most, each taking several tiles; 0 for one per SM.
        group_m: Rows of tiles that are computed together, so that weights stay in the L2.
        interleave: Tiles for one rank before the next rank's turn.
        stagger: Over how much of the time that a tile takes programs begin one after another, in
            percent.
    """

    block_m: int = power_of_two(128, 16, 1024)
    block_n: int = power_of_two(256, 16, 1024)
    block_k: int = power_of_two(64, 16, 1024)
    num_warps: int = power_of_two(8, 1, 32)
    num_stages: int = between(3, 1, _MOST)
    max_programs: int = between(0, 0, _MOST)
    group_m: int = between(8, 1, _MOST)
    interleave: int = between(8, 1, _MOST)
    stagger: int = between(100, 0, _MOST)


@dataclasses.dataclass(frozen=True)
class SumConfig(GemmConfig):
    """The configuration of a kernel that adds up parts of all ranks; see :class:`GemmConfig`.

    ``interleave`` counts programs that begin a round of tiles with the same rank.
    """

    group_m: int = between(4, 1, _MOST)
    interleave: int = between(1, 1, _MOST)
