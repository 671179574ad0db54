"""GEMM + AllReduce + residual + norm: what ends each half of a decoder's layer; see norm.md."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import MAX_PROGRAMS, Group, default_name
from interlace.comm.groups.group import known_group
from interlace.comm.groups.process_groups import process_group_named, rank_and_size
from interlace.comm.groups.registration import (
    OPERATOR_TAGS,
    entrance,
    may_be_played,
    past_autograd,
    recalling_group,
    register,
)
from interlace.comm.replay import tapes
from interlace.comm.runtime import ranges
from interlace.costs.known_profiles import cached_by_profiles
from interlace.errors import ArgumentError
from interlace.gemm import autotune, dispatch, invariance
from interlace.gemm.call import GemmCall, RowPlan
from interlace.gemm.choice import choose_product
from interlace.gemm.config import GemmConfig
from interlace.gemm.epilogue import Epilogue, Norm, Normed, validate_epilogue
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.implementations.unfused import UNFUSED
from interlace.gemm.operands import (
    FLOATS,
    Operands,
    number,
    output_dtype,
    require_device,
    require_tensor,
    validate,
)
from interlace.gemm.operator import GemmOperator, Splits
from interlace.gemm.scaled import has_wide_rows
from interlace.gemm.terms import default_output_dtype
from interlace.operators.gemm_all_reduce import gemv, reference
from interlace.operators.gemm_all_reduce import normed_launch as launch
from interlace.operators.gemm_all_reduce.config import (
    MOST_FUSED_ROWS,
    MOST_NORMED_ROWS,
    GemmAllReduceNormConfig,
)
from interlace.registry import Implementation, operator
from interlace.tuning.choice import Choice
from interlace.tuning.configuration import Configuration
from interlace.units import ceil_div

_LEAST_GAIN_US = 1.0
"""What ``gemm`` must save over implementations that are one graph when they come again: the host
enters 296 functions of Python for it, and 70 to 84 for those.
"""


@operator
class GemmAllReduceNorm(GemmOperator):
    """``norm(all_reduce(x @ w.T) + bias + residual)`` of a few tokens, and the new residual."""

    name = "gemm_all_reduce_norm"
    collective = "all_reduce"
    pattern = ("gemm", "all_reduce", "norm")
    config_type = GemmAllReduceNormConfig  # type: ignore[assignment]
    command_module = ""
    split_names = ()
    adds_ranks = True
    has_public_function = False
    implementations = (
        Implementation(
            "fused",
            "one kernel from the product to the norm",
            launch.run_fused,
            needs(most_rows=MOST_FUSED_ROWS, dtypes=FLOATS),
            # It reads w along K, and copies another one in each call.
            is_predictable=lambda terms: terms.w_along_k,
            reservation=launch.fused_reservation,
        ),
        Implementation(
            "pushed",
            "a product, then one kernel",
            launch.run_pushed,
            reservation=launch.pushed_reservation,
        ),
        Implementation(
            "gemm",
            "gemm_all_reduce, by the implementation that it takes itself, then one kernel",
            launch.run_gemm,
            is_batch_invariant=True,
            reservation=launch.gemm_reservation,
        ),
        UNFUSED,
    )

    def plan_rows(self, rows: int, splits: Splits, group: Group) -> RowPlan:
        """Return all rows: every rank sums and normalises each of them."""
        return RowPlan((), (), rows, rows, rows)

    def result_rows(self, rows: Any, splits: Splits, rank: int, world_size: int) -> Any:
        """Return all rows."""
        return rows

    def choose(self, **call: Any) -> Choice[Any]:
        """Return what ``impl="auto"`` runs, with the tiles of ``impl="gemv"`` of the sum."""
        return _choose(**call)

    def run_empty(self, call: GemmCall) -> Normed:
        """Return results without elements; a row without columns has a scale as a row of zeros."""
        results = launch.empty_results(call)
        results.scale.fill_(1.0)
        return results

    def run_unfused(self, call: GemmCall) -> Normed:
        """Run ``F.linear``, ``all_reduce``, and torch's norm."""
        operands = call.operands
        results = reference.gemm_all_reduce_norm(operands, call.known_epilogue, call.process_group)
        return Normed(*results)


_MOST_TILES = MAX_PROGRAMS - 512
_SIZES = ("rows", "columns", "inner", "dtype", "world_size", "device")
_CPU_TILES = {"block_n": 16, "block_k": 64, "num_warps": 4, "max_programs": 8}


@cached_by_profiles
def _choose(**call: Any) -> Choice[Any]:
    sizes = {name: call[name] for name in _SIZES}
    tiles = dataclasses.asdict(gemv.tuned(**sizes).config)
    del tiles["protocol"]
    config = GemmAllReduceNormConfig(**tiles)
    # Beside one program per tile there must be room for the programs that receive.
    while config.block_n < 64 and ceil_div(call["columns"], config.block_n) > _MOST_TILES:
        config = dataclasses.replace(
            config, block_n=2 * config.block_n, block_k=max(config.block_k // 2, 16)
        )
    if call["device"].type == "cpu":
        config = dataclasses.replace(config, **_CPU_TILES)
    dtype = default_output_dtype(call["dtype"])
    if launch.is_pushed(call["rows"], call["columns"], dtype, call["world_size"]):
        reason = "one kernel behind the product is faster than two for so few bytes"
        return Choice("pushed", config, reason)
    if call["rows"] > MOST_NORMED_ROWS:
        # What this runs is what a program has that does without the operator, so a graph that was
        # traced with few rows loses nothing with many.
        reason = (
            f"times are known of up to {MOST_NORMED_ROWS} rows; the sum takes what is best for it"
        )
        return Choice("gemm", config, reason)
    is_few = call["rows"] <= MOST_FUSED_ROWS and call.get("w_along_k", True)
    is_few = is_few and call["dtype"] in FLOATS
    default = "fused" if is_few else "pushed"
    # Its own configuration belongs to the tiles of a GEMM, which nothing here has.
    choice = choose_product(GemmAllReduceNorm.name, GemmConfig, default=default, **call)
    times_us = {name: us for name, us in choice.times_us.items() if name in ("fused", "pushed")}
    alternative = min(times_us, key=times_us.__getitem__, default=choice.impl)
    other_us = times_us.get(alternative, math.inf)
    if choice.impl == "gemm" and other_us - choice.times_us["gemm"] < _LEAST_GAIN_US:
        choice = dataclasses.replace(choice, impl=alternative)
    return dataclasses.replace(choice, config=config)


_SCHEMA = (
    "(Tensor x, Tensor w, Tensor? bias, Tensor? residual, Tensor? norm_weight, Tensor? norm_bias, "
    "str norm, float eps, Tensor? scale, ScalarType? out_dtype, bool block_scales, "
    "Tensor? x_scale, Tensor? w_scale, str group_name, str impl, str config) -> "
    "(Tensor, Tensor, Tensor)"
)
_DECLARATION = GemmAllReduceNorm()
_NAME = GemmAllReduceNorm.name
_Results = tuple[torch.Tensor, ...]
_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(f"{_NAME}{_SCHEMA}", tags=OPERATOR_TAGS)


# Behind x, w and bias come an epilogue's arguments, and then both scales, the group's name, the
# implementation and the configuration.
_OTHERS = 5


def _run(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *arguments: Any) -> _Results:
    x_scale, w_scale, group_name, impl, config = arguments[-_OTHERS:]
    process_group = process_group_named(group_name)
    group = known_group(process_group, x.device)
    ranks = rank_and_size(process_group)[1] if group is None else group.world_size
    known = _known_call(ranks, x, w, bias, *arguments)
    if known is not None:
        results = _recalled(group, known, x, w, bias, arguments)
        if results is not None:
            return tuple(results)
    validate(_DECLARATION, x, w, bias, x_scale, w_scale, None, impl, None)
    epilogue = Epilogue.of(x, *arguments[:-_OTHERS])
    validate_epilogue(_NAME, x, w.shape[0], epilogue)
    if w.shape[0] > launch.MOST_COLUMNS:
        raise ArgumentError(
            f"{_NAME}: w must have at most {launch.MOST_COLUMNS} rows, the columns of "
            f"the sums; got {w.shape[0]}. Normalise after gemm_all_reduce."
        )
    operands = Operands(x, w, bias, x_scale, w_scale, output_dtype(x, None))
    return tuple(
        dispatch.run(_DECLARATION, operands, (), False, group_name, impl, config, epilogue, known)
    )


def _known_call(
    ranks: int, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *arguments: Any
) -> dispatch.Known | None:
    """Return the form of a call and its addresses, by which a call that comes again is found; None
    of calls that are not found.

    What is found is valid, as the earlier call was: all that is looked at is part of it. Calls of
    many rows run in one of two ways, whatever the number of rows and the addresses are, so their
    form has no rows, which x and the residual must have in common, and they have no addresses.

    Args:
        ranks: Number of ranks of the call's group.
        arguments: The operator's, behind x, w and bias.
    """
    (
        residual, norm_weight, norm_bias, norm, eps, scale, out_dtype, block_scales,
        x_scale, w_scale, _, impl, config,
    ) = arguments  # fmt: skip
    if not x.is_cuda or config or w is None or x.dim() != 2 or w.dim() != 2:
        return None
    rows, columns = x.shape[0], w.shape[0]
    is_many = rows > MOST_NORMED_ROWS
    if residual is not None and residual.shape != (rows, columns):
        return None
    if is_many and x_scale is not None and not _is_of_any_rows(x_scale, rows):
        return None
    key: list[Hashable] = [
        None if is_many else rows, _NAME, impl, norm, eps, out_dtype, block_scales, x.shape[1],
        x.stride(), x.dtype, w.shape, w.stride(), w.dtype, w.get_device(), invariance.mode(),
        autotune.is_enabled(impl),
    ]  # fmt: skip
    addresses = [x.data_ptr(), w.data_ptr()]
    if is_many:
        key.append(launch.is_pushed(rows, columns, default_output_dtype(x.dtype), ranks))
    else:
        key += (address % 16 for address in addresses)
    if x_scale is not None and w_scale is not None:
        # Rows of several scales have any strides, between which products of many rows do not tell.
        place = x_scale.shape[1:] if is_many else (x_scale.shape, x_scale.stride())
        key += (place, x_scale.numel() == 1, w_scale.shape)
    for tensor in (bias, residual, norm_weight, norm_bias, scale, w_scale):
        if tensor is None:
            key.append(None)
        elif not tensor.is_contiguous():
            return None
        else:
            shape, address = tensor.shape, tensor.data_ptr()
            width, dims = (shape[-1], len(shape)) if shape else (0, 0)
            key += (width, dims, tensor.dtype, tensor.get_device(), address % 16)
            addresses.append(address)
    if x_scale is not None:
        if not (has_wide_rows(x_scale) or x_scale.is_contiguous()):
            return None
        key += (x_scale.dtype, x_scale.get_device(), x_scale.data_ptr() % 16)
        addresses.append(x_scale.data_ptr())
    return tuple(key), None if is_many else tuple(addresses)


def _is_of_any_rows(x_scale: torch.Tensor, rows: int) -> bool:
    """Return whether what scales x is known from the number of its rows: one number, or one row of
    numbers for each.
    """
    return x_scale.numel() == 1 or x_scale.shape[0] == rows


def _recalled(
    group: Group | None,
    known: dispatch.Known,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: Sequence[Any],
) -> _Results | None:
    """Return the results of a call that has come before, or of one like an earlier one; None if it
    must take the long way.

    Args:
        known: What :func:`_known_call` says of it.
        arguments: The operator's, behind x, w and bias.
    """
    if group is None or ranges.is_listening():
        return None
    form, addresses = known
    residual, norm_weight, norm_bias, _, _, scale, _, _, x_scale, w_scale, *_ = arguments
    operands = x, w, bias, x_scale, w_scale, residual, norm_weight, norm_bias, scale
    results: _Results | None = (
        group.recall_form(form, None, *operands)
        if addresses is None
        else dispatch.recall(group, known, *operands)
    )
    return results


def _fake(x: torch.Tensor, w: torch.Tensor, _: object, *arguments: Any) -> _Results:
    epilogue = Epilogue.of(x, *arguments[:-_OTHERS])
    return tuple(epilogue.empty_results(x.shape[0], w.shape[0], x))


register(_library, _NAME, _run, _fake, called="gemm_all_reduce or gemv_all_reduce with a norm")


def call_normed(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None,
    norm: Norm | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    block_scales: bool,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    group: dist.ProcessGroup | None,
    impl: str,
    config: Configuration | None,
) -> Normed:
    """Call ``gemm_all_reduce_norm`` for the public functions.

    Args:
        x: ``[B, K]``.
        norm: None for the root mean square.

    Raises:
        ArgumentError: An operand is no dense tensor, or is not on the device of x; or ``eps`` is no
            number, or ``norm`` no word. PyTorch chooses what runs by the operands' devices, so this
            is refused before it is asked.
    """
    arguments = (
        x, w, bias, residual, norm, norm_weight, norm_bias, eps, scale, out_dtype, block_scales,
        x_scale, w_scale, group, impl, config,
    )  # fmt: skip
    return _player()(*arguments) if may_be_played(x) else _call_in_full(*arguments)


@functools.cache
def _player() -> Callable[..., Normed]:
    """Return :func:`_call_in_full` by its tapes."""
    return tapes.player(_call_in_full, is_public=True)


def _call_in_full(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm: Norm | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    block_scales: bool,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    impl: str,
    config: Configuration | None,
) -> Normed:
    """Make a call of :func:`call_normed`."""
    # What the schema has no place for would be PyTorch's error.
    eps = number(f"{_NAME}: eps must be a number", eps)
    if not isinstance(norm, (str, type(None))):
        raise ArgumentError(f"{_NAME}: norm must be a word or None; got {norm!r}.")
    text = "" if config is None else str(config)
    epilogue = (
        residual, norm_weight, norm_bias, norm or "rms", eps, scale, out_dtype,
        bool(block_scales), x_scale, w_scale,
    )  # fmt: skip
    known_to = recalling_group(
        group, x, w, bias, residual, norm_weight, norm_bias, scale, x_scale, w_scale
    )
    is_dtype = out_dtype is None or isinstance(out_dtype, torch.dtype)
    if known_to is not None and type(impl) is str and is_dtype:
        arguments = *epilogue, "", impl, text
        known = _known_call(known_to.world_size, x, w, bias, *arguments)
        if known is not None:
            with past_autograd():
                recalled = _recalled(known_to, known, x, w, bias, arguments)
            if recalled is not None:
                return Normed(*recalled)
    optional = {
        "bias": bias,
        "residual": residual,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "scale": scale,
        "x_scale": x_scale,
        "w_scale": w_scale,
    }
    tensors = {name: tensor for name, tensor in optional.items() if tensor is not None}
    for name, tensor in {"x": x, "w": w, **tensors}.items():
        require_tensor(f"{_NAME}: {name}", tensor)
        require_device(f"{_NAME}: {name}", tensor, "x", x.device)
    return Normed(*entrance(_NAME)(x, w, bias, *epilogue, default_name(group), impl, text))


def refuse_without_norm(operator: str, **options: object) -> None:
    """Refuse options that say something of a norm where none is asked for.

    Raises:
        ArgumentError: One of them is given.
    """
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(
                f"{operator}: {name} must come with norm_weight or norm; got {name} alone. Pass "
                'norm_weight=, or norm="rms".'
            )
