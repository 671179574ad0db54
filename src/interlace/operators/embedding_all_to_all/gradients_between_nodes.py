"""The backward pass in groups that span nodes: gradients travel while lookups are sorted, and those
of the last tables while the first ones are updated.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from interlace.comm.groups.slices import Message, Step
from interlace.costs.embedding_all_to_all import cut_tables
from interlace.mapped.stamped import Landing, StampedQueue
from interlace.operators.embedding_all_to_all.backward import BACKWARD, Part, Target, launch
from interlace.operators.embedding_all_to_all.call import EmbeddingCall
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.operators.embedding_all_to_all.lookups import Sorted, first_keys_of, sort_lookups


class _TableCut(NamedTuple):
    """The division of every rank's tables into slices.

    Attributes:
        layout: The columns of all tables and the samples of all ranks.
        tables: Of each rank the first table of each slice, and the number of tables.
        columns: Of each rank the first of its columns in each slice, and the number of columns.
    """

    layout: Layout
    tables: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]

    def of(self, grad: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        """Return a slice's columns of the gradients of all columns."""
        start, columns = self.layout.first_column(rank), self.columns[rank]
        return grad[:, start + columns[number] : start + columns[number + 1]]


@functools.lru_cache(maxsize=256)
def _cut(layout: Layout, count: int) -> _TableCut:
    tables = tuple(tuple(cut_tables(widths, count)) for widths in layout.widths)
    columns = tuple(
        tuple(sum(widths[:first]) for first in firsts)
        for widths, firsts in zip(layout.widths, tables, strict=True)
    )
    return _TableCut(layout, tables, columns)


def run(call: EmbeddingCall, grad: torch.Tensor, target: Target) -> Sorted:
    """Exchange gradients while this rank's lookups are sorted, and launch the kernel without peers
    for each part of them that has arrived; return this rank's lookups by row. Collective.

    Each rank sends every peer, ranks of its own node included, the gradients of some of the peer's
    tables in one message, and then those of others, if the call's plan has several slices; and the
    stamp of its call with the first. The sort depends on indices alone. Where a peer is late or
    makes another call, tables that are updated stay as they are, and gradients are NaN.

    Args:
        call: The call.
        grad: Contiguous gradients of this rank's samples, ``[samples, columns]``.
        target: The memory that the kernel writes.
    """
    layout, rank, group = call.layout, call.rank, call.group
    received = grad.new_empty(layout.batch * layout.rank_columns[rank])
    cut = _cut(layout, call.plan.gradient_slices)
    peers = [(rank + step) % layout.world_size for step in range(1, layout.world_size)]
    blocks = [
        received[layout.batch * first : layout.batch * end].view(layout.batch, end - first)
        for first, end in itertools.pairwise(cut.columns[rank])
    ]
    own_samples = slice(rank * layout.chunk, rank * layout.chunk + layout.samples(rank))
    steps = [
        Step((), _departures(cut, grad, peers, number), _arrivals(layout, block, peers))
        for number, block in enumerate(blocks)
    ]
    # Slices are voided one by one, as they are waited for.
    landings = [Landing(peer, 0, 0) for peer in peers]
    queue = StampedQueue(group, BACKWARD, call.mark, steps, landings, received)
    try:
        with group.running():
            for number, block in enumerate(blocks):
                block[own_samples].copy_(cut.of(grad, rank, number))
            queue.open()
            queue.release()
            lookups = sort_lookups(call, target.rows)
        ends = _ends_of_runs(call, cut, lookups, target.rows)
        for number, block in enumerate(blocks):
            with group.running():
                is_valid = queue.wait(number)
                # A part of an update that must not take place has no runs.
                end_run = ends[number] * is_valid if target.values is None else ends[number]
            if block.shape[1]:
                first_run = ends[number - 1] if number else None
                part = Part(cut.columns[rank][number], first_run, end_run)
                launch(call.without_peers(), block, target, lookups, part)
    except BaseException:
        queue.abandon()
        raise
    with group.running():
        queue.close()
    return lookups


def _ends_of_runs(
    call: EmbeddingCall, cut: _TableCut, lookups: Sorted, rows: Sequence[int]
) -> Sequence[torch.Tensor]:
    """Return, for each slice, the run behind the last one of its tables, int32 ``[1]``."""
    # Keys of rows count through all tables, so a table's first key finds its first run.
    before = first_keys_of(rows)
    first_keys = [before[table] for table in cut.tables[call.rank][1:-1]]
    if not first_keys:
        return [lookups.run_count]
    limits = call.group.cache.tables.on_device([first_keys])[0].to(lookups.run_keys.dtype)
    ends = torch.searchsorted(lookups.run_keys, limits, out_int32=True)
    return [*torch.minimum(ends, lookups.run_count).split(1), lookups.run_count]


def _departures(
    cut: _TableCut, grad: torch.Tensor, peers: Sequence[int], number: int
) -> tuple[Message, ...]:
    """Return one slice's message for each peer, packed."""
    parts = {peer: cut.of(grad, peer, number) for peer in peers}
    return tuple(
        Message(peer, part.contiguous().view(-1).view(torch.uint8))
        for peer, part in parts.items()
        if part.numel()
    )


def _arrivals(layout: Layout, block: torch.Tensor, peers: Sequence[int]) -> tuple[Message, ...]:
    """Return the landing of one slice from each peer: the rows of the peer's samples."""
    arrivals = []
    for peer in peers:
        first = peer * layout.chunk
        part = block[first : first + layout.samples(peer)]
        if part.numel():
            arrivals.append(Message(peer, part.reshape(-1).view(torch.uint8)))
    return tuple(arrivals)
