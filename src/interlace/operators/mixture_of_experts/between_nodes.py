"""``impl="chunked"``: the layer between nodes, whose tokens and sums travel in slices.

As ``"nccl"``, every rank multiplies the tokens of all ranks by its own experts, so that all sizes
are known to the host. Tokens leave at once, in slices. This rank's own tokens are multiplied while
the first slice travels; then each slice that has arrived, and its sums leave for the tokens' ranks
while the next one is multiplied.

The backward pass works alike on tokens and gradients. It computes the forward pass anew up to the
activation, and the gradients of the weights while the last slices travel.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from interlace.comm import Group
from interlace.comm.carrier import CHANNELS
from interlace.comm.leaving_sms import grouped_leaving_sms
from interlace.comm.replays import places
from interlace.comm.slices import Step, run_in_slices
from interlace.gemm.implementations.network import (
    Slices,
    counters_of,
    cut,
    exchanging,
    peers_in_turn,
    run_products,
    slices_by_size,
    steps_of,
)
from interlace.mapped.stamped import Landing, StampedQueue, reserve_stamps
from interlace.operators.mixture_of_experts import grouped, stock
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.operators.mixture_of_experts.network_choice import slices_of
from interlace.registry import Operator, operator_named

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.call import Call
    from interlace.operators.mixture_of_experts.choice import Terms

_MOST_UNMEASURED = 2
"""Slices, at most, where no network was measured: the experts' weights are read again for each."""


def refusal(terms: Terms) -> str | None:
    """Return what a call must have for ``impl="chunked"`` and has not, or None."""
    if terms.nodes == 1:
        return "ranks of several nodes"
    return stock.unmet((*stock.grouped_rules(terms), terms.capacity_rule))


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """A layer's call, as calls around a product are exchanged."""

    call: Call
    mark: int

    @property
    def operator(self) -> Operator:
        return operator_named(OPERATOR)

    @property
    def group(self) -> Group:
        return self.call.group

    @contextlib.contextmanager
    def opened(
        self, steps: Sequence[Step], counters: torch.Tensor, result: torch.Tensor
    ) -> Iterator[StampedQueue]:
        """Surround the products of the call whose slices are exchanged; see :func:`exchanging`."""
        # Nothing: slices are voided one by one, as they are waited for.
        landings = [Landing(peer, 0, 0) for peer in peers_in_turn(self.group)]
        with (
            exchanging(self, steps, counters, landings, result) as queue,
            grouped_leaving_sms(CHANNELS, self.group.device),
        ):
            yield queue

    def memory(self) -> tuple[Hashable, ...]:
        call = self.call
        return (
            call.activation,
            *places(call.x, call.experts, call.weights),
            *places(call.w_in, call.w_out, call.b_in, call.b_out),
        )


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How the tokens of a call are cut into slices.

    Attributes:
        peers: The other ranks, in the order in which their tokens arrive within a slice.
        lengths: Tokens of one rank in each slice.
    """

    peers: list[int]
    lengths: list[int]

    @staticmethod
    def of(call: Call) -> _Cut:
        """Return the cut of a call, the same on every rank."""
        tokens, nbytes = call.sizes.tokens, call.x.nbytes
        count = slices_of(call.terms, call.x.device)
        if count is None:
            count = min(slices_by_size(nbytes), _MOST_UNMEASURED, tokens)
        least, more = divmod(tokens, count)
        lengths = [least + 1] * more + [least] * (count - more)
        return _Cut(peers_in_turn(call.group), lengths)

    @property
    def count(self) -> int:
        return len(self.lengths)

    def slices(self, rows: torch.Tensor, sources: int) -> list[torch.Tensor]:
        """Return the slices of rows of several ranks, which lie slice by slice, ``[sources, rows,
        columns]`` each.
        """
        parts = rows.split([sources * length for length in self.lengths])
        return [part.view(sources, -1, rows.shape[1]) for part in parts]

    def gathers(self, rows: torch.Tensor, arriving: list[torch.Tensor]) -> list[Step]:
        """Return the steps that send this rank's rows to all peers at once."""
        leaving = dict.fromkeys(self.peers, cut(rows, self.count))
        return steps_of(leaving, self._by_peer(arriving), None)

    def returns(
        self, found: list[torch.Tensor], of_ranks: list[torch.Tensor], counters: torch.Tensor
    ) -> list[Step]:
        """Return the steps that send back what was found for the peers' rows.

        Args:
            of_ranks: What arrives, of all ranks in their order.
        """
        arriving = {peer: [each[peer] for each in of_ranks] for peer in self.peers}
        return steps_of(self._by_peer(found), arriving, counters)

    def _by_peer(self, slices: list[torch.Tensor]) -> Slices:
        return {peer: [each[at] for each in slices] for at, peer in enumerate(self.peers)}


def _together(*exchanges: list[Step]) -> list[Step]:
    """Return steps that make several exchanges at once, when the first one's triggers say so."""
    return [
        Step(
            steps[0].triggers,
            tuple(message for step in steps for message in step.departures),
            tuple(message for step in steps for message in step.arrivals),
        )
        for steps in zip(*exchanges, strict=True)
    ]


def run(call: Call, mark: int) -> torch.Tensor:
    """Return ``y [T, hidden]``. Collective in the group's first call.

    A token's sum over its experts on one rank is float32, and rounded to the dtype of x; the sum
    over ranks is float32, in their order, and rounded once.
    """
    exchange, x, sizes = _Exchange(call, mark), call.x.contiguous(), call.sizes
    group, rank, parted = call.group, call.group.rank, _Cut.of(call)
    count, peers = parted.count, len(parted.peers)
    y = torch.empty_like(x)
    # Tokens that arrive, with their routing, and the sums for them, of every peer in turn; and the
    # parts of the sums of this rank's tokens, of every rank in its order: all of it slice by slice.
    tokens, sums = x.new_empty(2, peers * sizes.tokens, sizes.hidden)
    routing = x.new_empty(peers * sizes.tokens, 2 * sizes.top_k, dtype=torch.float32)
    parts = x.new_empty(group.world_size * sizes.tokens, sizes.hidden)
    own = torch.empty_like(x)
    counters = counters_of(exchange, count)

    def enqueue() -> None:
        own_routing = stock.routing_of(call)
        arrived, arrived_routing, found = (
            parted.slices(rows, peers) for rows in (tokens, routing, sums)
        )
        of_ranks = parted.slices(parts, group.world_size)
        steps = [
            *_together(parted.gathers(x, arrived), parted.gathers(own_routing, arrived_routing)),
            *parted.returns(found, of_ranks, counters),
        ]
        with exchange.opened(steps, counters, y) as queue:
            queue.release(count)
            grouped.sum_experts(call, x, own_routing, own)
            for number in range(count):
                queue.wait(number)
                rows, chosen, sums_of_rows = (
                    each[number].flatten(0, 1) for each in (arrived, arrived_routing, found)
                )
                grouped.sum_experts(call, rows, chosen, sums_of_rows)
                counters[number : number + 1].add_(1)
                queue.release(count + number + 1)
            for number, rows in enumerate(cut(y, count)):
                queue.wait(count + number)
                of_ranks[number][rank].copy_(cut(own, count)[number])
                rows.copy_(of_ranks[number].sum(0, dtype=torch.float32))

    run_products(exchange, count, enqueue, x, y, tokens, sums, routing, parts, own)
    return y


def run_backward(
    call: Call, mark: int, grad: torch.Tensor, needed: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of x, weights, w_in, w_out, b_in and b_out. Collective in the group's
    first call.

    The last four are empty unless they are ``needed``. Gradients of x are rounded and summed as the
    results of :func:`run`.
    """
    exchange, sizes, group = _Exchange(call, mark), call.sizes, call.group
    parted, rank, ranks = _Cut.of(call), call.group.rank, call.group.world_size
    count, peers, tokens = parted.count, len(parted.peers), sizes.tokens
    x, grad, own_routing = call.x.contiguous(), grad.contiguous(), stock.routing_of(call)
    # Of all ranks, this one's own first, and then slice by slice.
    rows_of = x, grad, own_routing
    of_all = [rows.new_empty(ranks * tokens, rows.shape[1]) for rows in rows_of]
    for every, rows in zip(of_all, rows_of, strict=True):
        every[:tokens].copy_(rows)
    # What is found for the peers' tokens, and the parts of it for this rank's, of every rank: the
    # gradients of x and of weights.
    widths = (sizes.hidden, x.dtype), (sizes.top_k, torch.float32)
    found, parts, own = (
        [x.new_empty(count_of * tokens, width, dtype=dtype) for width, dtype in widths]
        for count_of in (peers, ranks, 1)
    )
    results = [torch.empty_like(each) for each in own]
    counters = counters_of(exchange, count)
    gradients: list[torch.Tensor] = []

    def enqueue() -> None:
        arrived = [parted.slices(every[tokens:], peers) for every in of_all]
        for_peers = [parted.slices(each, peers) for each in found]
        of_ranks = [parted.slices(each, ranks) for each in parts]
        steps = [
            *_together(*map(parted.gathers, rows_of, arrived)),
            *_together(
                *(parted.returns(*each, counters) for each in zip(for_peers, of_ranks, strict=True))
            ),
        ]
        with exchange.opened(steps, counters, results[0]) as queue:
            queue.release(count)
            passed = grouped.Passed.of(call)
            grouped.sum_gradients(call, passed, *rows_of, *own)
            for number in range(count):
                queue.wait(number)
                here = (each[number].flatten(0, 1) for each in (*arrived, *for_peers))
                grouped.sum_gradients(call, passed, *here)
                counters[number : number + 1].add_(1)
                queue.release(count + number + 1)
            gradients.extend(grouped.gradients_of_parameters(call, passed, needed, *of_all))
            for number in range(count):
                queue.wait(count + number)
                for every, mine, result in zip(of_ranks, own, results, strict=True):
                    every[number][rank].copy_(cut(mine, count)[number])
                    cut(result, count)[number].copy_(every[number].sum(0, dtype=torch.float32))

    reserve_stamps(group, OPERATOR)
    # Gradients of weights are new memory in each call, so no graph could hold it.
    run_in_slices(group, OPERATOR, None, enqueue, ())
    return results[0], results[1], *gradients
