"""Launches of ``gemm_all_reduce_norm``: memory, grids and arguments of its kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch

from interlace.comm import MAX_PROGRAMS, Group
from interlace.comm.groups.registration import entrance
from interlace.comm.groups.reservation import Reservation
from interlace.comm.launching.kernels import (
    CPU_PROGRAMS,
    Launch,
    compile_ahead,
    known_factor,
    processors,
)
from interlace.comm.replay import tapes
from interlace.comm.replay.deferred import DeferredCall, New, PerformedCall, Shaped, empty_rows_on
from interlace.comm.replay.replays import AgainCall
from interlace.comm.runtime.interpreter import require
from interlace.gemm.call import GemmCall
from interlace.gemm.epilogue import Normed
from interlace.gemm.implementations.pushed import multiply, sum_slot_bytes
from interlace.gemm.launch import (
    KernelOfWords,
    lamport_arguments,
    lamport_reservation,
    row_stride,
)
from interlace.gemm.operands import Operands, RowPart, Weight
from interlace.gemm.operator import GemmOperator
from interlace.gemm.products import multiply_by_faster, multiply_into
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.operators.gemm_all_reduce.config import (
    MOST_FUSED_ROWS,
    MOST_NORMED_ROWS,
    MOST_PUSHED_BYTES,
    GemmAllReduceNormConfig,
    block_tokens,
)
from interlace.operators.gemm_all_reduce.gemv import tiling_of
from interlace.registry import BATCH_INVARIANT, operator_named
from interlace.units import ceil_div, next_power_of_2, round_up

MOST_COLUMNS = 1 << 16
"""Columns of the sums that a program can normalise: a row is in registers."""

_COLUMNS_PER_THREAD = 16
_MOST_PUSHING = MAX_PROGRAMS - 1  # and one more that meets the peers


def run_fused(call: GemmCall) -> DeferredCall:
    """Multiply, sum and normalise in one kernel."""
    laid = _with_rows_along_k(call)
    take = _new_results(call)
    find = functools.partial(
        lamport_arguments,
        operator=call.operator.name,
        impl="fused",
        slot_bytes=_fused_slot_bytes(call),
        mark=call.mark,
    )
    kernels: list[KernelOfWords] = []

    def prepare(*memory: torch.Tensor) -> KernelOfWords:
        _compile_for_any_tokens(laid)
        describe = functools.partial(_fused, laid, Normed(*memory))
        kernels.append(KernelOfWords(call.group, find, describe))
        return kernels[-1]

    return DeferredCall(
        (call.operator.name, "fused", call.config, call.mark, *_memory(laid)),
        take,
        prepare,
        _results,
        with_libraries=False,
        is_of_operands=laid is call,
        again=(lambda: _again(call, take, kernels[-1])) if laid is call else None,
    )


def _again(
    call: GemmCall, take: New, kernel: KernelOfWords, *, follows_product: bool = False
) -> AgainCall | None:
    """Return what makes calls of other operands like a call's own, and of as many rows, past
    validation, decision and preparation.

    Args:
        take: Returns the results, and behind them the memory of a product, if there is one.
        kernel: The call's kernel.
        follows_product: Whether it follows a product, or multiplies itself.
    """
    factors = ["part"] if follows_product else ["x", "w"]
    run = functools.partial(_norm_again, call.known_epilogue.eps)
    return kernel.again([*factors, "inputs", "outputs"], take, run, _results)


def _norm_again(
    eps: float,
    enqueue: Callable[..., None],
    memory: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    w: torch.Tensor,
    *vectors: torch.Tensor | None,
) -> None:
    """Enqueue a kernel for other operands, behind their product where there is memory for one."""
    arguments = _norm_arguments(_results(*memory), eps, *vectors)
    if len(memory) == len(Normed._fields):
        enqueue(x=x, w=w, **arguments)
        return
    product = memory[-1]
    multiply_by_faster(product, RowPart(x), Weight.of(w), None)
    enqueue(part=product, **arguments)


_expected: set[tuple[Hashable, ...]] = set()
"""N, K and dtype of products whose numbers of tokens change from call to call, and whose kernels
have not been compiled for all of them yet.
"""

_compiling: dict[tuple[Hashable, ...], Callable[[], None]] = {}
"""What waits for kernels that are being compiled, by product."""

# What of kernels differs with the number of tokens, differs among these.
_TOKENS = (1, 2, 4, *range(8, MOST_FUSED_ROWS + 1, 8), 256)


def expect_any_tokens(columns: int, inner: int, dtype: torch.dtype) -> None:
    """Let the first call of a product begin to compile the kernels of all numbers of tokens.

    An engine captures dozens of them when it starts, one after another, and would wait a second or
    more for each kernel. It runs many tokens first, to see what memory it needs.
    """
    _expected.add((columns, inner, dtype))


def _compile_for_any_tokens(call: GemmCall) -> None:
    """Begin to compile the kernels of all numbers of tokens, where those are expected; wait for
    them if the call may need one.
    """
    operands = call.operands
    product = operands.columns, operands.inner, operands.x.dtype
    if call.group.backend == "cpu":
        return
    if product in _expected:
        _expected.discard(product)
        _compiling[product] = compile_ahead(_launches_of_any_tokens(call), operands.x.device)
    if operands.rows <= MOST_NORMED_ROWS and product in _compiling:
        _compiling.pop(product)()


def _launches_of_any_tokens(call: GemmCall) -> list[Launch]:
    """Return launches of the kernels of all numbers of tokens, to be compiled.

    Nothing is allocated symmetrically, since only this rank may be told to expect them.
    """
    operands, epilogue, group = call.operands, call.known_epilogue, call.group
    columns, inner, dtype = operands.columns, operands.inner, operands.x.dtype
    numbers = torch.empty(1, dtype=torch.int32, device=operands.x.device)
    # What Triton is told of slots: large addresses, numbers of any value, and types.
    memory = {
        "words": 1 << 40,
        "epochs": numbers,
        "ctx": group.context(call.operator.name),
        "call": call.mark,
        "half": 1 << 20,
    }
    launches = []
    for tokens in _TOKENS:
        choice = call.operator.choose(
            rows=tokens,
            columns=columns,
            inner=inner,
            dtype=dtype,
            world_size=group.world_size,
            device=operands.x.device,
            w_along_k=operands.w_along_k,
        )
        x = operands.x.new_empty(tokens, inner)
        residual = None if epilogue.residual is None else x.new_empty(tokens, columns)
        other = dataclasses.replace(
            call.with_operands(dataclasses.replace(operands, x=x)),
            epilogue=dataclasses.replace(epilogue, residual=residual),
            config=choice.config,
        )
        results = empty_results(other)
        if choice.impl == "fused":
            launches.append(_fused(other, results, memory))
        elif choice.impl == "pushed":
            launches.append(_sum_rows(other, results.residual, results, memory))
    # Ranks of a node keep compiled kernels in one place: each begins with others.
    first = group.rank * len(launches) // group.world_size
    return launches[first:] + launches[:first]


def run_pushed(call: GemmCall) -> DeferredCall:
    """Multiply, then exchange rows, sum and normalise in one kernel."""
    require(call.group.backend)
    given = call
    if call.operands.x_scale is not None:
        call = call.with_operands(call.operands.with_contiguous_rows())
    operands = call.operands
    rows, columns, dtype = operands.rows, operands.columns, operands.out_dtype
    take = _new_results(call, ([rows, columns], dtype))
    find = functools.partial(
        _pushed_memory,
        operator=call.operator.name, rows=rows, columns=columns, dtype=dtype, mark=call.mark,
    )  # fmt: skip
    kernels: list[KernelOfWords] = []

    def prepare(*memory: torch.Tensor) -> Callable[[], None]:
        *results, product = memory
        _compile_for_any_tokens(call)
        describe = functools.partial(_sum_rows, call, product, Normed(*results))
        kernel = KernelOfWords(call.group, find, describe)
        kernels.append(kernel)

        def enqueue() -> None:
            multiply(call, product, operands.all_rows(), None)
            kernel()

        return enqueue

    def again() -> AgainCall | None:
        # Batch-invariant products may need copies of operands, as those of float8 have had them.
        if call.is_batch_invariant or call is not given:
            return None
        if call.known is not None:
            return _again(call, take, kernels[-1], follows_product=True)
        # Of more rows, which a caller has asked for, each number needs memory of its own.
        is_of_any_rows = is_pushed(rows, columns, dtype, call.group.world_size)
        return _again_of_any_rows(call, kernels[-1]) if is_of_any_rows else None

    return DeferredCall(
        (call.operator.name, "pushed", call.mark, *_memory(call)),
        take,
        prepare,
        _results,
        is_of_operands=call is given,
        again=again,
    )


def is_pushed(rows: int, columns: int, dtype: torch.dtype, world_size: int) -> bool:
    """Return whether a call has more rows than times are predicted for, and ``"pushed"`` is faster
    than what sums and normalises in two kernels.
    """
    # A rank on its own has slots, too.
    arriving = max(world_size - 1, 1) * rows * columns * dtype.itemsize
    return rows > MOST_NORMED_ROWS and arriving <= MOST_PUSHED_BYTES


def _again_of_any_rows(call: GemmCall, kernel: KernelOfWords) -> AgainCall | None:
    """Return what makes calls of many rows again, whatever their number, past validation, decision
    and preparation. Their product is cuBLAS's, but for rows of float8 that it does not take.
    """
    operands, epilogue, family = call.operands, call.known_epilogue, call.family
    columns, dtype, device = operands.columns, operands.out_dtype, operands.x.device
    relaunch = None if kernel.launch is None else kernel.launch.again()
    if relaunch is None or family is None:
        return None
    eps, take, new = epilogue.eps, _results_of_any_rows(call), empty_rows_on(device)
    # Memory that must grow is for the long way.
    name, most_rows = call.operator.name, next_power_of_2(operands.rows)

    def again(
        group: Group,
        _: Hashable,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        x_scale: torch.Tensor | None,
        w_scale: torch.Tensor | None,
        *vectors: torch.Tensor | None,
    ) -> Normed | None:
        rows = x.shape[0]
        if rows > most_rows:
            return None
        results, mark = take(rows), family.mark(rows)
        product = new(rows, columns, dtype)
        # Looked up each time: peers that take the long way, or replay a capture, may use an older
        # workspace than the first call did.
        arguments = _pushed_memory(group, name, rows, columns, dtype, mark)
        arguments |= _norm_arguments(results, eps, bias, *vectors)
        arguments |= {"part": product, "N": columns, "B": rows}
        with group.launching():
            if x_scale is None:
                tapes.step(torch.mm, x, tapes.step(torch.t, w), out=product)
            else:
                tapes.step(_multiply_scaled, product, x, w, x_scale, w_scale)
            relaunch(_pushing_programs(rows, group), arguments)
        group.has_recorded()
        return results

    return again


def _multiply_scaled(
    product: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
) -> None:
    """Compute the product of float8 operands."""
    operands = Operands(x, w, None, x_scale, w_scale, product.dtype)
    multiply_into(product, operands.all_rows(), operands.weight(), None)


def _results_of_any_rows(call: GemmCall) -> Callable[[int], Normed]:
    """Return what allocates the results of a call like this one, given its number of rows. It
    refers to no operand and no group.
    """
    operands, epilogue = call.operands, call.known_epilogue
    columns, dtype, device = operands.columns, operands.out_dtype, operands.x.device
    shapes = epilogue.result_shapes(1, columns, dtype)
    (_, y_dtype), (_, total_dtype), (scale_shape, scale_dtype) = shapes
    has_scales, row_scales = len(scale_shape) == 2, scale_shape[-1]
    no_scales, new = torch.empty(0, dtype=scale_dtype, device=device), empty_rows_on(device)

    def take(rows: int) -> Normed:
        y, total = new(rows, columns, y_dtype), new(rows, columns, total_dtype)
        tapes.keep(no_scales)
        return Normed(y, total, new(rows, row_scales, scale_dtype) if has_scales else no_scales)

    return take


def _results(*memory: torch.Tensor) -> Normed:
    """Return the results among a call's memory, which come first."""
    return Normed(*memory[:3])


def run_gemm(call: GemmCall) -> PerformedCall:
    """Run the operator around a GEMM, then a kernel that normalises its rows."""
    require(call.group.backend)
    _compile_for_any_tokens(call)
    operands, epilogue = call.operands, call.known_epilogue
    sum_up = functools.partial(
        _sum, operands.out_dtype, call.group_name,
        BATCH_INVARIANT if call.is_batch_invariant else "auto",
    )  # fmt: skip
    total = sum_up(operands.x, operands.w, operands.bias, operands.x_scale, operands.w_scale)
    results = empty_results(call)
    arguments = _sum_arguments(total, results, epilogue.eps, *epilogue.tensors)
    columns = _row_columns(operands.columns)
    constants = {"COLUMNS": columns, "FORM": _form(call, 1), "num_warps": _row_warps(columns)}
    from interlace.operators.gemm_all_reduce.kernels.norm_rows import norm_rows

    norm = Launch(norm_rows, (operands.rows,), arguments, constants)
    norm()
    return PerformedCall(results, lambda: _sum_again(call, sum_up, norm))


def _sum(
    dtype: torch.dtype, group_name: str, impl: str, *tensors: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum over ranks of a product, by the operator around a GEMM.

    Args:
        tensors: The operator's.
    """
    total: torch.Tensor = entrance("gemm_all_reduce")(*tensors, dtype, group_name, impl, "")
    return total.contiguous()


def _sum_arguments(
    total: torch.Tensor, results: Normed, eps: float, *vectors: torch.Tensor | None
) -> dict[str, Any]:
    """Return the arguments of the kernel that normalises a sum with its bias."""
    rows, columns = total.shape
    of_norm = _norm_arguments(results, eps, None, *vectors)
    return {"total": total, "N": columns, "B": rows, **of_norm}


def _sum_again(
    call: GemmCall, sum_up: Callable[..., torch.Tensor], norm: Launch
) -> AgainCall | None:
    """Return what makes calls of any number of rows again, past validation and decision, where
    calls are found so.

    Args:
        sum_up: Returns the sum over ranks of a product; it refers to no operand and no group.
        norm: What has normalised the call's sum.
    """
    # Calls that are found by their addresses too have graphs, which need no such thing.
    relaunch = norm.again() if call.known is None else None
    if relaunch is None:
        return None
    eps, take = call.known_epilogue.eps, _results_of_any_rows(call)

    def again(
        group: Group,
        _: Hashable,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        x_scale: torch.Tensor | None,
        w_scale: torch.Tensor | None,
        *vectors: torch.Tensor | None,
    ) -> Normed:
        total = tapes.step(sum_up, x, w, bias, x_scale, w_scale)
        results = take(len(x))
        relaunch(len(x), _sum_arguments(total, results, eps, *vectors))
        group.has_recorded()
        return results

    return again


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
    operands = call.operands
    shapes = call.known_epilogue.result_shapes(operands.rows, operands.columns, operands.out_dtype)
    return New(operands.x.device, (*shapes, *others))


def empty_results(call: GemmCall) -> Normed:
    """Return the call's results, uninitialised."""
    operands = call.operands
    return call.known_epilogue.empty_results(operands.rows, operands.columns, operands.x)


def _memory(call: GemmCall) -> tuple[Any, ...]:
    """Return where the call's operands lie, by which ``Replays.run`` tells calls apart."""
    epilogue = call.known_epilogue
    return (
        *epilogue.signature(),
        *call.operands.memory(),
        *epilogue.memory(),
    )


def _form(call: GemmCall, sections: int) -> Any:
    from interlace.operators.gemm_all_reduce.kernels.norm import NormForm

    factor = known_factor(call.operands.columns)
    return NormForm(call.known_epilogue.norm, call.known_epilogue.quantization, sections, factor)


def _epilogue_arguments(call: GemmCall, results: Normed) -> dict[str, Any]:
    """Return the arguments of a kernel that normalises, by name."""
    operands, epilogue = call.operands, call.known_epilogue
    arguments = _norm_arguments(results, epilogue.eps, operands.bias, *epilogue.tensors)
    return arguments | {"N": operands.columns, "B": operands.rows}


def _norm_arguments(
    results: Normed,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> dict[str, Any]:
    """Return those of a kernel's arguments that are a call's tensors."""
    inputs, outputs = _norm_tuples()
    scales = results.scale if results.scale.numel() else None
    return {
        "inputs": inputs(bias, residual, norm_weight, norm_bias, scale, eps),
        "outputs": outputs(results.y, results.residual, scales),
    }


@functools.cache  # an import in each call takes longer than to make both
def _norm_tuples() -> tuple[type[Any], type[Any]]:
    """Return what holds a norm's inputs and what holds its outputs, whose module imports Triton."""
    from interlace.operators.gemm_all_reduce.kernels.norm import NormInputs, NormOutputs

    return NormInputs, NormOutputs


def _row_columns(columns: int) -> int:
    """Return the columns of a tile that has whole rows, and whole blocks that share a scale; at
    least one for each thread of a warp.
    """
    return max(next_power_of_2(columns), SCALE_BLOCK)


def _row_warps(columns: int) -> int:
    """Return the warps of a program that has whole rows."""
    return min(max(columns // _COLUMNS_PER_THREAD // 32, 1), 32)


def _sum_rows(
    call: GemmCall, product: torch.Tensor, results: Normed, memory: dict[str, Any]
) -> Launch:
    """Prepare the kernel that exchanges a product's rows.

    Args:
        memory: The arguments by which they travel.
    """
    from interlace.operators.gemm_all_reduce.kernels.norm_rows import sum_and_norm_rows

    group, ranks = call.group, call.group.world_size
    columns = _row_columns(product.shape[1])
    arguments = _epilogue_arguments(call, results) | memory
    arguments["part"] = product
    constants = {
        "WORLD_SIZE": ranks,
        "COLUMNS": columns,
        "FORM": _form(call, 1),
        "num_warps": _row_warps(columns),
    }
    programs = _pushing_programs(len(product), group)
    return Launch(sum_and_norm_rows, (programs,), arguments, constants)


def _pushed_memory(
    group: Group, operator: str, rows: int, columns: int, dtype: torch.dtype, mark: int
) -> dict[str, Any]:
    """Return the arguments by which rows of a product travel. Collective when memory must grow."""
    slot_bytes = _pushed_slot_bytes(rows, columns, dtype, group.world_size)
    return lamport_arguments(group, operator, "pushed", slot_bytes, mark)


@functools.lru_cache(maxsize=1024)  # asked for in every call
def _pushed_slot_bytes(rows: int, columns: int, dtype: torch.dtype, world_size: int) -> int:
    """Return the bytes of a slot for the rows of a product."""
    if is_pushed(rows, columns, dtype, world_size):
        # Programs with many rows have them in any number, and memory should seldom grow.
        rows = next_power_of_2(rows)
    return sum_slot_bytes(rows * columns, dtype.itemsize)


def pushed_reservation(call: GemmCall) -> Reservation:
    """Return the symmetric memory of ``impl="pushed"``."""
    operands, ranks = call.operands, call.group.world_size
    slot_bytes = _pushed_slot_bytes(operands.rows, operands.columns, operands.out_dtype, ranks)
    return lamport_reservation(call, "pushed", slot_bytes)


def _fused_slot(tokens: int, rows: int, block_n: int) -> tuple[int, int]:
    """Return the elements of a slot, and of one token in it, of complete tiles; the compiler must
    know that tokens are aligned.
    """
    block_b = block_tokens(tokens)
    line = round_up(ceil_div(rows, block_n) * block_n, 16)
    return ceil_div(tokens, block_b) * block_b * line, line


def _fused_slot_bytes(call: GemmCall) -> int:
    """Return the bytes of a slot of the fused kernel, whose sums travel as float32."""
    slot, _ = _fused_slot(call.operands.rows, call.operands.columns, call.config.block_n)
    return 4 * slot


def gemm_reservation(call: GemmCall) -> Reservation | None:
    """Return the symmetric memory of ``impl="gemm"``: that of what the sum takes itself."""
    operands, declaration = call.operands, cast(GemmOperator, operator_named("gemm_all_reduce"))
    if operands.x.is_meta:
        return None
    choice = declaration.choice_of(operands, operands.rows, call.group.world_size)
    name, _ = choice.accepted(
        declaration, operands.terms(is_even=True, world_size=call.group.world_size)
    )
    sum_ = dataclasses.replace(
        call, operator=declaration, config=choice.config, configs=choice.configs
    )
    reservation: Reservation | None = declaration.implementation(name).reservation(sum_)
    return reservation


def fused_reservation(call: GemmCall) -> Reservation:
    """Return the symmetric memory of ``impl="fused"``."""
    return lamport_reservation(call, "fused", _fused_slot_bytes(call))


def _pushing_programs(rows: int, group: Group) -> int:
    """Return the programs of the kernel that exchanges a product's rows: one for each row, and one
    behind them that finds out whether the ranks are in the same call.
    """
    return min(rows, CPU_PROGRAMS if group.backend == "cpu" else _MOST_PUSHING) + 1


def _fused(call: GemmCall, results: Normed, memory: dict[str, Any]) -> Launch:
    """Prepare the fused kernel.

    Args:
        memory: The arguments by which sums travel.
    """
    require(call.group.backend)
    from interlace.operators.gemm_all_reduce.kernels.fused_norm import multiply_sum_and_norm

    group, operands, config = call.group, call.operands, call.config
    assert isinstance(config, GemmAllReduceNormConfig)
    x, w, ranks = operands.x, operands.w, group.world_size
    tokens, rows, columns = operands.rows, operands.columns, operands.inner
    block_b = block_tokens(tokens)
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
    if call.known_epilogue.quantization == "block":
        received = max(received, SCALE_BLOCK)
    sections = ceil_div(rows, received)
    receivers = tokens * sections
    producers = min(tiles, config.max_programs or MAX_PROGRAMS, MAX_PROGRAMS - receivers)
    tiling = tiling_of(x, w, config, block_b)
    slot, line = _fused_slot(tokens, rows, config.block_n)
    arguments = _epilogue_arguments(call, results) | memory
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
