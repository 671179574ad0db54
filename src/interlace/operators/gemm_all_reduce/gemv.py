"""``impl="gemv"`` of ``gemm_all_reduce``: one kernel for few rows, which reads the weight once.

Its tiles and protocol come from a tuned table of its own, or from ``default_config``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from interlace.comm import MAX_PROGRAMS, Group
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import Launch, known_factor, triton_dtype
from interlace.comm.replay.deferred import DeferredCall, New
from interlace.comm.replay.replays import places
from interlace.comm.runtime.interpreter import require
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations.refusals import needs
from interlace.gemm.launch import KernelOfWords, row_stride, word_arguments
from interlace.gemm.operands import FLOATS
from interlace.operators.gemm_all_reduce.config import (
    GemmAllReduceNormConfig,
    GemvAllReduceConfig,
    block_tokens,
    default_config,
    fewest_tokens,
)
from interlace.registry import Implementation
from interlace.tuning.choice import Choice, by_device
from interlace.tuning.gpu import Gpu
from interlace.units import ceil_div, round_up

MOST_ROWS = 16
"""Rows up to which ``impl="auto"`` takes this kernel without a measurement of the very sizes. With
more it needs a configuration that was tuned for them: with another one, 24 and 48 rows took 1.35
and 1.5 times the predicted time on two H200s.
"""

TABLE = "gemv_all_reduce"
"""The name of the kernel's tuned tables: that of the public function for few rows."""

_KERNEL = "gemv_all_reduce"
_OPERANDS = ("x", "w", "bias", "y")


def run(call: GemmCall) -> DeferredCall:
    """Return the sum over ranks, ``[M, N]``, by one kernel."""
    operands, mark = call.operands, call.mark
    config = call.configs[GEMV.name]
    is_invariant, leaves = call.is_batch_invariant, call.leaves
    assert isinstance(config, GemvAllReduceConfig)
    x, w, bias = operands.x, operands.w, operands.bias
    # The kernel reads both along K.
    if x.stride(1) != 1:
        x = x.contiguous()
    if w.stride(1) != 1:
        w = w.contiguous()
    take = New.like(x, [x.shape[0], w.shape[0]])
    is_of_operands = x is operands.x and w is operands.w
    kernels: list[KernelOfWords] = []

    def prepare_kernel(y: torch.Tensor) -> KernelOfWords:
        options: dict[str, Any] = {"is_batch_invariant": is_invariant, "leaves": leaves}
        kernels.append(prepare(call.group, x, w, bias, y, config, mark, **options))
        return kernels[-1]

    return DeferredCall(
        (_KERNEL, config, mark, is_invariant, leaves, places(x, w, bias)),
        take,
        prepare_kernel,
        with_libraries=False,
        is_of_operands=is_of_operands,
        again=(lambda: kernels[-1].again(_OPERANDS, take, _enqueue)) if is_of_operands else None,
    )


def _enqueue(
    enqueue: Callable[..., None],
    memory: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Enqueue the kernel for other operands, as :meth:`KernelOfWords.again` has it done."""
    (y,) = memory
    enqueue(x=x, w=w, bias=bias, y=y)


GEMV = Implementation(
    "gemv",
    "one kernel that sends sums as it reads the weight, for few rows",
    run,
    needs(same_dtype=True, dtypes=FLOATS),
    schedule="by_address",
    is_batch_invariant=True,
    config_type=GemvAllReduceConfig,
    # Of the configuration that a call has, and without the copy of a w along N.
    is_predictable=lambda terms: terms.rows <= MOST_ROWS and terms.w_along_k,
    reservation=lambda call: _reservation(call),
)


def tuned(
    *,
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device | Gpu,
) -> Choice[GemvAllReduceConfig]:
    """Return what the kernel's tuned table of a GPU says; without an entry near these sizes, the
    kernel with its default configuration.
    """
    sizes = {"rows": rows, "columns": columns, "inner": inner}
    default = default_config(
        rows=rows, columns=columns, world_size=world_size, itemsize=dtype.itemsize
    )
    small = {"block_n": max(16, min(default.block_n, 64)), "block_k": 256, "max_programs": 8}
    return by_device(
        TABLE, sizes, default, small, GEMV.name, dtype=dtype, world_size=world_size, device=device
    )


def is_default(
    rows: int, dtype: torch.dtype, out_dtype: torch.dtype | None, w_along_k: bool
) -> bool:
    """Return whether the kernel is what runs where no time is known."""
    return rows <= MOST_ROWS and w_along_k and dtype in FLOATS and out_dtype in (None, dtype)


def with_table(
    choice: Choice[Any],
    *,
    out_dtype: torch.dtype | None = None,
    w_along_k: bool = True,
    has_block_scales: bool = False,
    **call: Any,
) -> Choice[Any]:
    """Return a choice with the kernel's configuration; where the table has the very sizes of the
    call, what was measured to be the fastest.

    Args:
        choice: What is taken by predicted times.
        out_dtype: The dtype of the result, if it is not the one that comes by default.
        w_along_k: Whether w is contiguous along K, as all were that were measured.
        has_block_scales: Whether operands are float8 with a scale for each block, which the kernel
            does not multiply.
        call: As :func:`tuned` takes it.
    """
    if has_block_scales:
        return choice
    tabulated = tuned(**call)
    configs: Mapping[str, GemvAllReduceConfig] = {GEMV.name: tabulated.config}
    if not (tabulated.is_exact and w_along_k) or out_dtype not in (None, call["dtype"]):
        return dataclasses.replace(choice, configs=configs)
    return dataclasses.replace(tabulated, config=choice.config, configs=configs)


def with_invariant_tiles(choice: Choice[Any], call: Mapping[str, Any]) -> Choice[Any]:
    """Return a choice with the kernel's configuration of batch-invariant calls, whose smallest
    tiles have several rows.

    Args:
        call: As :func:`tuned` takes it.
    """
    fewest = fewest_tokens(call["device"], call["dtype"])
    config = tuned(**{**call, "rows": max(call["rows"], fewest)}).config
    return dataclasses.replace(choice, configs={GEMV.name: config})


def tiling_of(
    x: torch.Tensor,
    w: torch.Tensor,
    config: GemvAllReduceConfig | GemmAllReduceNormConfig,
    block_b: int,
    leaves: int = 0,
) -> Any:
    """Return how kernels that read the weight once are tiled: a ``GemvTiling``.

    Args:
        x: The tokens, ``[B, K]``.
        w: ``[N, K]``.
        config: Of the kernel.
        block_b: Tokens of a tile.
        leaves: As a ``GemmCall`` has them.
    """
    from interlace.gemm.kernels.gemv import GemvTiling

    (rows, columns), tokens, leaves = w.shape, len(x), max(leaves, 1)
    return GemvTiling(
        block_n=config.block_n,
        block_b=block_b,
        block_k=config.block_k,
        even=rows % config.block_n == 0 and tokens % block_b == 0,
        even_k=columns > 0 and columns // leaves % config.block_k == 0,
        word_values=1,
        factor=known_factor(rows, columns, row_stride(x), row_stride(w)),
        leaves=leaves,
    )


class _Words(NamedTuple):
    """The words in which a call's sums travel.

    Attributes:
        block_b: Tokens of a tile.
        tiles: Number of tiles.
        values: Values of a word.
        slot: Words of a slot.
        size: The size of the workspace.
    """

    block_b: int
    tiles: int
    values: int
    slot: int
    size: WorkspaceSize

    @staticmethod
    def of(
        tokens: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: int,
        config: GemvAllReduceConfig,
        is_batch_invariant: bool,
        leaves: int,
    ) -> _Words:
        """Return the words of ``[tokens, rows]`` sums."""
        fewest = fewest_tokens(device, dtype) if is_batch_invariant else 1
        block_b = block_tokens(tokens, fewest)
        tiles = ceil_div(rows, config.block_n) * ceil_div(tokens, block_b)
        # Two values per word halve the bytes; float32 would lose digits, and a pair is two tokens.
        # The only part of a tree is its whole sum, which is rounded behind the bias.
        is_whole = ranks == 1 and leaves > 0
        values = 2 if dtype.itemsize == 2 and block_b > 1 and not is_whole else 1
        words = tiles * config.block_n * block_b // values
        if config.protocol == "one_shot":
            slot, results = round_up(words, 16), 0
        else:
            owned_rows = tiles * ceil_div(config.block_n, ranks)
            slot, results = round_up(owned_rows * block_b // values, 16), words
        # Protocols have workspaces of their own, because their slots and epochs differ. The 16
        # words in front of the slots say which call this is.
        name, nbytes = f"{_KERNEL}.{config.protocol}", 8 * (16 + ranks * slot + results)
        return _Words(block_b, tiles, values, slot, WorkspaceSize(name, nbytes))


def _reservation(call: GemmCall) -> Reservation:
    x, columns, ranks = call.operands.x, call.operands.columns, call.group.world_size
    config = call.configs.get(GEMV.name) or default_config(
        rows=len(x), columns=columns, world_size=ranks, itemsize=x.itemsize
    )
    assert isinstance(config, GemvAllReduceConfig)
    words = _Words.of(
        len(x), columns, x.dtype, x.device, ranks, config, call.is_batch_invariant, call.leaves
    )
    return Reservation((words.size,))


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
    leaves: int = 0,
) -> KernelOfWords:
    """Prepare the kernel for x ``[B, K]``, its rows contiguous, w ``[N, K]`` and y ``[B, N]``.

    Collective when the workspace must grow.

    Args:
        mark: The number that the ranks' agreement returned.
        is_batch_invariant: Whether a token's result must have the same bits in every batch.
        leaves: As a ``GemmCall`` has them.
    """
    require(group.backend)
    from interlace.operators.gemm_all_reduce.kernels.one_shot import gemv_all_reduce_one_shot
    from interlace.operators.gemm_all_reduce.kernels.two_phase import gemv_all_reduce_two_phase

    tokens, rows, columns, ranks = x.shape[0], w.shape[0], w.shape[1], group.world_size
    words = _Words.of(tokens, rows, x.dtype, x.device, ranks, config, is_batch_invariant, leaves)
    block_b, tiles, values = words.block_b, words.tiles, words.values
    programs = min(tiles, config.max_programs or MAX_PROGRAMS, MAX_PROGRAMS)
    tiling = tiling_of(x, w, config, block_b, leaves)._replace(
        word_values=values,
        round_parts=is_batch_invariant and not (ranks == 1 and leaves > 0),
        node=triton_dtype(x.dtype).name,
        in_tree=leaves > 0,
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
    function = (
        gemv_all_reduce_one_shot if config.protocol == "one_shot" else gemv_all_reduce_two_phase
    )
    find = functools.partial(word_arguments, size=words.size, operator=words.size.name, mark=mark)
    arguments = {
        "x": x,
        "w": w,
        "bias": bias,
        "y": y,
        "slot": words.slot,
        "N": rows,
        "B": tokens,
        "K": columns,
        "tiles": tiles,
        "stride_x": row_stride(x),
        "stride_w": row_stride(w),
    }

    def describe(memory: dict[str, Any]) -> Launch:
        return Launch(function, (programs,), arguments | memory, constants)

    return KernelOfWords(group, find, describe)
