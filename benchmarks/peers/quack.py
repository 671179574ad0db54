"""QuACK's all-gather, by copy engines, within a product in CuTe that waits for each rank's rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.case import Call, Case
from benchmarks.peers.driver import Refused
from benchmarks.peers.products import WEIGHTS

NAME, DISTRIBUTION = "QuACK", "quack-kernels"
INSTALL = "pip install quack-kernels==0.6.5 'nvidia-cutlass-dsl[cu13]==4.8.1'"

TILES = (
    (128, 256, 2, 1, False), (128, 192, 2, 1, False), (128, 160, 2, 1, True),
    (256, 128, 1, 1, False),
)  # fmt: skip
"""Rows and columns of a tile, tiles of a cluster along both, and whether two warp groups take
turns. Those that QuACK's own benchmark has for Hopper."""


def all_gather_gemm(case: Case) -> dict[str, Call]:
    """Return a call for each tile that divides a rank's rows."""
    inputs = case.inputs
    own = inputs.rows // dist.get_world_size()
    tiles = [tile for tile in TILES if own % (tile[0] * tile[2]) == 0]
    if not tiles:
        raise Refused(f"no tile divides {own} rows of a rank")
    from quack.distributed import AllGatherRunner
    from quack.gemm import gemm

    runner = AllGatherRunner(own, inputs.inner, inputs.shard.dtype, device=inputs.shard.device)
    y = torch.empty_like(inputs.y)

    def run(i: int, tile: Any) -> torch.Tensor:
        *sizes, takes_turns = tile
        with runner.gather(inputs.shard) as (rows, arguments):
            gemm(
                rows, inputs.weights[i % WEIGHTS], y, None, None, *sizes, pingpong=takes_turns,
                ag_args=arguments,
            )  # fmt: skip
        return y

    return {
        f"QuACK, {tile[0]} x {tile[1]}": functools.partial(run, tile=tile) for tile in tiles
    }  # fmt: skip


WAYS = {"all-gather + GEMM": all_gather_gemm}
