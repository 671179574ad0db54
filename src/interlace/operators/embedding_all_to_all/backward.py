"""Launches of the backward pass: memory and grid of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import MAX_PROGRAMS, Group
from interlace.comm.launching.constants import on_device
from interlace.comm.launching.kernels import Launch, triton_dtype
from interlace.comm.runtime.interpreter import require
from interlace.operators.embedding_all_to_all import record
from interlace.operators.embedding_all_to_all.config import OPERATOR, EmbeddingAllToAllConfig
from interlace.operators.embedding_all_to_all.landing import describe_landing
from interlace.operators.embedding_all_to_all.launch import EmbeddingCall, lanes_of
from interlace.operators.embedding_all_to_all.layout import dense_bounds
from interlace.operators.embedding_all_to_all.lookups import Sorted, sort_lookups
from interlace.operators.embedding_all_to_all.tables import alignment, entry, owners_of
from interlace.operators.embedding_all_to_all.unfused import exchange, store_dense
from interlace.units import ceil_div, next_power_of_2

if TYPE_CHECKING:
    from interlace.operators.embedding_all_to_all.gradients_between_nodes import Part

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
    call: EmbeddingCall,
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
    if implementation == "fused" and call.group.spans_nodes:
        sorted_lookups = _launch_between_nodes(call, grad, target, config, applies=False)
        call = call.without_peers()
    else:
        if sparse:
            sorted_lookups = sort_lookups(call, rows, config.run_lookups)
        _launch(call, grad, target, config, sorted_lookups)
    if not sparse or sorted_lookups is None:
        return values, empty, torch.empty_like(empty)
    return values, *_distinct_rows(call, sorted_lookups, rows)


def update(
    call: EmbeddingCall,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    trainable: Sequence[bool],
    kind: str,
    learning_rate: float,
    epsilon: float,
) -> None:
    """Update this rank's tables, and Adagrad's states, in place. Collective."""
    rows = [weight.shape[0] for weight in call.weights]
    config, implementation = call.chosen(), call.implementation()
    if implementation != "fused":
        call, grad = call.without_peers(), exchange(call, grad)
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
    if implementation == "fused" and call.group.spans_nodes:
        _launch_between_nodes(call, grad, target, config, applies=True)
    else:
        _launch(call, grad, target, config, None)


def _distinct_rows(
    call: EmbeddingCall, lookups_by_row: Sorted, rows: Sequence[int]
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
    call: EmbeddingCall,
    grad: torch.Tensor,
    target: Target,
    config: EmbeddingAllToAllConfig,
    lookups_by_row: Sorted | None,
    part: Part | None = None,
) -> None:
    group, layout = call.group, call.layout
    group.check()
    mark = agree(call)
    # Ranks agree on an empty batch, too: their peers would wait for them otherwise.
    if layout.batch == 0 or layout.columns == 0:
        return
    if lookups_by_row is None:
        lookups_by_row = sort_lookups(call, target.rows, config.run_lookups)
    launch = prepare(group, call, grad.contiguous(), target, config, lookups_by_row, mark, part)
    with group.running():
        launch()


def _launch_between_nodes(
    call: EmbeddingCall,
    grad: torch.Tensor,
    target: Target,
    config: EmbeddingAllToAllConfig,
    applies: bool,
) -> Sorted:
    """Exchange gradients in a group that spans nodes, and launch the kernel without peers for each
    part of them that has arrived; return the sorted lookups. Collective.

    Args:
        applies: Whether tables are updated.
    """
    from interlace.operators.embedding_all_to_all import gradients_between_nodes

    call.group.check()
    received = gradients_between_nodes.exchange(
        call, grad.contiguous(), target.rows, config.run_lookups, agree(call), applies
    )
    with received as gradients:
        for part in gradients.parts:
            if part.gradients.shape[1]:
                whole = call.without_peers()
                _launch(whole, part.gradients, target, config, gradients.lookups, part)
    return gradients.lookups


def agree(call: EmbeddingCall) -> int:
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
    call: EmbeddingCall,
    grad: torch.Tensor,
    target: Target,
    config: EmbeddingAllToAllConfig,
    lookups_by_row: Sorted,
    mark: int,
    part: Part | None = None,
) -> Launch:
    """Prepare the backward launch for a contiguous ``grad`` ``[samples of this rank, columns]``.

    Collective when memory must grow.

    Args:
        part: The part of this rank's tables whose gradients ``grad`` has, for a call without peers;
            default: all of them.
    """
    require(group.backend)
    from interlace.operators.embedding_all_to_all.kernels.backward import (
        Progress,
        Runs,
        SortedRuns,
        Tables,
        Writing,
        embedding_all_to_all_backward,
    )
    from interlace.operators.embedding_all_to_all.kernels.rows import Rates
    from interlace.operators.embedding_all_to_all.kernels.transfer import GradientPushing
    from interlace.operators.embedding_all_to_all.kernels.vectors import Vectors

    layout, ranks, device = call.layout, call.layout.world_size, call.indices.device
    entries, align = _records(call, target, grad, 0 if part is None else part.first_column)
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
    # The number of the next run to be drawn comes first.
    tickets = torch.zeros(record.ARRIVALS + slots, dtype=torch.int32, device=device)
    if part is not None and part.first_run is not None:
        tickets[:1].copy_(part.first_run)
    arguments = {
        "tables": Tables(on_device(group, entries), on_device(group, owners_of(layout))),
        "bags": lookups_by_row.bags,
        "scale": lookups_by_row.scale,
        "runs": SortedRuns(
            openings=lookups_by_row.segments,
            starts=lookups_by_row.runs,
            bags=lookups_by_row.run_bags,
            keys=lookups_by_row.run_keys,
            segments=lookups_by_row.run_segments,
            count=lookups_by_row.run_count if part is None else part.end_run,
        ),
        "progress": Progress(
            tickets, torch.empty(slots * width, dtype=torch.float32, device=device)
        ),
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
        "column_groups": grad.shape[1] // align,
        "landing_groups": max(layout.rank_columns) // align,
        "max_tables": layout.most_tables,
        "rates": Rates(target.learning_rate, target.epsilon),
    }
    widest = next_power_of_2(max(max(widths, default=1) for widths in layout.widths))
    constants: dict[str, Any] = {
        "WORLD_SIZE": ranks,
        "PUSHING": GradientPushing(pushers, config.push_rows, config.push_blocks, widest),
        "RUNS": Runs(config.block_runs, config.run_lookups, _TICKET, config.run_unroll),
        "WRITING": Writing(target.update, target.by_segment),
        "VECTORS": Vectors(
            triton_dtype(target.dtype), triton_dtype(call.dtype), width, full, align
        ),
        "num_warps": config.update_warps,
    }
    if config.update_registers:
        constants["maxnreg"] = config.update_registers
    keep = (grad, lookups_by_row, part)
    return Launch(embedding_all_to_all_backward, (pushers + updaters,), arguments, constants, keep)


def _records(
    call: EmbeddingCall, target: Target, grad: torch.Tensor, first_column: int
) -> tuple[list[tuple[int, ...]], int]:
    """Return this rank's table records, and the alignment of all vectors in elements.

    Args:
        first_column: The column of this rank's tables at which ``grad`` begins.
    """
    layout, rank = call.layout, call.rank
    first, widths = layout.first_column(rank) - first_column, layout.widths[rank]
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
