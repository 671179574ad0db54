"""Pooling by our kernels: what all of them are launched with, and the launch without peers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.launching.kernels import Launch, triton_dtype
from interlace.comm.runtime.interpreter import require
from interlace.operators.embedding_all_to_all.call import EmbeddingCall
from interlace.operators.embedding_all_to_all.layout import Layout, TableRecord
from interlace.units import alignment, ceil_div, next_power_of_2

_WAVES = 16  # programs of a launch, at most, for each that fits at once
_BYTES_OF_TASKS = 4096  # of rows, at least: some us of a program among as many as fit at once


def pool(call: EmbeddingCall) -> torch.Tensor:
    """Return this rank's pooled vectors of the entire batch, of a call without peers."""
    y = call.new_output()
    if call.is_empty:
        return y
    launch = prepare(call, y.data_ptr())
    with call.group.running():
        launch()
    return y


def prepare(call: EmbeddingCall, address: int) -> Launch:
    """Prepare the launch that pools without peers, into ``[batch, columns]`` at an address."""
    require(call.group.backend)
    from interlace.operators.embedding_all_to_all.kernels.forward import pool_embeddings

    tasks = len(call.weights) * ceil_div(call.layout.batch, call.config.block_bags)
    program_tasks = tasks_of_program(call, tasks)
    programs = max(1, ceil_div(tasks, program_tasks))
    values, constants = arguments(call)
    values |= {"output": address, "program_tasks": program_tasks}
    return Launch(pool_embeddings, (programs,), values, constants)


def tasks_of_program(call: EmbeddingCall, tasks: int) -> int:
    """Return the number of blocks that each program pools, where programs wait for nothing.

    There are more programs than fit at once, so that the GPU shares them out.
    """
    waves = 1 if call.group.backend == "cpu" else _WAVES
    return max(fewest_tasks(call, tasks), ceil_div(tasks, waves * call.config.max_programs))


def fewest_tasks(call: EmbeddingCall, tasks: int) -> int:
    """Return the least number of blocks that are worth the start of a program, or a trip to memory
    to draw them.

    Args:
        tasks: Number of all blocks, of which each program should have some.
    """
    tables = max(1, len(call.weights))
    row_bytes = call.layout.rank_columns[call.rank] // tables * call.table_dtype.itemsize
    lookups = call.indices.shape[0] * call.config.block_bags // (tables * call.layout.batch)
    worth = ceil_div(_BYTES_OF_TASKS, max(1, lookups * row_bytes))
    return max(1, min(worth, tasks // call.config.max_programs))


def arguments(call: EmbeddingCall) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what every kernel that pools is launched with.

    Returns:
        The tables and the lookups, by the names of their parameters; and the constants of pooling
        and Triton's options.
    """
    from interlace.operators.embedding_all_to_all.kernels.forward import Lookups, Pooling
    from interlace.operators.embedding_all_to_all.kernels.vectors import Vectors

    config, layout = call.config, call.layout
    tables = tuple((weight.data_ptr(), weight.stride(0)) for weight in call.weights)
    records, align = _records(
        tables, layout, call.rank, call.table_dtype.itemsize, call.dtype.itemsize
    )
    arguments = {
        "lookups": Lookups(
            call.group.cache.tables.on_device(records), call.indices, call.offsets, call.scale
        ),
        "B": layout.batch,
        "T": len(call.weights),
        "column_groups": layout.columns // align,
    }
    width, full = lanes_of(layout.widths[call.rank])
    constants = {
        "POOLING": Pooling(config.block_bags, config.stages, mean=call.mode == "mean"),
        "VECTORS": Vectors(
            triton_dtype(call.table_dtype).name, triton_dtype(call.dtype).name, width, full, align
        ),
        "num_warps": config.num_warps,
    }
    return arguments, constants


@functools.lru_cache(maxsize=256)
def _records(
    tables: tuple[tuple[int, int], ...],
    layout: Layout,
    rank: int,
    itemsize: int,
    output_itemsize: int,
) -> tuple[tuple[TableRecord, ...], int]:
    """Return this rank's table records, and the alignment of its vectors in elements."""
    first, widths = layout.first_column(rank), layout.widths[rank]
    rows = tuple(
        TableRecord(
            width=width, column=first + column, own_column=column, address=address, stride=stride
        )
        for (address, stride), width, column in zip(
            tables, widths, layout.table_columns(rank), strict=True
        )
    )
    # Vectors are loaded and stored as wide as the greatest common alignment of all their addresses.
    starts = [address // itemsize for address, _ in tables]
    numbers = [layout.columns, first, *widths, *(stride for _, stride in tables), *starts]
    return rows or (TableRecord(),), alignment(min(itemsize, output_itemsize), *numbers)


def lanes_of(widths: Sequence[int]) -> tuple[int, bool]:
    """Return the lanes of a vector, a power of two, and whether every table fills them."""
    width = next_power_of_2(max(widths, default=1))
    return width, all(table_width == width for table_width in widths)
