"""Launches of ``gemm_all_reduce_norm``: memory, grids and arguments of its kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from interlace.comm import MAX_PROGRAMS
from interlace.comm.groups.registration import entrance
from interlace.comm.launching.kernels import CPU_PROGRAMS, Launch, known_factor, processors
from interlace.comm.replay.deferred import DeferredCall, New, Shaped
from interlace.comm.runtime.interpreter import require
from interlace.gemm.call import GemmCall
from interlace.gemm.epilogue import Normed
from interlace.gemm.implementations.pushed import multiply
from interlace.gemm.launch import lamport_arguments, row_stride
from interlace.operators.gemm_all_reduce.config import GemmAllReduceNormConfig
from interlace.operators.gemm_all_reduce.gemv import tiling_of
from interlace.registry import BATCH_INVARIANT
from interlace.units import ceil_div, next_power_of_2, round_up

MOST_COLUMNS = 1 << 16
"""Columns of the sums that a program can normalise: a row is in registers."""

_COLUMNS_PER_THREAD = 16


def run_fused(call: GemmCall) -> DeferredCall:
    """Multiply, sum and normalise in one kernel."""
    laid = _with_rows_along_k(call)

    def prepare(*memory: torch.Tensor) -> Callable[[], None]:
        return lambda: _fused(laid, Normed(*memory))()

    return DeferredCall(
        (call.operator.name, "fused", call.config, call.mark, *_memory(laid)),
        _new_results(call),
        prepare,
        _results,
        with_libraries=False,
        is_of_operands=laid is call,
    )


def run_pushed(call: GemmCall) -> DeferredCall:
    """Multiply, then exchange rows, sum and normalise in one kernel."""
    require(call.group.backend)
    operands = call.operands
    product_shape = [operands.rows, operands.columns]

    def prepare(*memory: torch.Tensor) -> Callable[[], None]:
        *results, product = memory

        def enqueue() -> None:
            multiply(call, product, operands.x, None)
            _sum_rows(call, product, Normed(*results))()

        return enqueue

    return DeferredCall(
        (call.operator.name, "pushed", call.mark, *_memory(call)),
        _new_results(call, (product_shape, operands.x.dtype)),
        prepare,
        _results,
    )


def _results(*memory: torch.Tensor) -> Normed:
    """Return the results among a call's memory, which come first."""
    return Normed(*memory[:3])


def run_gemm(call: GemmCall) -> Normed:
    """Run the operator around a GEMM, then a kernel that normalises its rows."""
    require(call.group.backend)
    operands = call.operands
    total = entrance("gemm_all_reduce")(
        operands.x, operands.w, operands.bias, None, None, operands.out_dtype, call.group_name,
        BATCH_INVARIANT if call.is_batch_invariant else "auto", "",
    )  # fmt: skip
    results = empty_results(call)
    epilogue = call.epilogue
    assert epilogue is not None
    columns = _row_columns(operands.columns)
    arguments = _epilogue_arguments(call, results) | {"total": total.contiguous()}
    # The operator has added the bias.
    arguments["inputs"] = arguments["inputs"]._replace(bias=None)
    constants = {"COLUMNS": columns, "FORM": _form(call, 1), "num_warps": _row_warps(columns)}
    from interlace.operators.gemm_all_reduce.kernels.norm_rows import norm_rows

    Launch(norm_rows, (operands.rows,), arguments, constants)()
    return results


def _with_rows_along_k(call: GemmCall) -> GemmCall:
    """Return the call with x and w contiguous along K, as the fused kernel reads them."""
    operands = call.operands
    x = operands.x if operands.x.stride(1) == 1 else operands.x.contiguous()
    w = operands.w if operands.w.stride(1) == 1 else operands.w.contiguous()
    if x is operands.x and w is operands.w:
        return call
    return call.with_operands(dataclasses.replace(operands, x=x, w=w))


def _new_results(call: GemmCall, *others: Shaped) -> New:
    """Return what allocates the call's results, and other tensors behind them."""
    assert call.epilogue is not None
    operands = call.operands
    shapes = call.epilogue.result_shapes(operands.rows, operands.columns, operands.x.dtype)
    return New(operands.x.device, (*shapes, *others))


def empty_results(call: GemmCall) -> Normed:
    """Return the call's results, uninitialised."""
    assert call.epilogue is not None
    operands = call.operands
    return call.epilogue.empty_results(operands.rows, operands.columns, operands.x)


def _memory(call: GemmCall) -> tuple[Any, ...]:
    """Return where the call's operands lie, by which ``Replays.run`` tells calls apart."""
    epilogue = call.epilogue
    assert epilogue is not None
    return (
        *epilogue.signature(),
        *call.operands.memory(),
        *epilogue.memory(),
    )


def _form(call: GemmCall, sections: int) -> Any:
    from interlace.operators.gemm_all_reduce.kernels.norm import NormForm

    assert call.epilogue is not None
    factor = known_factor(call.operands.columns)
    return NormForm(call.epilogue.norm, call.epilogue.quantization, sections, factor)


def _epilogue_arguments(call: GemmCall, results: Normed) -> dict[str, Any]:
    """Return the arguments of a kernel that normalises, by name."""
    from interlace.operators.gemm_all_reduce.kernels.norm import NormInputs, NormOutputs

    epilogue = call.epilogue
    assert epilogue is not None
    scales = results.scale if results.scale.numel() else None
    return {
        "inputs": NormInputs(
            call.operands.bias,
            epilogue.residual,
            epilogue.norm_weight,
            epilogue.norm_bias,
            epilogue.scale,
            epilogue.eps,
        ),
        "outputs": NormOutputs(results.y, results.residual, scales),
        "N": call.operands.columns,
        "B": call.operands.rows,
    }


def _row_columns(columns: int) -> int:
    """Return the columns of a tile that has whole rows, at least one for each thread of a warp."""
    return max(next_power_of_2(columns), 32)


def _row_warps(columns: int) -> int:
    """Return the warps of a program that has whole rows."""
    return min(max(columns // _COLUMNS_PER_THREAD // 32, 1), 32)


def _sum_rows(call: GemmCall, product: torch.Tensor, results: Normed) -> Launch:
    """Prepare the kernel that exchanges a product's rows. Collective when memory must grow."""
    from interlace.operators.gemm_all_reduce.kernels.norm_rows import sum_and_norm_rows

    group, ranks = call.group, call.group.world_size
    columns = _row_columns(product.shape[1])
    programs = min(len(product), CPU_PROGRAMS if group.backend == "cpu" else MAX_PROGRAMS)
    slot = round_up(product.numel(), 16) * product.element_size()
    arguments = _epilogue_arguments(call, results) | lamport_arguments(
        call.group, call.operator.name, "pushed", slot, call.mark
    )
    arguments["part"] = product
    constants = {
        "WORLD_SIZE": ranks,
        "COLUMNS": columns,
        "FORM": _form(call, 1),
        "num_warps": _row_warps(columns),
    }
    # The program behind them finds out whether the ranks are in the same call.
    return Launch(sum_and_norm_rows, (programs + 1,), arguments, constants)


def _fused(call: GemmCall, results: Normed) -> Launch:
    """Prepare the fused kernel. Collective when memory must grow."""
    require(call.group.backend)
    from interlace.operators.gemm_all_reduce.kernels.fused_norm import multiply_sum_and_norm

    group, operands, config = call.group, call.operands, call.config
    assert isinstance(config, GemmAllReduceNormConfig)
    x, w, ranks = operands.x, operands.w, group.world_size
    tokens, rows, columns = operands.rows, operands.columns, operands.inner
    block_b = min(64, next_power_of_2(tokens))
    row_tiles, token_tiles = ceil_div(rows, config.block_n), ceil_div(tokens, block_b)
    tiles = row_tiles * token_tiles
    # The interpreter runs programs one after another, so none may wait for another of its rank.
    received = (
        next_power_of_2(rows)
        if group.backend == "cpu"
        else config.received_columns(
            rows=rows, tokens=tokens, most_programs=processors(group.device)
        )
    )
    sections = ceil_div(rows, received)
    receivers = tokens * sections
    producers = min(tiles, config.max_programs or MAX_PROGRAMS, MAX_PROGRAMS - receivers)
    tiling = tiling_of(x, w, config, block_b)
    # Tokens of complete tiles; the compiler must know that they are aligned.
    line = round_up(row_tiles * config.block_n, 16)
    slot = token_tiles * block_b * line
    arguments = _epilogue_arguments(call, results) | lamport_arguments(
        group, call.operator.name, "fused", 4 * slot, call.mark
    )
    arguments |= {
        "x": x,
        "w": w,
        "slot": slot,
        "line": line,
        "K": columns,
        "tiles": tiles,
        "producers": producers,
        "stride_x": row_stride(x),
        "stride_w": row_stride(w),
    }
    constants = {
        "WORLD_SIZE": ranks,
        "ONE_TILE": producers == tiles,
        "COLUMNS": received,
        "FORM": _form(call, sections),
        "TILING": tiling,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if config.max_registers:
        constants["maxnreg"] = config.max_registers
    return Launch(multiply_sum_and_norm, (producers + receivers,), arguments, constants)
