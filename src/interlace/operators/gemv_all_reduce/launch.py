"""Launches of ``gemv_all_reduce``: implementation, configuration, memory and grid of a call."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, NamedTuple

import torch

from interlace.comm import MAX_PROGRAMS, Group, group_named, process_group_named
from interlace.comm.groups.registration import entrance
from interlace.comm.launching.kernels import Launch
from interlace.comm.replay.replays import places
from interlace.comm.runtime import ranges
from interlace.comm.runtime.interpreter import require
from interlace.costs.gemv_all_reduce import floor_link_bytes
from interlace.costs.known_profiles import cached_by_profiles
from interlace.errors import ArgumentError
from interlace.gemm import autotune, invariance
from interlace.gemm.between_nodes import known_network
from interlace.gemm.implementations.gemv import GEMV
from interlace.operators.gemv_all_reduce import reference
from interlace.operators.gemv_all_reduce.config import (
    OPERATOR,
    GemvAllReduceConfig,
    block_tokens,
    default_config,
    fewest_tokens,
)
from interlace.registry import BATCH_INVARIANT, operator_matching, operator_named
from interlace.tuning.choice import Choice, by_device
from interlace.units import ceil_div, round_up

MAX_RANKS = 8


class GemvDecisions(NamedTuple):
    """Hold the choices that ranks have agreed on for calls of one kind.

    Attributes:
        impl: The implementation.
        config: The fused kernel's configuration.
        mark: The number that the calls' signals carry.
        is_predicted: Whether the implementation was chosen by predicted times, which a measurement
            may replace.
        is_batch_invariant: Whether a token's result must have the same bits in every batch.
    """

    impl: str
    config: GemvAllReduceConfig
    mark: int
    is_predicted: bool
    is_batch_invariant: bool = False


@cached_by_profiles
def choose(
    *,
    tokens: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
) -> Choice[GemvAllReduceConfig]:
    """Return the fastest implementation by the tuned table of this GPU.

    On the CPU backend it is always the kernel.
    """
    config = default_config(
        tokens=tokens, rows=rows, world_size=world_size, itemsize=dtype.itemsize
    )
    sizes: dict[str, Any] = {"tokens": tokens, "rows": rows, "columns": columns}
    small = {"block_n": max(16, min(config.block_n, 64)), "block_k": 256, "max_programs": 8}
    context: dict[str, Any] = {"dtype": dtype, "world_size": world_size, "device": device}
    tabulated = by_device(OPERATOR, sizes, config, small, **context)
    if device.type == "cpu" or tabulated.is_exact:
        return tabulated
    gemm = _choice_as_gemm(**sizes, **context)
    if not gemm.times_us:
        return tabulated
    impl = "fused" if gemm.impl == GEMV.name else "gemm"
    return dataclasses.replace(
        tabulated,
        impl=impl,
        reason=gemm.reason,
        is_known=True,
        # What "gemm" takes is faster than the pairs only where it is none of them.
        faster=(impl,) if gemm.impl in gemm.faster else (),
    )


def _choice_as_gemm(*, tokens: int, rows: int, columns: int, **context: Any) -> Choice[Any]:
    """Return what the operator around a GEMM takes, which knows the predicted times, this kernel's
    among them.

    Args:
        context: dtype, world_size and device.
    """
    gemm = operator_matching("gemm", "all_reduce")
    choice: Choice[Any] = gemm.choose(rows=tokens, columns=rows, inner=columns, **context)
    return choice


@dataclasses.dataclass(frozen=True)
class GemvCall:
    """One call, validated and agreed on by all ranks.

    Attributes:
        x: ``[B, K]``, the tokens.
        w: ``[N, K]``, its rows contiguous.
        bias: ``[N]``, or None.
        group: The ranks, and what they share.
        group_name: The name of their process group.
        chooser: The word by which the operator around a GEMM chooses, where that runs.
        config: The fused kernel's configuration.
        mark: The number that the call's signals carry.
        is_batch_invariant: Whether a token's result must have the same bits in every batch.
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    group: Group
    group_name: str
    chooser: str
    config: GemvAllReduceConfig
    mark: int
    is_batch_invariant: bool


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    impl: str,
    config: str,
) -> torch.Tensor:
    """Run one call whose shapes and devices ``api`` has validated.

    Raises:
        ArgumentError: The operands have different dtypes.
    """
    operator = operator_named(OPERATOR)
    impl = invariance.effective_impl(operator, impl)
    group = group_named(group_name, x.device)
    # Decoding makes the same call again and again, so the agreement and the choice are kept.
    key = (
        OPERATOR,
        x.shape,
        w.shape,
        x.dtype,
        w.dtype,
        None if bias is None else bias.dtype,
        impl,
        config,
    )
    decision = group.once(key, lambda: _decide(group, x, w, bias, impl, config))
    # The operator around a GEMM measures this kernel beside the others.
    is_measured = decision.is_predicted and autotune.is_enabled(impl)
    call = GemvCall(
        # The kernels take rows of tokens; a vector is one token.
        x if x.dim() == 2 else x[None],
        w,
        bias,
        group,
        group_name,
        impl if impl in ("measured", BATCH_INVARIANT) else "auto",
        decision.config,
        decision.mark,
        decision.is_batch_invariant,
    )
    y: torch.Tensor = operator.implementation("gemm" if is_measured else decision.impl).run(call)
    return y if x.dim() == 2 else y[0]


def run_fused(call: GemvCall) -> torch.Tensor:
    """Return the sum over ranks, ``[B, N]``, by one kernel."""
    x, w, bias, group = call.x, call.w, call.bias, call.group
    y = x.new_empty([x.shape[0], w.shape[0]])
    # Shapes were agreed on, so without elements no rank launches anything.
    if not y.numel():
        return y
    if x.stride(-1) != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    config, mark, is_invariant = call.config, call.mark, call.is_batch_invariant

    def enqueue() -> None:
        prepare(group, x, w, bias, y, config, mark, is_batch_invariant=is_invariant)()

    with _range(call, "fused"), group.running():
        key = OPERATOR, config, mark, is_invariant, places(x, w, bias, y)
        group.replays.run(key, enqueue, with_libraries=False)
    return y


def run_gemm(call: GemvCall) -> torch.Tensor:
    """Return what the operator around a GEMM computes, by the implementation that it takes."""
    gemm = entrance(operator_matching("gemm", "all_reduce").name)
    x, w = call.x, call.w
    y: torch.Tensor = gemm(x, w, call.bias, None, None, x.dtype, call.group_name, call.chooser, "")
    return y


def run_unfused(call: GemvCall) -> torch.Tensor:
    """Run ``F.linear``, then ``all_reduce``."""
    call.group.check()
    with _range(call, "unfused"):
        process_group = process_group_named(call.group_name)
        return reference.gemv_all_reduce(call.x, call.w, call.bias, process_group)


def _range(call: GemvCall, implementation: str) -> contextlib.AbstractContextManager[object]:
    """Return the range of a call, for profilers."""
    x, w = call.x, call.w
    return ranges.around(
        OPERATOR,
        implementation,
        (x, w),
        lambda: floor_link_bytes(
            tokens=x.shape[0],
            rows=w.shape[0],
            itemsize=x.itemsize,
            world_size=call.group.world_size,
        ),
    )


def _decide(
    group: Group,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    impl: str,
    config: str,
) -> GemvDecisions:
    """Agree with the peers, and choose how calls of this kind run. Collective."""
    dtypes = [tensor.dtype for tensor in (x, w, bias) if tensor is not None]
    if len(set(dtypes)) > 1:
        raise ArgumentError(
            f"{OPERATOR}: x, w and bias must have the same dtype; got {dtypes}. Convert them."
        )
    group.require_size(OPERATOR, MAX_RANKS)
    agreed = {
        "the_shape_of_x": tuple(x.shape),
        "the_shape_of_w": tuple(w.shape),
        "dtype": str(x.dtype),
        "bias": bias is not None,
        "impl": impl,
        "config": config,
    }
    (rows, columns), tokens = w.shape, x.shape[0] if x.dim() == 2 else 1
    call: dict[str, Any] = {
        "tokens": tokens,
        "rows": rows,
        "columns": columns,
        "dtype": x.dtype,
        "world_size": group.world_size,
        "device": x.device,
    }
    declaration = operator_named(OPERATOR)

    def choose_for_all() -> list[Any]:
        choice = choose(**call).between(declaration, group.nodes, known_network(x.device))
        # Times that a measurement may replace are those of the operator around a GEMM.
        times_us = _choice_as_gemm(**call).times_us
        return dataclasses.replace(choice, times_us=times_us).packed()

    mark, chosen_by_rank_0 = group.agreement.agree(OPERATOR, agreed, choose_for_all)
    declaration.require_nodes(impl, group.nodes)
    choice = Choice.unpacked(GemvAllReduceConfig, chosen_by_rank_0)
    if impl == BATCH_INVARIANT:
        declaration.require_nodes("fused", group.nodes, is_invariant=True)
        if config:
            return GemvDecisions("fused", GemvAllReduceConfig.parse(config), mark, False, True)
        return GemvDecisions(*choose_invariant(call), mark, False, True)
    # A caller's configuration, and a table that has the very sizes, need no measurement.
    chooses = impl in declaration.choosers
    is_open = chooses and not config and not choice.is_exact and not group.spans_nodes
    return GemvDecisions(
        choice.impl if chooses else impl,
        GemvAllReduceConfig.parse(config) if config else choice.config,
        mark,
        is_open and bool(choice.times_us),
    )


def choose_invariant(call: dict[str, Any]) -> tuple[str, GemvAllReduceConfig]:
    """Return the implementation of batch-invariant calls, and the kernel's configuration.

    The kernel runs where it is known to give the bits of the operator around a GEMM, which runs
    elsewhere: layers go by the number of tokens from one of the two operators to the other.
    """
    fewest = fewest_tokens(call["device"], call["dtype"])
    config = choose(**call | {"tokens": max(call["tokens"], fewest)}).config
    is_one = invariance.has_one_arithmetic(call["device"], call["dtype"])
    return "fused" if is_one else "gemm", config


def prepare(
    group: Group,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    config: GemvAllReduceConfig,
    mark: int = 0,
    *,
    is_batch_invariant: bool = False,
) -> Launch:
    """Prepare the launch for x ``[B, K]``, its rows contiguous, w ``[N, K]`` and y ``[B, N]``.

    Collective when the workspace must grow.

    Args:
        mark: The number that the ranks' agreement returned.
        is_batch_invariant: Whether a token's result must have the same bits in every batch.
    """
    require(group.backend)
    from interlace.gemm.kernels.gemv import GemvTiling
    from interlace.operators.gemv_all_reduce.kernels.one_shot import gemv_all_reduce_one_shot
    from interlace.operators.gemv_all_reduce.kernels.two_phase import gemv_all_reduce_two_phase

    tokens, rows, columns, ranks = x.shape[0], w.shape[0], w.shape[1], group.world_size
    fewest = fewest_tokens(x.device, x.dtype) if is_batch_invariant else 1
    block_b = block_tokens(tokens, fewest)
    row_tiles, token_tiles = ceil_div(rows, config.block_n), ceil_div(tokens, block_b)
    tiles = row_tiles * token_tiles
    programs = min(tiles, config.max_programs or MAX_PROGRAMS, MAX_PROGRAMS)
    # Two values per word halve the bytes; float32 would lose digits, and a pair is two tokens.
    values = 2 if x.element_size() == 2 and block_b > 1 else 1
    tiling = GemvTiling(
        block_n=config.block_n,
        block_b=block_b,
        block_k=config.block_k,
        even=rows % config.block_n == 0 and tokens % block_b == 0,
        even_k=columns > 0 and columns % config.block_k == 0,
        word_values=values,
        # TensorFloat-32 would lose what float32 callers ask for; the interpreter cannot multiply
        # bfloat16.
        round_parts=is_batch_invariant,
    )
    constants = {
        "WORLD_SIZE": ranks,
        "ONE_TILE": programs == tiles,
        "TILING": tiling,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if config.max_registers:
        constants["maxnreg"] = config.max_registers
    # Protocols have workspaces of their own, because their slots and epochs differ.
    operator = f"{OPERATOR}.{config.protocol}"
    words = tiles * config.block_n * block_b // values
    if config.protocol == "one_shot":
        function, slot, results = gemv_all_reduce_one_shot, round_up(words, 16), 0
    else:
        owned_rows = tiles * ceil_div(config.block_n, ranks)
        slot, results = round_up(owned_rows * block_b // values, 16), words
        function = gemv_all_reduce_two_phase
    # The 16 words in front of the slots say which call this is.
    workspace = group.workspace(operator, 8 * (16 + ranks * slot + results))
    arguments = {
        "x": x,
        "w": w,
        "bias": bias,
        "y": y,
        "words": workspace.data.address,
        "epochs": workspace.epochs,
        "ctx": group.context(operator),
        "call": mark,
        "half": workspace.half_bytes // 8,
        "slot": slot,
        "N": rows,
        "B": tokens,
        "K": columns,
        "tiles": tiles,
        "stride_x": x.stride(0),
        "stride_w": w.stride(0),
    }
    return Launch(function, (programs,), arguments, constants)
