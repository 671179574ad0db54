"""Configurations of fused kernels around a matrix product: how a kernel cuts its work."""

from __future__ import annotations

import dataclasses

from interlace.tuning.configuration import Configuration

_AT_LEAST = {"num_stages": 1, "max_programs": 0, "group_m": 1, "interleave": 1, "stagger": 0}
_MOST = 1 << 20


@dataclasses.dataclass(frozen=True)
class GemmConfig(Configuration):
    """One way to run a fused kernel. Every rank must use the same one in a call.

    Attributes:
        block_m, block_n: rows and columns of the result that a tile covers; powers of two, at least
            16.
        block_k: of K, that a program loads at a time; a power of two, at least 16.
        num_warps: warps per program.
        num_stages: loads in flight in the software pipeline.
        max_programs: programs at most, each taking several tiles; 0 for one per SM.
        group_m: rows of tiles that are computed together, so that weights stay in the L2.
        interleave: tiles for one rank before the next rank's turn.
        stagger: over how much of the time that a tile takes programs begin one after another, in
            percent.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    max_programs: int = 0
    group_m: int = 8
    interleave: int = 8
    stagger: int = 100

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            self.require_power_of_two(name, 16, 1024)
        self.require_power_of_two("num_warps", 1, 32)
        for name, least in _AT_LEAST.items():
            self.require_between(name, least, _MOST)


@dataclasses.dataclass(frozen=True)
class SumConfig(GemmConfig):
    """The configuration of a kernel that adds up parts of all ranks; see :class:`GemmConfig`.

    ``interleave`` counts programs that begin a round of tiles with the same rank.
    """

    group_m: int = 4
    interleave: int = 1
