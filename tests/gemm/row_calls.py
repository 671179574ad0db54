"""Calls by which rows of batches of any size are compared, and their bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import interlace
import interlace.operators  # registers torch.ops.interlace

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Rows that ranks can share out evenly; the last ones repeat the first."""
    return torch.cat([x, x[:1].expand(-len(x) % dist.get_world_size(), -1)])


def _returned(received: torch.Tensor, rows: int) -> torch.Tensor:
    """The products of this rank's rows, back from the ranks that have got them."""
    returned = torch.empty_like(received)
    dist.all_to_all_single(returned, received)
    return returned[:rows]


def _all_to_all(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _returned(interlace.gemm_all_to_all(_padded(x), w, bias), len(x))


def _to_columns(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """This rank's columns of all ranks' rows: a row of the result is one row of each rank."""
    y = interlace.gemm_all_to_all_columns(x, w, bias)
    return y.view(dist.get_world_size(), len(x), -1).transpose(0, 1).flatten(1)


def gathered_product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the product of all ranks' columns, by one weight on all ranks."""
    w = w.repeat(1, dist.get_world_size())
    dist.broadcast(w, 0)
    shares = [len(part) for part in x.tensor_split(dist.get_world_size())]
    return interlace.all_to_all_gemm(x, w, bias, splits=shares)


def _normed(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y, residual, _ = torch.ops.interlace.gemm_all_reduce_norm(
        x, w, bias, None, None, None, "rms", 1e-5, None, None, False, None, None, "", "auto", ""
    )
    return torch.cat([y, residual], 1)


def bits(y: torch.Tensor) -> torch.Tensor:
    return y.view(torch.int32 if y.dtype == torch.float32 else torch.int16)


OPERATORS: dict[str, Run] = {
    "gemv_all_reduce": lambda x, w, bias: interlace.gemv_all_reduce(x, w, bias),
    "gemm_all_reduce": lambda x, w, bias: interlace.gemm_all_reduce(x, w, bias),
    "gemm_all_to_all": _all_to_all,
    "gemm_all_to_all_columns": _to_columns,
    "gemm_all_reduce_norm": _normed,
}
"""Calls of x, weight and bias by operator. Operators that share rows out among ranks are not here:
within CUDA graphs their rows are gathered by another collective.
"""
