"""The kernel of the backward pass: what it writes, its memory and its grid."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from interlace.comm import MAX_PROGRAMS, Group, Workspace
from interlace.comm.groups.outputs import Output
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.launching.kernels import Launch, triton_dtype
from interlace.comm.replay.deferred import DeferredCall
from interlace.comm.replay.replays import places
from interlace.comm.runtime.interpreter import require
from interlace.operators.embedding_all_to_all.call import EmbeddingCall
from interlace.operators.embedding_all_to_all.config import OPERATOR
from interlace.operators.embedding_all_to_all.layout import (
    ARRIVALS,
    HEADER,
    LEFT_ALONE,
    MAX_RANKS,
    MAX_TABLES,
    TICKET,
    Layout,
    TableRecord,
    dense_bounds,
    owners_of,
)
from interlace.operators.embedding_all_to_all.lookups import Sorted, first_keys_of, sort_lookups
from interlace.operators.embedding_all_to_all.pooling import lanes_of
from interlace.units import alignment, ceil_div, next_power_of_2

BACKWARD = f"{OPERATOR}.backward"


@dataclasses.dataclass(frozen=True)
class Target:
    """The memory that the kernel writes, for every table of this rank.

    Attributes:
        update: ``"store"`` (gradients), ``"sgd"`` or ``"adagrad"``.
        places: Bytes from ``address`` to each table's memory, or :data:`LEFT_ALONE`.
        strides: Elements between two rows of each table.
        states: Addresses of Adagrad's states; 0 for other updates.
        rows: Number of rows of each table.
        dtype: Element type of the tables, and of the memory.
        values: The gradients of all tables; None for updates.
        by_segment: Gradients are stored by the number of the distinct row, not by the row's own.
        learning_rate: The learning rate of an update.
        epsilon: Adagrad's epsilon; 0 for other updates.
    """

    update: str
    places: Sequence[int]
    strides: Sequence[int]
    states: Sequence[int]
    rows: Sequence[int]
    dtype: torch.dtype
    values: torch.Tensor | None = None
    by_segment: bool = False
    learning_rate: float = 0.0
    epsilon: float = 0.0

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Return all of a target of tables, for the key of a replay."""
        tables = map(tuple, (self.places, self.strides, self.states, self.rows))
        return self.update, self.dtype, self.learning_rate, self.epsilon, *tables

    @property
    def address(self) -> int:
        """Return the address that ``places`` count from: 0 for tables, which lie anywhere."""
        return 0 if self.values is None else self.values.data_ptr()


@dataclasses.dataclass(frozen=True)
class Part:
    """Describe the tables of this rank whose gradients, of the entire batch, a launch is given.

    Attributes:
        first_column: The first of their columns among those of this rank's tables.
        first_run: The first run of lookups of these tables, int32 ``[1]`` on the device; None for
            the first run of all.
        end_run: The run behind their last one, int32 ``[1]`` on the device.
    """

    first_column: int
    first_run: torch.Tensor | None
    end_run: torch.Tensor


def gradients_target(
    call: EmbeddingCall,
    rows: Sequence[int],
    trainable: Sequence[bool],
    dtype: torch.dtype,
    sparse: bool,
) -> Target:
    """Return new memory for the gradients of this rank's tables, filled with zeros.

    Dense gradients lie one after the other in one tensor, each from a multiple of 64 elements on.
    Sparse ones are ``[lookups, widest]``: the sum of each distinct row.

    Args:
        call: The call.
        rows: Rows of each table.
        trainable: Whether each table has a gradient.
        dtype: Element type of the tables.
        sparse: Whether gradients are sparse.
    """
    widths, device = call.layout.widths[call.rank], call.indices.device
    if sparse:
        widest = max(widths, default=1)
        values = torch.zeros(call.indices.shape[0], widest, dtype=dtype, device=device)
        strides, starts = [widest] * len(rows), [0] * len(rows)
    else:
        # One tensor for all tables, so that one operator returns it, whatever their number.
        elements = dense_bounds(rows, widths)
        values = torch.zeros(elements[-1], dtype=dtype, device=device)
        strides, starts = list(widths), [start * dtype.itemsize for start in elements[:-1]]
    places = [
        start if trains else LEFT_ALONE for start, trains in zip(starts, trainable, strict=True)
    ]
    return Target("store", places, strides, [0] * len(rows), rows, dtype, values, by_segment=sparse)


def update_target(
    call: EmbeddingCall,
    states: Sequence[torch.Tensor],
    trainable: Sequence[bool],
    kind: str,
    learning_rate: float,
    epsilon: float,
) -> Target:
    """Return this rank's tables, and Adagrad's states, as memory that is updated in place."""
    return Target(
        update="sgd" if kind == "SGD" else "adagrad",
        places=[
            weight.data_ptr() if trains else LEFT_ALONE
            for weight, trains in zip(call.weights, trainable, strict=True)
        ],
        strides=[weight.stride(0) for weight in call.weights],
        states=[state.data_ptr() for state in states] or [0] * len(call.weights),
        rows=[weight.shape[0] for weight in call.weights],
        dtype=call.table_dtype,
        learning_rate=learning_rate,
        epsilon=epsilon,
    )


def distinct_rows(
    call: EmbeddingCall, lookups_by_row: Sorted, rows: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of every distinct row among all rows of the rank, ``[lookups]``, and the
    count of distinct rows before each table, ``[tables + 1]``.

    Sizes do not depend on the numbers.
    """
    count = call.indices.shape[0]
    limits = call.group.cache.tables.on_device([first_keys_of(rows)])[0]
    if not count:
        return torch.empty_like(limits[:0]), torch.zeros_like(limits)
    keys, begun = lookups_by_row.keys, lookups_by_row.segments_begun
    begins = torch.searchsorted(keys, limits.to(keys.dtype))
    numbers = torch.cat([torch.zeros_like(begun[:1]), begun])[begins]
    return keys[lookups_by_row.segments[:-1].clamp(max=count - 1)].long(), numbers.long()


def run(call: EmbeddingCall, grad: torch.Tensor, target: Target) -> Sorted:
    """Sort this rank's lookups and launch the kernel; return the lookups by row. Collective.

    Args:
        call: The call.
        grad: Contiguous gradients of this rank's samples, ``[samples of this rank, columns]``.
        target: The memory that the kernel writes.
    """
    lookups_by_row = sort_lookups(call, target.rows)
    if not call.is_empty:
        launch(call, grad, target, lookups_by_row)
    return lookups_by_row


def update(call: EmbeddingCall, grad: torch.Tensor, target: Target) -> DeferredCall:
    """Return the work of :func:`run` on tables that it updates in place, whose result is ().

    Sorting is a part of it, as the host takes longer to enqueue its steps than the GPU to take
    them.
    """

    def prepared(*landing: Output) -> Callable[[], None]:
        _reserve(call)  # what may have to grow

        def enqueue() -> None:
            prepare(call, grad, target, sort_lookups(call, target.rows))()

        return enqueue

    return DeferredCall(
        (
            *(BACKWARD, call.mark, call.config, call.layout, call.mode, call.dtype),
            *(call.indices.shape, *places(call.indices, call.offsets, call.scale, grad)),
            *target.key,
        ),
        functools.partial(_landing, call.layout, call.dtype.itemsize),
        prepared,
        lambda *landing: (),
        where=_address,
        with_libraries=False,
        temporary_bytes=_temporary_bytes(call),
    )


def launch(
    call: EmbeddingCall,
    grad: torch.Tensor,
    target: Target,
    lookups_by_row: Sorted,
    part: Part | None = None,
) -> None:
    """Launch the kernel; see :func:`prepare`."""
    prepared = prepare(call, grad, target, lookups_by_row, part)
    with call.group.running():
        prepared()


def prepare(
    call: EmbeddingCall,
    grad: torch.Tensor,
    target: Target,
    lookups_by_row: Sorted,
    part: Part | None = None,
) -> Launch:
    """Prepare the backward launch for a contiguous ``grad`` ``[samples of this rank, columns]``.

    Collective when memory must grow.

    Args:
        call: The call.
        grad: The gradients of pooled vectors.
        target: The memory that the kernel writes.
        lookups_by_row: This rank's lookups.
        part: The part of this rank's tables whose gradients ``grad`` has, for a call without peers;
            default: all of them.
    """
    require(call.group.backend)
    from interlace.operators.embedding_all_to_all.kernels.backward import (
        Progress,
        Runs,
        SortedRuns,
        Tables,
        Writing,
        embedding_all_to_all_backward,
    )
    from interlace.operators.embedding_all_to_all.kernels.gradients import GradientPushing, Rates
    from interlace.operators.embedding_all_to_all.kernels.vectors import Vectors

    group, config, device = call.group, call.config, call.indices.device
    layout, ranks = call.layout, call.layout.world_size
    entries, align = _records(call, target, grad, 0 if part is None else part.first_column)
    landing, workspace = _reserve(call)
    pushers = config.push_programs if ranks > 1 else 0
    lookups = call.indices.shape[0]
    width, full = lanes_of(layout.widths[call.rank])
    slots = _slots(call)
    # Programs beyond the last ticket would find nothing to do.
    updaters = min(
        config.update_programs,
        MAX_PROGRAMS - pushers,
        max(1, ceil_div(lookups, config.block_runs * TICKET)),
    )
    # The number of the next run to be drawn comes first.
    tickets = torch.zeros(ARRIVALS + slots, dtype=torch.int32, device=device)
    if part is not None and part.first_run is not None:
        tickets[:1].copy_(part.first_run)
    arguments = {
        "tables": Tables(
            group.cache.tables.on_device(entries), group.cache.tables.on_device(owners_of(layout))
        ),
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
        "target": target.address,
        "signals": workspace.signals.address,
        "epochs": workspace.epochs,
        "ctx": group.context(BACKWARD),
        "call": call.mark,
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
        "RUNS": Runs(config.block_runs, config.run_lookups),
        "WRITING": Writing(target.update, target.by_segment),
        "VECTORS": Vectors(
            triton_dtype(target.dtype).name, triton_dtype(call.dtype).name, width, full, align
        ),
        "num_warps": config.update_warps,
    }
    if config.update_registers:
        constants["maxnreg"] = config.update_registers
    keep = (grad, lookups_by_row, part)
    return Launch(embedding_all_to_all_backward, (pushers + updaters,), arguments, constants, keep)


def _reserve(call: EmbeddingCall) -> tuple[int, Workspace]:
    """Return the address at which peers' gradients arrive, 0 without peers, and the memory of
    signals. Collective when memory must grow.
    """
    landing = _address(*_landing(call.layout, call.dtype.itemsize, call.group))
    return landing, call.group.workspace(*_SIGNALS)


# A table's signals lie at the same place on every rank, however many tables a rank has.
_SIGNALS = WorkspaceSize(BACKWARD, 4096, HEADER + MAX_TABLES * (1 + MAX_RANKS))


def reservation(layout: Layout, itemsize: int) -> Reservation:
    """Return the symmetric memory of the backward pass on one node: signals, and where peers'
    gradients of ``itemsize`` bytes arrive.
    """
    return Reservation((_SIGNALS,), _landing_bytes(layout, itemsize))


def _landing_bytes(layout: Layout, itemsize: int) -> int:
    return layout.batch * max(layout.rank_columns) * itemsize


def _temporary_bytes(call: EmbeddingCall) -> int:
    """Return the bytes that a pass takes for itself: for each lookup its keys, before and after
    they are sorted, what sorts them, and some ten numbers; and the sums of parts of long runs.
    """
    lookups = call.indices.shape[0]
    width, _ = lanes_of(call.layout.widths[call.rank])
    return 72 * lookups + 4 * width * _slots(call)


def _slots(call: EmbeddingCall) -> int:
    """Return how many sums of parts there are: at most two runs of long segments begin within as
    many lookups as a run has.
    """
    return 2 * (call.indices.shape[0] // call.config.run_lookups + 1)


def _landing(layout: Layout, itemsize: int, group: Group) -> tuple[Output, ...]:
    """Return where peers' gradients arrive; nothing without peers.

    Gradients are used up within the call, so no tensor has to keep that memory.
    """
    if layout.world_size == 1:
        return ()
    return (group.outputs.landing(_landing_bytes(layout, itemsize)),)


def _address(*landing: Output) -> int:
    """Return the address of what :func:`_landing` returns, on rank 0."""
    return sum(output.destination.own_address for output in landing)


def _records(
    call: EmbeddingCall, target: Target, grad: torch.Tensor, first_column: int
) -> tuple[list[TableRecord], int]:
    """Return this rank's table records, and the alignment of all vectors in elements.

    Args:
        first_column: The column of this rank's tables at which ``grad`` begins.
    """
    layout, rank = call.layout, call.rank
    first, widths = layout.first_column(rank) - first_column, layout.widths[rank]
    rows = [
        TableRecord(
            width=width, column=first + column, own_column=column,
            first_key=first_key, target=start, target_stride=stride, state=state,
        )
        for width, column, first_key, start, stride, state in zip(
            widths, layout.table_columns(rank), first_keys_of(target.rows)[:-1], target.places,
            target.strides, target.states, strict=True,
        )
    ]  # fmt: skip
    starts = [
        (target.address + start) // target.dtype.itemsize for start in target.places if start >= 0
    ]
    all_widths = [width for widths in layout.widths for width in widths]
    numbers = [*all_widths, *target.strides, *starts, grad.data_ptr() // grad.element_size()]
    itemsize = min(target.dtype.itemsize, call.dtype.itemsize)
    return rows or [TableRecord()], alignment(itemsize, *numbers)
