"""Launches of the backward pass: memory and grid of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm import MAX_PROGRAMS, Group
from interlace.comm.constants import on_device
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, triton_dtype
from interlace.operators.embedding_all_to_all import record
from interlace.operators.embedding_all_to_all.config import OPERATOR, EmbeddingAllToAllConfig
from interlace.operators.embedding_all_to_all.landing import describe_landing
from interlace.operators.embedding_all_to_all.launch import Call, lanes_of
from interlace.operators.embedding_all_to_all.layout import dense_bounds
from interlace.operators.embedding_all_to_all.lookups import Sorted, sort_lookups
from interlace.operators.embedding_all_to_all.tables import alignment, entry, owners_of
from interlace.operators.embedding_all_to_all.unfused import exchange, store_dense
from interlace.units import ceil_div, next_power_of_2

BACKWARD = f"{OPERATOR}.backward"
_TICKET = 4  # tiles of runs that a program takes at a time


@dataclasses.dataclass(frozen=True)
class Target:
    """The memory that the kernel writes, for every table of this rank.

    Attributes:
        update: ``"store"`` (gradients), ``"sgd"`` or ``"adagrad"``.
        by_segment: Gradients are stored by the number of the distinct row, not by the row's own.
        address: The address that ``places`` count from.
        places: Bytes from ``address`` to each table's memory; -1 for a table that is left alone.
        strides: Elements between two rows of each table.
        states: Addresses of Adagrad's states; 0 for other updates.
        rows: Number of rows of each table.
        dtype: Element type of the tables, and of the memory.
    """

    update: str
    by_segment: bool
    address: int
    places: Sequence[int]
    strides: Sequence[int]
    states: Sequence[int]
    rows: Sequence[int]
    dtype: torch.dtype
    learning_rate: float = 0.0
    epsilon: float = 0.0


# Autograd calls these functions, through ``op``.


def gradient(
    call: Call,
    grad: torch.Tensor,
    rows: Sequence[int],
    trainable: Sequence[bool],
    table_dtype: torch.dtype,
    sparse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of this rank's tables. Collective.

    Returns:
        Dense: all gradients one after the other, each from a multiple of 64 elements on; two empty
            tensors.
        Sparse: ``[lookups, widest]``, the sum of each distinct row, then its row number among all
            rows of the rank ``[lookups]``, then the first sum of each table, ``[tables + 1]``.
    """
    widths, device = call.layout.widths[call.rank], call.indices.device
    empty = torch.empty(0, dtype=torch.int64, device=device)
    config = call.chosen()
    sorted_lookups = None
    if sparse:
        values = torch.zeros(
            call.indices.shape[0], max(widths, default=1), dtype=table_dtype, device=device
        )
        stride = values.shape[1]
        strides, starts = [stride] * len(rows), [0] * len(rows)
    else:
        # One tensor for all tables, so that one operator returns it, whatever their number.
        elements = dense_bounds(rows, widths)
        values = torch.zeros(elements[-1], dtype=table_dtype, device=device)
        strides, starts = list(widths), [start * table_dtype.itemsize for start in elements[:-1]]
    implementation = call.implementation()
    if implementation != "fused":
        grad = exchange(call, grad)
        if implementation == "unfused" and not sparse:
            store_dense(call, grad, values, rows, trainable)
            return values, empty, torch.empty_like(empty)
        call = call.without_peers()
    elif call.group.spans_nodes:
        grad, sorted_lookups, _ = _receive(call, grad, rows, config)
        call = call.without_peers()
    target = Target(
        update="store",
        by_segment=sparse,
        address=values.data_ptr(),
        places=[start if trains else -1 for start, trains in zip(starts, trainable, strict=True)],
        strides=strides,
        states=[0] * len(rows),
        rows=rows,
        dtype=table_dtype,
    )
    if sparse and sorted_lookups is None:
        sorted_lookups = sort_lookups(call, rows, config.run_lookups)
    _launch(call, grad, target, config, sorted_lookups)
    if not sparse or sorted_lookups is None:
        return values, empty, torch.empty_like(empty)
    return values, *_distinct_rows(call, sorted_lookups, rows)


def update(
    call: Call,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    trainable: Sequence[bool],
    kind: str,
    learning_rate: float,
    epsilon: float,
) -> None:
    """Update this rank's tables, and Adagrad's states, in place. Collective."""
    rows = [weight.shape[0] for weight in call.weights]
    config, lookups = call.chosen(), None
    if call.implementation() != "fused":
        call, grad = call.without_peers(), exchange(call, grad)
    elif call.group.spans_nodes:
        grad, lookups, is_valid = _receive(call, grad, rows, config)
        if is_valid is not None:
            # Without runs of lookups the kernel updates no row.
            lookups = dataclasses.replace(lookups, run_count=lookups.run_count * is_valid)
        call = call.without_peers()
    target = Target(
        update="sgd" if kind == "SGD" else "adagrad",
        by_segment=False,
        # Tables lie anywhere, so the places are addresses.
        address=0,
        places=[
            weight.data_ptr() if trains else -1
            for weight, trains in zip(call.weights, trainable, strict=True)
        ],
        strides=[weight.stride(0) for weight in call.weights],
        states=[state.data_ptr() for state in states] or [0] * len(call.weights),
        rows=rows,
        dtype=call.table_dtype,
        learning_rate=learning_rate,
        epsilon=epsilon,
    )
    _launch(call, grad, target, config, lookups)


def _receive(
    call: Call, grad: torch.Tensor, rows: Sequence[int], config: EmbeddingAllToAllConfig
) -> tuple[torch.Tensor, Sorted, torch.Tensor | None]:
    """Exchange gradients in a group that spans nodes; see ``gradients_between_nodes.exchange``."""
    from interlace.operators.embedding_all_to_all import gradients_between_nodes

    call.group.check()
    return gradients_between_nodes.exchange(
        call, grad.contiguous(), rows, config.run_lookups, agree(call)
    )


def _distinct_rows(
    call: Call, lookups_by_row: Sorted, rows: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of every distinct row, and the count of distinct rows before each table.

    Sizes do not depend on the numbers.
    """
    count = call.indices.shape[0]
    first_keys = [sum(rows[:table]) for table in range(len(rows) + 1)]
    limits = on_device(call.group, [first_keys])[0]
    if not count:
        return torch.empty_like(limits[:0]), torch.zeros_like(limits)
    keys, segment_of = lookups_by_row.keys, lookups_by_row.segment_of
    begins = torch.searchsorted(keys, limits.to(keys.dtype))
    numbers = torch.cat([segment_of, segment_of[-1:] + 1])[begins]
    return keys[lookups_by_row.segments[:-1].clamp(max=count - 1)].long(), numbers.long()


# The launch


def _launch(
    call: Call,
    grad: torch.Tensor,
    target: Target,
    config: EmbeddingAllToAllConfig,
    lookups_by_row: Sorted | None,
) -> None:
    group, layout = call.group, call.layout
    group.check()
    mark = agree(call)
    # Ranks agree on an empty batch, too: their peers would wait for them otherwise.
    if layout.batch == 0 or layout.columns == 0:
        return
    if lookups_by_row is None:
        lookups_by_row = sort_lookups(call, target.rows, config.run_lookups)
    launch = prepare(group, call, grad.contiguous(), target, config, lookups_by_row, mark)
    with group.running():
        launch()


def agree(call: Call) -> int:
    """Agree on this call's backward pass; return its mark (``Group.agree``)."""
    return call.group.agree(
        BACKWARD,
        the_global_batch=call.layout.batch,
        widths=call.layout.widths,
        dtype=str(call.dtype),
        mode=call.mode,
        impl=call.impl,
        config=call.config,
    )


def prepare(
    group: Group,
    call: Call,
    grad: torch.Tensor,
    target: Target,
    config: EmbeddingAllToAllConfig,
    lookups_by_row: Sorted,
    mark: int,
) -> Launch:
    """Prepare the backward launch for a contiguous ``grad`` ``[samples of this rank, columns]``.

    Collective when memory must grow.
    """
    require(group.backend)
    from interlace.operators.embedding_all_to_all.kernels.backward import (
        Runs,
        Writing,
        embedding_all_to_all_backward,
    )
    from interlace.operators.embedding_all_to_all.kernels.transfer import Pushing
    from interlace.operators.embedding_all_to_all.kernels.vectors import Vectors

    layout, ranks, device = call.layout, call.layout.world_size, call.indices.device
    entries, align = _records(call, target, grad)
    landing = 0
    if ranks > 1:
        # Gradients are used up within the call, so no tensor has to keep the memory that they
        # arrive in.
        space = group.outputs.landing(layout.batch * max(layout.rank_columns) * call.dtype.itemsize)
        landing = space.address + space.index * space.buffer_bytes
    tiles = None
    if config.push == "tiles" and ranks > 1 and group.backend == "cuda":
        tiles = describe_landing(group, layout, call.dtype, landing, config.push_rows, align)
    # A table's signals lie at the same place on every rank, however many tables a rank has.
    signals = record.HEADER + record.MAX_TABLES * (1 + record.MAX_RANKS)
    workspace = group.workspace(BACKWARD, 4096, signals)
    pushers = config.push_programs if ranks > 1 else 0
    lookups = call.indices.shape[0]
    width, full = lanes_of(layout.widths[call.rank])
    # At most two runs of long segments begin within as many lookups as a run has.
    slots = 2 * (lookups // config.run_lookups + 1)
    # Programs beyond the last ticket would find nothing to do.
    updaters = min(
        config.update_programs,
        MAX_PROGRAMS - pushers,
        max(1, ceil_div(lookups, config.block_runs * _TICKET)),
    )
    arguments = {
        "tables": on_device(group, entries),
        "owners": on_device(group, owners_of(layout)),
        "bags": lookups_by_row.bags,
        "scale": lookups_by_row.scale,
        "segments": lookups_by_row.segments,
        "runs": lookups_by_row.runs,
        "run_bags": lookups_by_row.run_bags,
        "run_keys": lookups_by_row.run_keys,
        "run_segments": lookups_by_row.run_segments,
        "run_count": lookups_by_row.run_count,
        "tickets": torch.zeros(record.ARRIVALS + slots, dtype=torch.int32, device=device),
        "partials": torch.empty(slots * width, dtype=torch.float32, device=device),
        "gradient": grad.data_ptr(),
        "landing": landing,
        "tiles": tiles,
        "target": target.address,
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(BACKWARD),
        "call": mark,
        "B": layout.batch,
        "chunk": layout.chunk,
        "column_groups": layout.columns // align,
        "landing_groups": max(layout.rank_columns) // align,
        "max_tables": layout.most_tables,
        "learning_rate": target.learning_rate,
        "epsilon": target.epsilon,
    }
    widest = next_power_of_2(max(max(widths, default=1) for widths in layout.widths))
    constants: dict[str, Any] = {
        "WORLD_SIZE": ranks,
        "PUSHING": Pushing(pushers, config.push_rows, config.push_blocks, widest),
        "RUNS": Runs(config.block_runs, config.run_lookups, _TICKET, config.run_unroll),
        "WRITING": Writing(target.update, target.by_segment),
        "VECTORS": Vectors(
            triton_dtype(target.dtype), triton_dtype(call.dtype), width, full, align
        ),
        "num_warps": config.update_warps,
    }
    if config.update_registers:
        constants["maxnreg"] = config.update_registers
    keep = (grad, lookups_by_row)
    return Launch(embedding_all_to_all_backward, (pushers + updaters,), arguments, constants, keep)


def _records(call: Call, target: Target, grad: torch.Tensor) -> tuple[list[tuple[int, ...]], int]:
    """Return this rank's table records, and the alignment of all vectors in elements."""
    layout, rank = call.layout, call.rank
    first, widths = layout.first_column(rank), layout.widths[rank]
    rows = [
        entry(
            width=width, column=first + column, own_column=column,
            first_key=sum(target.rows[:table]), target=start, target_stride=stride, state=state,
        )
        for table, (width, column, start, stride, state) in enumerate(
            zip(
                widths, layout.table_columns(rank), target.places, target.strides, target.states,
                strict=True,
            )
        )
    ]  # fmt: skip
    starts = [
        (target.address + start) // target.dtype.itemsize for start in target.places if start >= 0
    ]
    all_widths = [width for widths in layout.widths for width in widths]
    numbers = [*all_widths, *target.strides, *starts, grad.data_ptr() // grad.element_size()]
    return rows or [entry(width=1, column=0, own_column=0)], alignment(
        numbers, min(target.dtype.itemsize, call.dtype.itemsize)
    )
