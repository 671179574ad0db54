"""``interlace.explain``: what ``impl="auto"`` would run, and why."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import ArgumentError
from interlace.units import ceil_div, next_power_of_2


def explain(
    operator: str,
    *arguments: Any,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> str:
    """Say what ``impl="auto"`` would run for these arguments, and why. Nothing is computed or sent.

    Some implementations cannot run every call: a mapped output takes no bias, for one. So give here
    what the call is given.

    Args:
        operator: its name, such as ``"gemm_reduce_scatter"``.
        arguments: the operator's tensors as it takes them: ``x, w``; or ``weights, indices,
            offsets``, of which this rank's stand for all ranks'. ``x, w`` of float8 need no scales
            here.
        bias, out_dtype, splits, input_splits, output_splits: as the operator takes them, if it
            does. This rank's ``input_splits`` and ``output_splits`` stand for all ranks'.
        group: as the operator takes it; default: the default process group, or this process on its
            own.

    Returns:
        One sentence: the implementation, the fused kernel's configuration, sizes, ranks, and the
        reason. A group keeps mapped outputs of eight sizes; a call with a ninth runs the unfused
        pair, which is not foreseen here.

    Raises:
        ArgumentError: no such operator, or arguments that it does not have or would refuse.

    Example:
        >>> print(interlace.explain("gemv_all_reduce", x_shard_k, w_shard_k))
        gemv_all_reduce of x [1, 2048] and w [8192, 2048], bfloat16, on 4 ranks: fused (one_shot 4
        512 4 1 0 0), because measured on ...
    """
    if operator not in _OPERATORS:
        raise ArgumentError(
            f"explain: operator must be one of {', '.join(sorted(_OPERATORS))}; got {operator!r}."
        )
    names, optional, choose = _OPERATORS[operator]
    if len(arguments) != len(names):
        raise ArgumentError(
            f"explain: {operator} must have {', '.join(names)}; got {len(arguments)} arguments."
        )
    options = {
        "bias": bias,
        "out_dtype": out_dtype,
        "splits": splits,
        "input_splits": input_splits,
        "output_splits": output_splits,
    }
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in optional:
            raise ArgumentError(
                f"explain: arguments of {operator} must be {', '.join((*names, *optional))}; got "
                f"{name}."
            )
    world_size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    return choose(*arguments, world_size, **given)


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gemv_all_reduce(
    x: torch.Tensor, w: torch.Tensor, world_size: int, bias: torch.Tensor | None = None
) -> str:
    from interlace.operators.gemv_all_reduce.config import OPERATOR
    from interlace.operators.gemv_all_reduce.launch import choose
    from interlace.operators.gemv_all_reduce.validate import validate

    validate(x, w, bias, "auto", None)
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


def _product(
    operator: str,
    x: torch.Tensor,
    w: torch.Tensor,
    world_size: int,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **splits: Sequence[int],
) -> str:
    from interlace.gemm.choice import IMPLS, resolve, unmet
    from interlace.gemm.operands import FLOAT8, Operands, output_dtype, validate

    launch = importlib.import_module(f"interlace.operators.{operator}.launch")
    scale = x.new_empty([], dtype=torch.float32) if x.dtype == FLOAT8 else None
    validate(operator, x, w, bias, scale, scale, out_dtype, "auto", None, object, IMPLS)
    operands = Operands(x, w, bias, scale, scale, output_dtype(x, out_dtype))
    rows, even = _split(operator, operands.rows, world_size, **splits)
    choice = launch.choose(**operands.sizes(rows), world_size=world_size)
    impl, reason = resolve(operator, "auto", choice, operands, even), choice.reason
    if impl != choice.impl:
        reason = f"{choice.impl} must have {' and '.join(unmet(operator, choice.impl, operands, even))}; {reason}"
    how = f"fused ({choice.config})" if impl == "fused" else impl
    what = f"{operator} of x {list(x.shape)} and w {list(w.shape)}, {_name(x.dtype)}"
    return f"{what}, on {_ranks(world_size)}: {how}, because {reason}."


def _split(operator: str, rows: int, ranks: int, **splits: Sequence[int]) -> tuple[int, bool]:
    """The rows of the product that a choice depends on, and whether every rank gets as many from
    every rank.
    """
    from interlace.gemm.splits import check_sum, validate_list

    if operator == "gemm_all_to_all":
        from interlace.operators.gemm_all_to_all.api import validate_splits
        from interlace.operators.gemm_all_to_all.launch import check_even

        validate_splits(splits.get("input_splits"), splits.get("output_splits"))
        if not splits:
            check_even(rows, ranks)
    for name, counts in splits.items():
        validate_list(operator, name, counts)
        of_x = operator != "all_gather_gemm" and name != "output_splits"
        check_sum(f"{operator}: {name}", counts, ranks, rows if of_x else None, "the rows of x")
    if operator == "all_gather_gemm":
        return sum(splits.get("splits", [rows] * ranks)), True
    if splits:
        return rows, len({count for counts in splits.values() for count in counts}) == 1
    return rows, rows % ranks == 0


def _embedding_all_to_all(
    weights: list[torch.Tensor], indices: torch.Tensor, offsets: torch.Tensor, world_size: int
) -> str:
    from interlace.operators.embedding_all_to_all.config import OPERATOR
    from interlace.operators.embedding_all_to_all.launch import choose
    from interlace.operators.embedding_all_to_all.validate import batch_of, validate

    validate(weights, indices, offsets, None, "sum", None, "dense", "auto", None)
    if not weights:
        raise ArgumentError("explain: weights must have a table; got none.")
    batch = batch_of(len(weights), offsets, None)
    width, dtype = max(weight.shape[1] for weight in weights), weights[0].dtype
    lookups = next_power_of_2(ceil_div(indices.shape[0], max(1, len(weights) * batch)))
    choice = choose(
        tables=len(weights), width=width, batch=batch, pooling_factor=lookups, dtype=dtype,
        world_size=world_size, device=indices.device,
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
    from interlace.operators.mixture_of_experts.config import OPERATOR
    from interlace.operators.mixture_of_experts.launch import choose
    from interlace.operators.mixture_of_experts.validate import validate

    validate(x, experts, weights, w_in, w_out, None, "auto", None, world_size)
    tokens, hidden = x.shape
    count, ffn, top_k = world_size * w_in.shape[0], w_in.shape[1], experts.shape[1]
    choice = choose(
        tokens=tokens,
        hidden=hidden,
        ffn=ffn,
        experts=count,
        top_k=top_k,
        dtype=x.dtype,
        world_size=world_size,
        device=x.device,
    )
    how = f"fused ({choice.config})" if choice.impl == "fused" else choice.impl
    what = f"{OPERATOR} of {tokens} tokens a rank, top {top_k} of {count} experts {hidden} x {ffn}, {_name(x.dtype)}"
    return f"{what}, on {_ranks(world_size)}: {how}, because {choice.reason}."


_SPLITS: dict[str, tuple[str, ...]] = {
    "all_gather_gemm": ("splits",),
    "gemm_all_reduce": (),
    "gemm_all_to_all": ("input_splits", "output_splits"),
    "gemm_reduce_scatter": ("splits",),
}
"""How the operators around a product take rows that are not split evenly."""

# Operator -> its arguments, its options that matter, and what chooses.
_OPERATORS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[..., str]]] = {
    "gemv_all_reduce": (("x", "w"), ("bias",), _gemv_all_reduce),
    **{
        name: (("x", "w"), ("bias", "out_dtype", *splits), functools.partial(_product, name))
        for name, splits in _SPLITS.items()
    },
    "embedding_all_to_all": (("weights", "indices", "offsets"), (), _embedding_all_to_all),
    "mixture_of_experts": (("x", "experts", "weights", "w_in", "w_out"), (), _mixture_of_experts),
}
