"""``interlace.explain``: what ``impl="auto"`` would run, and why."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import ArgumentError
from interlace.units import ceil_div, next_power_of_2


def explain(operator: str, *arguments: Any, group: dist.ProcessGroup | None = None) -> str:
    """Say what ``impl="auto"`` would run for these arguments, and why. Nothing is computed or sent.

    Args:
        operator: its name, such as ``"gemm_reduce_scatter"``.
        arguments: the operator's tensors as it takes them: ``x, w``; or ``weights, indices, offsets``, of which this rank's stand
            for all ranks'. ``x, w`` of float8 need no scales here.
        group: as the operator takes it; default: the default process group, or this process on its own.

    Returns:
        One sentence: the implementation, the fused kernel's configuration, sizes, ranks, and the reason.

    Raises:
        ArgumentError: no such operator, or arguments that it would refuse.

    Example:
        >>> print(interlace.explain("gemv_all_reduce", x_shard_k, w_shard_k))
        gemv_all_reduce of x [1, 2048] and w [8192, 2048], bfloat16, on 4 ranks: fused (one_shot 4 512 4 1 0 0),
        because measured on ...
    """
    if operator not in _OPERATORS:
        raise ArgumentError(f"explain: operator must be one of {', '.join(sorted(_OPERATORS))}; got {operator!r}.")
    names, choose = _OPERATORS[operator]
    if len(arguments) != len(names):
        raise ArgumentError(f"explain: {operator} must have {', '.join(names)}; got {len(arguments)} arguments.")
    world_size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    return choose(*arguments, world_size)


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gemv_all_reduce(x: torch.Tensor, w: torch.Tensor, world_size: int) -> str:
    from interlace.ops.gemv_all_reduce.config import OPERATOR
    from interlace.ops.gemv_all_reduce.launch import choose
    from interlace.ops.gemv_all_reduce.validate import validate

    validate(x, w, None, "auto", None)
    choice = choose(
        tokens=x.shape[0] if x.dim() == 2 else 1,
        rows=w.shape[0],
        columns=w.shape[1],
        dtype=x.dtype,
        world_size=world_size,
        device=x.device,
    )
    how = f"fused ({choice.config})" if choice.impl == "fused" else choice.impl
    what = f"{OPERATOR} of x {list(x.shape)} and w {list(w.shape)}, {_name(x.dtype)}"
    return f"{what}, on {_ranks(world_size)}: {how}, because {choice.reason}."


def _product(operator: str, x: torch.Tensor, w: torch.Tensor, world_size: int) -> str:
    from interlace.products.operands import validate_matrices

    launch = importlib.import_module(f"interlace.ops.{operator}.launch")
    validate_matrices(operator, x, w)
    choice = launch.choose(
        rows=x.shape[0] * (world_size if operator == "all_gather_gemm" else 1),
        columns=w.shape[0],
        inner=w.shape[1],
        dtype=x.dtype,
        world_size=world_size,
        device=x.device,
    )
    how = f"fused ({choice.config})" if choice.impl == "fused" else choice.impl
    what = f"{operator} of x {list(x.shape)} and w {list(w.shape)}, {_name(x.dtype)}"
    return f"{what}, on {_ranks(world_size)}: {how}, because {choice.reason}."


def _embedding_all_to_all(weights: list[torch.Tensor], indices: torch.Tensor, offsets: torch.Tensor, world_size: int) -> str:
    from interlace.ops.embedding_all_to_all.config import OPERATOR
    from interlace.ops.embedding_all_to_all.launch import choose
    from interlace.ops.embedding_all_to_all.validate import batch_of, validate

    validate(weights, indices, offsets, None, "sum", None, "dense", "auto", None)
    if not weights:
        raise ArgumentError("explain: weights must have a table; got none.")
    batch = batch_of(len(weights), offsets, None)
    width, dtype = max(weight.shape[1] for weight in weights), weights[0].dtype
    lookups = next_power_of_2(ceil_div(indices.shape[0], max(1, len(weights) * batch)))
    choice = choose(
        tables=len(weights), width=width, batch=batch, pooling_factor=lookups, dtype=dtype, world_size=world_size,
        device=indices.device,
    )  # fmt: skip
    tables = "1 table" if len(weights) == 1 else f"{len(weights)} tables"
    what = f"{OPERATOR} of {tables} a rank, at most {width} wide, {_name(dtype)}, batch {batch}, about {lookups} lookups a bag"
    return f"{what}, on {_ranks(world_size)}: fused ({choice.config}), because {choice.reason}."


def _mixture_of_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    world_size: int,
) -> str:
    from interlace.ops.mixture_of_experts.config import OPERATOR
    from interlace.ops.mixture_of_experts.launch import choose
    from interlace.ops.mixture_of_experts.validate import validate

    validate(x, experts, weights, w_in, w_out, None, "auto", None, world_size)
    tokens, hidden = x.shape
    count, ffn, top_k = world_size * w_in.shape[0], w_in.shape[1], experts.shape[1]
    choice = choose(
        tokens=tokens, hidden=hidden, ffn=ffn, experts=count, top_k=top_k, dtype=x.dtype, world_size=world_size, device=x.device
    )
    how = f"fused ({choice.config})" if choice.impl == "fused" else choice.impl
    what = f"{OPERATOR} of {tokens} tokens a rank, top {top_k} of {count} experts {hidden} x {ffn}, {_name(x.dtype)}"
    return f"{what}, on {_ranks(world_size)}: {how}, because {choice.reason}."


_OPERATORS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "gemv_all_reduce": (("x", "w"), _gemv_all_reduce),
    **{
        name: (("x", "w"), functools.partial(_product, name))
        for name in ("all_gather_gemm", "gemm_all_reduce", "gemm_all_to_all", "gemm_reduce_scatter")
    },
    "embedding_all_to_all": (("weights", "indices", "offsets"), _embedding_all_to_all),
    "mixture_of_experts": (("x", "experts", "weights", "w_in", "w_out"), _mixture_of_experts),
}
