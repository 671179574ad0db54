"""``impl="chunked"`` in groups that span nodes: each piece of a product leaves over the network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from interlace.comm.slices import Message, Step, Trigger
from interlace.gemm.between_nodes import slices_of
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations import chunked
from interlace.mapped.stamped import Landing, StampedQueue

SLICE_BYTES = 4 << 20
"""Bytes of a slice at which networks carry nearly as much as by larger messages."""

_MOST_SLICES = 8


@dataclasses.dataclass(frozen=True)
class Slices:
    """The division of the rows from every rank to every other one into slices.

    Attributes:
        sent: Rows that go from rank s to rank d, as ``sent[s][d]``.
        count: Number of slices of each pair of ranks; small ones have no rows.
    """

    sent: tuple[tuple[int, ...], ...]
    count: int

    @staticmethod
    def of(
        sent: tuple[tuple[int, ...], ...], row_bytes: int, predicted: int | None = None
    ) -> Slices:
        """Cut slices of some MiB, as many on every rank.

        Args:
            sent: Rows that go from rank s to rank d, as ``sent[s][d]``.
            row_bytes: Bytes of a row of the product.
            predicted: Number of slices that a measured network asks for; None without one.
        """
        if predicted is not None:
            return Slices(sent, predicted)
        most_rows = max(
            (rows for s, counts in enumerate(sent) for d, rows in enumerate(counts) if s != d),
            default=0,
        )
        return Slices(sent, max(1, min(_MOST_SLICES, most_rows * row_bytes // SLICE_BYTES)))

    def bounds(self, source: int, destination: int, number: int) -> tuple[int, int]:
        """Return the first row of a slice, and the row after its last one."""
        rows = self.sent[source][destination]
        return rows * number // self.count, rows * (number + 1) // self.count


def run_all_to_all(call: GemmCall) -> torch.Tensor:
    """Multiply the peers' rows slice by slice, this rank's own last, and send each slice.

    Rows arrive in the result itself. Collective in the group's first call.

    Returns:
        The rows that all ranks have computed for this one, ``[rows, N]``.
    """
    operands, group, sent = call.operands, call.group, call.rows.sent
    rank, ranks = group.rank, group.world_size
    columns = operands.columns
    y = operands.x.new_empty([call.rows.result, columns], dtype=operands.out_dtype)
    predicted = slices_of(
        call.operator.name,
        "chunked",
        group.nodes,
        **operands.sizes(call.rows.product),
        world_size=ranks,
    )
    slices = Slices.of(sent, columns * y.element_size(), predicted)
    remote = set(group.members.remote_ranks)
    # Ranks of other nodes first, as the network takes longest; from the next rank on, so that no
    # rank is sent to by all at once.
    peers = sorted(
        ((rank + step) % ranks for step in range(1, ranks)), key=lambda peer: peer not in remote
    )
    staging = y.new_empty([sum(sent[rank]) - sent[rank][rank], columns])
    name = f"{call.operator.name}.network"
    counters = group.network().counters(name, slices.count)[: slices.count]
    landings = _landings(slices, peers, rank, columns)
    steps = _steps(slices, peers, rank, counters, staging, y)
    queue = StampedQueue(group, call.operator.name, call.mark, steps, landings, y)
    with group.running():
        counters.zero_()
        queue.open()
        try:
            for number in range(slices.count):
                _multiply(call, slices, peers, number, staging)
                counters[number : number + 1].add_(1)
            queue.release()
            own, start = sum(sent[rank][:rank]), sum(counts[rank] for counts in sent[:rank])
            rows = sent[rank][rank]
            if rows:
                chunked.multiply_into(
                    y[start : start + rows],
                    operands.x[own : own + rows],
                    operands.w.T,
                    operands.bias,
                )
        except BaseException:
            queue.abandon()
            raise
        queue.close()
    return y


def _multiply(
    call: GemmCall, slices: Slices, peers: Sequence[int], number: int, staging: torch.Tensor
) -> None:
    """Multiply one slice of every peer's rows."""
    operands, rank = call.operands, call.group.rank
    place = 0
    for peer in peers:
        first, last = slices.bounds(rank, peer, number)
        start = sum(slices.sent[rank][:peer])
        if last > first:
            chunked.multiply_into(
                staging[place + first : place + last],
                operands.x[start + first : start + last],
                operands.w.T,
                operands.bias,
            )
        place += slices.sent[rank][peer]


def _landings(slices: Slices, peers: Sequence[int], rank: int, columns: int) -> list[Landing]:
    """Return the place of each peer's rows in the result."""
    return [
        Landing(
            peer,
            sum(counts[rank] for counts in slices.sent[:peer]) * columns,
            slices.sent[peer][rank] * columns,
        )
        for peer in peers
    ]


def _steps(
    slices: Slices,
    peers: Sequence[int],
    rank: int,
    counters: torch.Tensor,
    staging: torch.Tensor,
    y: torch.Tensor,
) -> list[Step]:
    """Return the exchanges: slice k of all peers in step k, once its products are complete."""
    steps = []
    for number in range(slices.count):
        departures, arrivals, place = [], [], 0
        for peer in peers:
            first, last = slices.bounds(rank, peer, number)
            if last > first:
                departures.append(Message(peer, _bytes(staging[place + first : place + last])))
            place += slices.sent[rank][peer]
            first, last = slices.bounds(peer, rank, number)
            start = sum(counts[rank] for counts in slices.sent[:peer])
            if last > first:
                arrivals.append(Message(peer, _bytes(y[start + first : start + last])))
        triggers = (Trigger(counters.data_ptr() + 4 * number, 1),) if departures else ()
        steps.append(Step(triggers, tuple(departures), tuple(arrivals)))
    return steps


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return contiguous rows as bytes, which every backend of torch sends."""
    return rows.view(-1).view(torch.uint8)
