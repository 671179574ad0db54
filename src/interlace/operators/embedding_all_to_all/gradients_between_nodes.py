"""The backward pass in groups that span nodes: gradients travel while lookups are sorted, and those
of the last tables while the first ones are updated.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from interlace.comm.constants import on_device
from interlace.comm.slices import Message, Step
from interlace.costs.embedding_all_to_all import cut_tables
from interlace.mapped.stamped import Landing, StampedQueue
from interlace.operators.embedding_all_to_all.config import OPERATOR
from interlace.operators.embedding_all_to_all.launch import Call
from interlace.operators.embedding_all_to_all.lookups import Sorted, sort_lookups


@dataclasses.dataclass(frozen=True)
class Part:
    """The gradients of some of this rank's tables, for the entire batch.

    Attributes:
        gradients: ``[batch, columns of these tables]``, contiguous.
        first_column: The first of these columns among those of this rank's tables.
        first_run: The first run of lookups of these tables, int32 ``[1]`` on the device; None for
            the first run of all.
        end_run: The run behind their last one, int32 ``[1]`` on the device.
    """

    gradients: torch.Tensor
    first_column: int
    first_run: torch.Tensor | None
    end_run: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients that arrive from all ranks.

    Attributes:
        lookups: This rank's lookups in the order of their rows.
        parts: The parts, each when it is complete: the iterator makes the current stream wait.
    """

    lookups: Sorted
    parts: Iterator[Part]


class _Columns:
    """The columns of every rank's slices: some of its tables each.

    Args:
        call: The call.
        count: Number of slices.
    """

    def __init__(self, call: Call, count: int) -> None:
        self.call, self.count = call, count
        self._tables = [cut_tables(widths, count) for widths in call.layout.widths]

    def tables(self, rank: int, number: int) -> tuple[int, int]:
        """Return the first table of a slice, and the one behind its last."""
        first, end = self._tables[rank][number : number + 2]
        return first, end

    def columns(self, rank: int, number: int) -> tuple[int, int]:
        """Return the first column of a slice among those of the rank, and the one behind its
        last.
        """
        widths, (first, end) = self.call.layout.widths[rank], self.tables(rank, number)
        return sum(widths[:first]), sum(widths[:end])

    def of(self, grad: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        """Return a slice's columns of the gradients of all columns."""
        start, (first, end) = self.call.layout.first_column(rank), self.columns(rank, number)
        return grad[:, start + first : start + end]


@contextlib.contextmanager
def exchange(
    call: Call, grad: torch.Tensor, rows: Sequence[int], run_lookups: int, mark: int, applies: bool
) -> Iterator[Gradients]:
    """Send every owner its columns of ``grad`` while this rank's lookups are sorted. Collective.

    Each rank sends every peer, ranks of its own node included, the gradients of some of the peer's
    tables in one message, and then those of others, if the call's plan has several slices; and the
    stamp of its call with the first. The sort depends on indices alone.

    Args:
        call: The call.
        grad: Contiguous gradients of this rank's samples, ``[samples, columns]``.
        rows: Rows of each of this rank's tables.
        run_lookups: Largest number of lookups in a run.
        mark: The number that the ranks' agreement returned for the backward pass.
        applies: Whether tables are updated. Where a peer is late or makes another call, a part has
            no runs then; otherwise its gradients are NaN.
    """
    layout, rank = call.layout, call.rank
    width = layout.rank_columns[rank]
    received = grad.new_empty(layout.batch * width)
    if not layout.batch or not layout.columns:
        lookups = sort_lookups(call, rows, run_lookups)
        whole = Part(received.view(layout.batch, width), 0, None, lookups.run_count)
        yield Gradients(lookups, iter([whole]))
        return
    slices = _Columns(call, call.plan.gradient_slices)
    peers = [(rank + step) % layout.world_size for step in range(1, layout.world_size)]
    blocks = [_block(slices, received, number) for number in range(slices.count)]
    own_samples = slice(rank * layout.chunk, rank * layout.chunk + layout.samples(rank))
    steps = [
        Step((), _departures(slices, grad, peers, number), _arrivals(call, block, peers))
        for number, block in enumerate(blocks)
    ]
    # Slices are voided one by one, as they are waited for.
    landings = [Landing(peer, 0, 0) for peer in peers]
    queue = StampedQueue(call.group, f"{OPERATOR}.backward", mark, steps, landings, received)
    with call.group.running():
        for number, block in enumerate(blocks):
            block[own_samples].copy_(slices.of(grad, rank, number))
        queue.open()
        queue.release()
        try:
            lookups = sort_lookups(call, rows, run_lookups)
        except BaseException:
            queue.abandon()
            raise
    try:
        yield Gradients(lookups, _parts(slices, queue, blocks, lookups, rows, applies))
    except BaseException:
        queue.abandon()
        raise
    with call.group.running():
        queue.close()


def _parts(
    slices: _Columns,
    queue: StampedQueue,
    blocks: Sequence[torch.Tensor],
    lookups: Sorted,
    rows: Sequence[int],
    applies: bool,
) -> Iterator[Part]:
    """Yield each slice's part once the current stream waits for it."""
    call = slices.call
    # Keys of rows count through all tables, so a table's first key finds its first run.
    first_keys = [
        sum(rows[: slices.tables(call.rank, number)[0]]) for number in range(1, slices.count)
    ]
    runs = [lookups.run_count]
    if first_keys:
        limits = on_device(call.group, [first_keys])[0].to(lookups.run_keys.dtype)
        found = torch.searchsorted(lookups.run_keys, limits, out_int32=True)
        runs = [*torch.minimum(found, lookups.run_count).split(1), *runs]
    for number, block in enumerate(blocks):
        with call.group.running():
            is_valid = queue.wait(number)
            end_run = runs[number] * is_valid if applies else runs[number]
        first_column, _ = slices.columns(call.rank, number)
        yield Part(block, first_column, runs[number - 1] if number else None, end_run)


def _block(slices: _Columns, received: torch.Tensor, number: int) -> torch.Tensor:
    """Return the memory of one slice of this rank's gradients, ``[batch, its columns]``."""
    batch, (first, end) = slices.call.layout.batch, slices.columns(slices.call.rank, number)
    return received[batch * first : batch * end].view(batch, end - first)


def _departures(
    slices: _Columns, grad: torch.Tensor, peers: Sequence[int], number: int
) -> tuple[Message, ...]:
    """Return one slice's message for each peer, packed."""
    parts = {peer: slices.of(grad, peer, number) for peer in peers}
    return tuple(
        Message(peer, part.contiguous().view(-1).view(torch.uint8))
        for peer, part in parts.items()
        if part.numel()
    )


def _arrivals(call: Call, block: torch.Tensor, peers: Sequence[int]) -> tuple[Message, ...]:
    """Return the landing of one slice from each peer: the rows of the peer's samples."""
    arrivals = []
    for peer in peers:
        first = peer * call.layout.chunk
        part = block[first : first + call.layout.samples(peer)]
        if part.numel():
            arrivals.append(Message(peer, part.reshape(-1).view(torch.uint8)))
    return tuple(arrivals)
