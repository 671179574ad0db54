"""From a gradient to a kernel launch: lookups sorted by row, memory, grid, the launch; and the
unfused way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm import MAX_PROGRAMS, Group
from interlace.comm.constants import on_device
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, describe_ranks, triton_dtype
from interlace.operators.embedding_all_to_all import record
from interlace.operators.embedding_all_to_all.config import OPERATOR, EmbeddingAllToAllConfig
from interlace.operators.embedding_all_to_all.launch import MOST_TILE_BYTES, Call, lanes_of
from interlace.operators.embedding_all_to_all.layout import Layout, dense_bounds
from interlace.operators.embedding_all_to_all.tables import alignment, entry, owners_of
from interlace.operators.embedding_all_to_all.unfused import alone, exchanged, store_dense
from interlace.units import ceil_div, next_power_of_2

_NAME = f"{OPERATOR}.backward"
_TICKET = 4  # tiles of runs that a program takes at a time


@dataclasses.dataclass(frozen=True)
class Target:
    """What the kernel writes, for every table of this rank.

    Attributes:
        update: ``"store"`` (gradients), ``"sgd"`` or ``"adagrad"``.
        by_segment: gradients are stored by the number of the distinct row, not by the row's own.
        address: bytes that ``places`` count from.
        places: of each table; -1 for a table that is left alone.
        strides: elements between two rows.
        states: addresses of Adagrad's states; 0 otherwise.
        rows: of each table.
        dtype: of what is written, and of the tables.
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


@dataclasses.dataclass(frozen=True)
class Sorted:
    """This rank's lookups in the order of tables and rows; every tensor has a size known without
    looking at the numbers.

    Attributes:
        keys: of each lookup, its row's number among all rows of the rank; ascending.
        bags: of each lookup, its bag.
        scale: of each lookup, its factor, float32; None for 1.
        segment_of: of each lookup, the number of its distinct row.
        segments: where each distinct row's lookups begin; beyond the last, the number of lookups.
        runs: where each run of at most ``run_lookups`` lookups of one row begins; beyond the last,
            the number of lookups.
        run_bags, run_keys, run_segments: of each run, the bag of its first lookup, its row's key
            and its row's segment.
        run_count: how many runs there are, on the device.
    """

    keys: torch.Tensor
    bags: torch.Tensor
    scale: torch.Tensor | None
    segment_of: torch.Tensor
    segments: torch.Tensor
    runs: torch.Tensor
    run_bags: torch.Tensor
    run_keys: torch.Tensor
    run_segments: torch.Tensor
    run_count: torch.Tensor


def sort_lookups(call: Call, rows: Sequence[int], run_lookups: int) -> Sorted:
    """Depends on indices and offsets alone, not on gradients; does not wait for the device."""
    device, count = call.indices.device, call.indices.shape[0]
    batch, tables = call.layout.batch, len(rows)
    if not count:
        none = torch.zeros(1, dtype=torch.int32, device=device)
        return Sorted(
            none,
            none,
            None if call.scale is None else none.float(),
            none,
            none.repeat(2),
            none.repeat(2),
            none,
            none,
            none,
            none,
        )
    small = sum(rows) < 2**31 - 1
    first_keys = on_device(call.group, [[sum(rows[:table]) for table in range(tables)]])[0]
    numbers = torch.arange(tables * batch, dtype=torch.int32, device=device)
    lengths = call.offsets.diff()
    bags = torch.repeat_interleave(numbers, lengths, output_size=count)
    keys = call.indices + first_keys[torch.div(bags, batch, rounding_mode="floor")]
    keys, order = torch.sort(keys.to(torch.int32 if small else torch.int64), stable=True)
    scale = None if call.scale is None else call.scale.float()
    if call.mode == "mean":
        scale = lengths.clamp(min=1).float().reciprocal()[bags]
    new = torch.ones(count, dtype=torch.bool, device=device)
    torch.ne(keys[1:], keys[:-1], out=new[1:])
    places = torch.arange(count + 1, dtype=torch.int32, device=device)
    segment_of, segments = _starts(new, places)
    first = (places[:-1] - segments[segment_of]) % run_lookups == 0
    run_of, runs = _starts(first, places)
    scale, bags = None if scale is None else scale[order], bags[order]
    openings = runs.clamp(max=count - 1)
    run_bags, run_keys, run_segments = (
        each.index_select(0, openings) for each in (bags, keys, segment_of)
    )
    return Sorted(
        keys,
        bags,
        scale,
        segment_of,
        segments,
        runs,
        run_bags,
        run_keys,
        run_segments,
        run_of[-1:] + 1,
    )


def _starts(first: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of the group that each element is in, given which ones begin a group; and where each
    group begins.
    """
    group_of = first.cumsum(0, dtype=torch.int32) - 1
    return group_of, torch.searchsorted(group_of, places, out_int32=True)


# What autograd calls, through ``op``


def gradient(
    call: Call,
    grad: torch.Tensor,
    rows: Sequence[int],
    trainable: Sequence[bool],
    table_dtype: torch.dtype,
    sparse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's tables. Collective.

    Returns:
        Dense: all gradients one after the other, each from a multiple of 64 elements on; two empty
            tensors.
        Sparse: ``[lookups, widest]``, the sum of each distinct row, then its row number among all
        rows of the rank ``[lookups]``, then where each table's begin, ``[tables + 1]``.
    """
    widths, device = call.layout.widths[call.rank], call.indices.device
    none = torch.empty(0, dtype=torch.int64, device=device)
    config = call.chosen()
    if sparse:
        sorted_lookups = sort_lookups(call, rows, config.run_lookups)
        values = torch.zeros(
            call.indices.shape[0], max(widths, default=1), dtype=table_dtype, device=device
        )
        stride = values.shape[1]
        strides, places = [stride] * len(rows), [0] * len(rows)
    else:
        elements = dense_bounds(rows, widths)
        values = torch.zeros(elements[-1], dtype=table_dtype, device=device)
        sorted_lookups = None
        strides, places = list(widths), [place * table_dtype.itemsize for place in elements[:-1]]
    places = [place if wanted else -1 for place, wanted in zip(places, trainable, strict=True)]
    if call.impl == "unfused":
        own = exchanged(call, grad)
        if not sparse:
            store_dense(call, own, values, rows, trainable)
            return values, none, torch.empty_like(none)
        call, grad = alone(call), own
    target = Target(
        "store", sparse, values.data_ptr(), places, strides, [0] * len(rows), rows, table_dtype
    )
    _launch(call, grad, target, config, sorted_lookups)
    if sorted_lookups is None:
        return values, none, torch.empty_like(none)
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
    if call.impl == "unfused":
        call, grad = alone(call), exchanged(call, grad)
    target = Target(
        update="sgd" if kind == "SGD" else "adagrad",
        by_segment=False,
        address=0,
        places=[
            weight.data_ptr() if wanted else -1
            for weight, wanted in zip(call.weights, trainable, strict=True)
        ],
        strides=[weight.stride(0) for weight in call.weights],
        states=[state.data_ptr() for state in states] or [0] * len(call.weights),
        rows=[weight.shape[0] for weight in call.weights],
        dtype=call.table_dtype,
        learning_rate=learning_rate,
        epsilon=epsilon,
    )
    _launch(call, grad, target, call.chosen(), None)


def _distinct_rows(
    call: Call, found: Sorted, rows: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row number of every distinct row, and how many of them come before each table; sizes do not
    depend on the numbers.
    """
    count = call.indices.shape[0]
    first_keys = [sum(rows[:table]) for table in range(len(rows) + 1)]
    limits = on_device(call.group, [first_keys])[0]
    if not count:
        return torch.empty_like(limits[:0]), torch.zeros_like(limits)
    begins = torch.searchsorted(found.keys, limits.to(found.keys.dtype))
    numbers = torch.cat([found.segment_of, found.segment_of[-1:] + 1])[begins]
    return found.keys[found.segments[:-1].clamp(max=count - 1)].long(), numbers.long()


# The launch


def _launch(
    call: Call,
    grad: torch.Tensor,
    target: Target,
    config: EmbeddingAllToAllConfig,
    found: Sorted | None,
) -> None:
    group, layout = call.group, call.layout
    group.check()
    mark = agree(call)
    if layout.batch == 0 or layout.columns == 0:
        return
    found = sort_lookups(call, target.rows, config.run_lookups) if found is None else found
    launch = prepare(group, call, grad.contiguous(), target, config, found, mark)
    with group.running():
        launch()


def agree(call: Call) -> int:
    """The mark of this call's backward pass; see ``Group.agree``."""
    return call.group.agree(
        _NAME,
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
    """The backward launch for a contiguous ``grad`` ``[samples of this rank, columns]``. Collective
    when memory must grow.
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
        space = group.outputs.landing(layout.batch * max(layout.rank_columns) * call.dtype.itemsize)
        landing = space.address + space.index * space.buffer_bytes
    tiles = None
    if config.push == "tiles" and ranks > 1 and group.backend == "cuda":
        tiles = _describe_landing(group, layout, call.dtype, landing, config.push_rows, align)
    signals = record.HEADER + record.MAX_TABLES * (1 + record.MAX_RANKS)
    workspace = group.workspace(_NAME, 4096, signals)
    pushers = config.push_programs if ranks > 1 else 0
    lookups = call.indices.shape[0]
    width, full = lanes_of(layout.widths[call.rank])
    slots = 2 * (lookups // config.run_lookups + 1)
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
        "ctx": group.context(_NAME),
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
    """This rank's table records, and how all vectors that the kernel moves are aligned, in
    elements.
    """
    layout, rank = call.layout, call.rank
    first, widths = layout.first_column(rank), layout.widths[rank]
    rows = [
        entry(
            width=width, column=first + column, own_column=column,
            first_key=sum(target.rows[:table]), target=place, target_stride=stride, state=state,
        )
        for table, (width, column, place, stride, state) in enumerate(
            zip(widths, layout.table_columns(rank), target.places, target.strides, target.states, strict=True)
        )
    ]  # fmt: skip
    starts = [
        (target.address + place) // target.dtype.itemsize for place in target.places if place >= 0
    ]
    every = [width for widths in layout.widths for width in widths]
    numbers = [*every, *target.strides, *starts, grad.data_ptr() // grad.element_size()]
    return rows or [entry(width=1, column=0, own_column=0)], alignment(
        numbers, min(target.dtype.itemsize, call.dtype.itemsize)
    )


def _describe_landing(
    group: Group, layout: Layout, dtype: torch.dtype, landing: int, rows: int, align: int
) -> Any:
    """A tensor descriptor of every rank's landing, ``[rank, sample, column]``, in blocks of
    ``rows`` by a table's columns.

    None where it cannot describe the blocks: there, ordinary stores put the same bytes in the same
    places.
    """
    width = max(max(widths, default=1) for widths in layout.widths)
    alike = all(
        each == width == next_power_of_2(width) for widths in layout.widths for each in widths
    )
    if not alike or align * dtype.itemsize != 16 or rows * width * dtype.itemsize > MOST_TILE_BYTES:
        return None
    columns = max(layout.rank_columns)
    return describe_ranks(
        group, landing, dtype, [(layout.batch, columns), (columns, 1)], [rows, width]
    )
