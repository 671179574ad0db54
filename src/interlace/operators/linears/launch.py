"""The launch of ``linears``: its grid and its kernel's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch
from interlace.operators.linears import reference
from interlace.operators.linears.config import LinearsConfig
from interlace.units import ceil_div, next_power_of_2

MOST_WEIGHTS = 3


def multiply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    config: LinearsConfig,
) -> list[torch.Tensor]:
    """Compute ``x [B, K] @ w.T, + bias`` for each weight ``[N, K]``, in one kernel.

    Args:
        x: Up to 16 tokens.
        weights: One to three; rows that are not contiguous are copied.
        biases: A vector ``[N]`` for each weight, or None for all.
        config: The tiles.

    Returns:
        A tensor ``[B, N]`` for each weight.
    """
    require(x.device.type)
    from interlace.gemm.kernels.gemv import Tiling
    from interlace.operators.linears.kernel import linears

    x, *weights = (
        tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (x, *weights)
    )
    (tokens, columns), rows = x.shape, [w.shape[0] for w in weights]
    if not (tokens and columns and any(rows)):
        return reference.linears(x, weights, biases)
    results = [x.new_empty([tokens, count]) for count in rows]
    tiles = [ceil_div(count, config.block_n) for count in rows]
    # The kernel has arguments for three weights; none of its programs is for an absent one.
    absent = MOST_WEIGHTS - len(weights)
    arguments: dict[str, Any] = {
        "x": x,
        "B": tokens,
        "K": columns,
        "stride_x": x.stride(0),
        "first_1": tiles[0],
        "first_2": sum(tiles[:2]),
    }
    several: dict[str, list[Any]] = {
        "w": list(weights),
        "bias": list(biases),
        "y": results,
        "N": rows,
        "stride": [w.stride(0) for w in weights],
    }
    for name, values in several.items():
        for index, tensor in enumerate([*values, *values[-1:] * absent]):
            arguments[f"{name}_{index}"] = tensor
    tiling = Tiling(
        block_n=config.block_n,
        block_b=next_power_of_2(tokens),
        block_k=config.block_k,
        even=all(count % config.block_n == 0 for count in rows)
        and tokens == next_power_of_2(tokens),
        even_k=columns > 0 and columns % config.block_k == 0,
        word_values=1,
        # The interpreter cannot multiply bfloat16.
        precision="upcast" if x.device.type == "cpu" else "ieee",
    )
    constants = {
        "TILING": tiling,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    with torch.cuda.device(x.device if x.device.type == "cuda" else -1):
        Launch(linears, (sum(tiles),), arguments, constants)()
    return results
