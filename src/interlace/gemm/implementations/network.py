"""``impl="chunked"`` in groups that span nodes: each piece of a product leaves over the network.

What all of these implementations share is here: how rows are cut into slices, and the exchanges of
the slices. :mod:`interlace.gemm.implementations.two_levels` has those that sum or gather within the
node as well.

Products beside an exchange, of rows that stay in the node, are cut into as many pieces as there are
slices: a product fills all SMs until its end, and the network's kernel for the next slice waits for
it. All products leave that kernel its SMs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from interlace.comm import Group
from interlace.comm.groups.carrier import CHANNELS
from interlace.comm.groups.slices import Message, Step, Trigger, run_in_slices
from interlace.comm.launching.leaving_sms import leaving_sms
from interlace.comm.replay.replays import places
from interlace.gemm.between_nodes import times_between_nodes
from interlace.gemm.call import GemmCall
from interlace.gemm.operands import RowPart
from interlace.gemm.products import multiply_into
from interlace.gemm.terms import Terms
from interlace.mapped.stamped import Landing, StampedQueue, reserve_stamps
from interlace.registry import Implementation, Operator

SLICE_BYTES = 4 << 20
"""Bytes of a slice at which networks carry nearly as much as by larger messages."""

_MOST_SLICES = 8

Rows = Mapping[int, torch.Tensor]
"""Rows for each peer, or from it, as many for every one."""

Slices = Mapping[int, Sequence[torch.Tensor]]
"""The slices for each peer, or from it, as many for every one; small ones have no rows."""


def across_nodes(
    within: Implementation,
    run: Callable[[GemmCall], Any],
    refusal: Callable[[Terms], str | None],
) -> Implementation:
    """Return an implementation that runs another way on groups of several nodes.

    Args:
        within: The implementation on one node.
        run: Runs a call between nodes that is not refused.
        refusal: Returns what a call between nodes must have and has not, or None.
    """
    return dataclasses.replace(
        within,
        run=lambda call: run(call) if call.group.spans_nodes else within.run(call),
        refusal=lambda terms: refusal(terms) if terms.node_of_rank else within.refusal(terms),
        spans_nodes=True,
    )


class SlicedCall(Protocol):
    """A call whose rows may be exchanged in slices: of one product, or of a layer of experts.

    Attributes:
        operator: The operator's declaration.
        group: The ranks, and what they share.
        mark: The number that this call's signals carry.
    """

    @property
    def operator(self) -> Operator: ...
    @property
    def group(self) -> Group: ...
    @property
    def mark(self) -> int: ...

    def memory(self) -> tuple[Hashable, ...]:
        """Return where the operands lie and what they are, for the key of a replay."""
        ...


def slice_count(call: GemmCall, rows: int, row_bytes: int) -> int:
    """Return the number of slices that ``impl="chunked"`` cuts of so many rows for one peer, alike
    on every rank.

    It is what a measured network asks for, and without one the number of slices of some MiB.
    """
    group = call.group
    times = times_between_nodes(
        call.operator.name, group.nodes, **call.sizes, world_size=group.world_size
    )
    predicted = None if times is None else times.slices_of("chunked")
    return slices_by_size(rows * row_bytes) if predicted is None else predicted


def slices_by_size(nbytes: int) -> int:
    """Return the number of slices of some MiB of what goes to one peer."""
    return max(1, min(_MOST_SLICES, nbytes // SLICE_BYTES))


def cut(rows: torch.Tensor, count: int, dim: int = 0) -> list[torch.Tensor]:
    """Cut rows into ``count`` slices of nearly equal size, in order; small ones have no rows."""
    return list(rows.tensor_split(count, dim))


def cut_all(rows: Rows, count: int) -> Slices:
    """Cut the rows for each peer, or from it, into slices."""
    return {peer: cut(of_peer, count) for peer, of_peer in rows.items()}


def steps_of(sent: Slices, arriving: Slices, counters: torch.Tensor | None) -> list[Step]:
    """Return the exchanges: slice k of all peers in step k.

    Args:
        sent: Contiguous slices for each peer.
        arriving: Contiguous memory for each peer's slices.
        counters: A slice leaves when its counter is 1; None: at once.
    """
    count = len(next(iter(arriving.values()), ()))
    steps = []
    for number in range(count):
        departures, arrivals = (
            tuple(
                Message(peer, _bytes(slices[number]))
                for peer, slices in of_peer.items()
                if slices[number].numel()
            )
            for of_peer in (sent, arriving)
        )
        triggers: tuple[Trigger, ...] = ()
        if counters is not None and departures:
            triggers = (Trigger(counters[number].data_ptr(), 1),)
        steps.append(Step(triggers, departures, arrivals))
    return steps


def run_products(
    call: SlicedCall, count: int, enqueue: Callable[[], None], *memory: torch.Tensor
) -> None:
    """Run a call's products and exchanges; see :func:`run_in_slices`.

    Args:
        count: The number of slices.
        enqueue: Enqueues them, within ``Group.running``.
        memory: The tensors that ``enqueue`` refers to beside the operands, the result included.
    """
    name = call.operator.name
    reserve_stamps(call.group, name)
    key = (count, call.mark, *call.memory(), places(*memory))
    run_in_slices(call.group, name, key, enqueue, memory)


@contextlib.contextmanager
def exchanging(
    call: SlicedCall,
    steps: Sequence[Step],
    counters: torch.Tensor,
    landings: Sequence[Landing],
    result: torch.Tensor,
    lanes: int | None = None,
) -> Iterator[StampedQueue]:
    """Surround the products of a call whose slices are exchanged, within ``Group.running``.

    Args:
        steps: The exchanges.
        counters: What they wait for; zero from here on.
        landings, lanes: See :class:`StampedQueue`.
        result: Memory of the dtype that slices have.
    """
    name = call.operator.name
    queue = StampedQueue(call.group, name, call.mark, steps, landings, result, lanes)
    counters.zero_()
    queue.open()
    try:
        with leaving_sms(CHANNELS, call.group.device):
            yield queue
    except BaseException:
        queue.abandon()
        raise
    queue.close()


def counters_of(call: SlicedCall, count: int) -> torch.Tensor:
    """Return counters for the slices of a call: int32 ``[count]``."""
    return call.group.network().counters(f"{call.operator.name}.network", count)[:count]


def peers_in_turn(group: Group) -> list[int]:
    """Return the peers in the order in which rows for them are multiplied.

    Ranks of other nodes come first, as the network takes longest; from the next rank on, so that no
    rank is sent to by all at once.
    """
    ranks, remote = group.world_size, set(group.members.remote_ranks)
    return sorted(
        ((group.rank + step) % ranks for step in range(1, ranks)),
        key=lambda peer: peer not in remote,
    )


def run_all_to_all(call: GemmCall) -> torch.Tensor:
    """Multiply the peers' rows slice by slice, this rank's own last, and send each slice.

    Rows arrive in the result itself. Collective in the group's first call.

    Returns:
        The rows that all ranks have computed for this one, ``[rows, N]``.
    """
    group, operands, sent = call.group, call.operands, call.rows.sent
    rank, peers, columns = group.rank, peers_in_turn(group), operands.columns
    x, weight, bias = operands.x.split(list(sent[rank])), operands.weight(), operands.bias
    y = operands.x.new_empty([call.rows.result, columns], dtype=operands.out_dtype)
    received = [counts[rank] for counts in sent]
    most_rows = max(
        (rows for s, counts in enumerate(sent) for d, rows in enumerate(counts) if s != d),
        default=0,
    )
    count = slice_count(call, most_rows, columns * y.element_size())
    counters, results = counters_of(call, count), y.split(received)
    staged = {peer: y.new_empty([sent[rank][peer], columns]) for peer in peers}
    landings = [
        Landing(peer, sum(received[:peer]) * columns, received[peer] * columns) for peer in peers
    ]

    def multiply_slice(to: int, slices: Sequence[torch.Tensor], number: int) -> None:
        out, first = slices[number], sum(map(len, slices[:number]))
        if len(out):
            multiply_into(out, RowPart(x[to][first : first + len(out)]), weight, bias)

    def enqueue() -> None:
        products = cut_all(staged, count)
        arriving = cut_all({peer: results[peer] for peer in peers}, count)
        steps = steps_of(products, arriving, counters)
        with exchanging(call, steps, counters, landings, y) as queue:
            for number in range(count):
                for peer in peers:
                    multiply_slice(peer, products[peer], number)
                counters[number : number + 1].add_(1)
                queue.release(number + 1)
            own_part = cut(results[rank], count)
            for number in range(count):
                multiply_slice(rank, own_part, number)

    run_products(call, count, enqueue, y, *staged.values())
    return y


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return contiguous rows as bytes, which every backend of torch sends."""
    return rows.view(-1).view(torch.uint8)
