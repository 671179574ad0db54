"""``impl="chunked"``: the layer between nodes, whose tokens and sums travel in slices.

As ``"nccl"``, every rank multiplies the tokens of all ranks by its own experts, so that all sizes
are known to the host. Tokens leave at once, in slices. This rank's own tokens are multiplied while
the first slice travels; then each slice that has arrived, and its sums leave for the tokens' ranks
while the next one is multiplied. The backward pass is that of ``"unfused"``, which computes the
forward pass anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from interlace.comm import Group
from interlace.comm.replays import places
from interlace.comm.slices import Step
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
from interlace.mapped.stamped import Landing
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

    def memory(self) -> tuple[Hashable, ...]:
        call = self.call
        return (
            call.activation,
            *places(call.x, call.experts, call.weights),
            *places(call.w_in, call.w_out, call.b_in, call.b_out),
        )


def run(call: Call, mark: int) -> torch.Tensor:
    """Return ``y [T, hidden]``. Collective in the group's first call.

    A token's sum over its experts on one rank is float32, and rounded to the dtype of x; the sum
    over ranks is float32, in their order, and rounded once.
    """
    exchange, x, sizes = _Exchange(call, mark), call.x.contiguous(), call.sizes
    group, rank, peers = call.group, call.group.rank, peers_in_turn(call.group)
    count = slices_of(call.terms, x.device) or min(
        slices_by_size(x.nbytes), _MOST_UNMEASURED, sizes.tokens
    )
    from_peers, of_all = len(peers) * sizes.tokens, group.world_size * sizes.tokens
    y = torch.empty_like(x)
    # Tokens that arrive, with their routing, and the sums for them, of every peer in turn; and the
    # parts of the sums of this rank's tokens, of every rank in its order: all of it slice by slice.
    tokens, sums = x.new_empty(2, from_peers, sizes.hidden)
    routing = x.new_empty(from_peers, 2 * sizes.top_k, dtype=torch.float32)
    parts, own = x.new_empty(of_all, sizes.hidden), torch.empty_like(x)
    counters = counters_of(exchange, count)

    def in_slices(rows: torch.Tensor, sources: int) -> list[torch.Tensor]:
        """Return the slices of rows of several ranks, ``[sources, rows, columns]``."""
        lengths = [sources * len(each) for each in cut(x, count)]
        return [part.view(sources, -1, rows.shape[1]) for part in rows.split(lengths)]

    def by_peer(slices: list[torch.Tensor]) -> Slices:
        """Return each peer's part of slices that have the peers in turn."""
        return {peer: [each[at] for each in slices] for at, peer in enumerate(peers)}

    def enqueue() -> None:
        own_routing = stock.routing_of(call)
        arrived, arrived_routing, found = (
            in_slices(rows, len(peers)) for rows in (tokens, routing, sums)
        )
        of_ranks = in_slices(parts, group.world_size)
        leaving, leaving_routing = (
            dict.fromkeys(peers, cut(rows, count)) for rows in (x, own_routing)
        )
        gathers = [
            Step((), rows.departures + more.departures, rows.arrivals + more.arrivals)
            for rows, more in zip(
                steps_of(leaving, by_peer(arrived), None),
                steps_of(leaving_routing, by_peer(arrived_routing), None),
                strict=True,
            )
        ]
        returning = {peer: [each[peer] for each in of_ranks] for peer in peers}
        steps = [*gathers, *steps_of(by_peer(found), returning, counters)]
        # Slices are voided one by one, as they are waited for.
        landings = [Landing(peer, 0, 0) for peer in peers]
        with exchanging(exchange, steps, counters, landings, y) as queue:
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
            for number, (rows, of_own) in enumerate(
                zip(cut(y, count), cut(own, count), strict=True)
            ):
                queue.wait(count + number)
                of_ranks[number][rank].copy_(of_own)
                rows.copy_(of_ranks[number].sum(0, dtype=torch.float32))

    run_products(exchange, count, enqueue, x, y, tokens, sums, routing, parts, own)
    return y
