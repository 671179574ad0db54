"""``impl="chunked"``: the layer between nodes, whose tokens and sums travel in slices.

As ``"nccl"``, every rank multiplies the tokens of all ranks by its own experts, so that all sizes
are known to the host. Tokens leave at once, in slices. This rank's own tokens are multiplied while
the first slice travels; then each slice that has arrived, and its sums leave for the tokens' ranks
while the next one is multiplied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import Group
from interlace.comm.replays import places
from interlace.comm.slices import Message, Step, Trigger
from interlace.gemm.implementations.network import (
    as_bytes,
    counters_of,
    cut,
    exchanging,
    peers_in_turn,
    run_products,
    slices_by_size,
)
from interlace.mapped.stamped import Landing
from interlace.operators.mixture_of_experts import stock
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.registry import Operator, operator_named

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.call import Call
    from interlace.operators.mixture_of_experts.choice import Terms


def refusal(terms: Terms) -> str | None:
    """Return what a call must have for ``impl="chunked"`` and has not, or None."""
    if terms.nodes == 1:
        return "ranks of several nodes"
    return stock.refusal(terms)


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

    @property
    def sizes(self) -> dict[str, Any]:
        """No times are predicted by sizes yet."""
        return {}

    def memory(self) -> tuple[Hashable, ...]:
        call = self.call
        return (
            call.activation,
            *places(call.x, call.experts, call.weights),
            *places(call.w_in, call.w_out, call.b_in, call.b_out),
        )


def run(call: Call, mark: int) -> torch.Tensor:
    """Return ``y [T, hidden]``. Collective in the group's first call.

    A token's sum over its experts on one rank is in the dtype of x; the sum over ranks is float32,
    in their order, and rounded once.
    """
    exchange, x, sizes = _Exchange(call, mark), call.x.contiguous(), call.sizes
    group, rank, peers = call.group, call.group.rank, peers_in_turn(call.group)
    count = slices_by_size(x.nbytes)
    y = torch.empty_like(x)
    # Slice by slice, of every peer in turn: tokens and routing that arrive, and the sums for them;
    # and of every rank in its order: the parts of the sums of this rank's tokens.
    slices = [len(rows) for rows in cut(x, count)]
    tokens = [x.new_empty(len(peers), rows, sizes.hidden) for rows in slices]
    routing = [
        x.new_empty(len(peers), rows, 2 * sizes.top_k, dtype=torch.float32) for rows in slices
    ]
    sums = [torch.empty_like(each) for each in tokens]
    parts = [x.new_empty(group.world_size, rows, sizes.hidden) for rows in slices]
    counters = counters_of(exchange, count)

    def steps_of(own_routing: torch.Tensor) -> list[Step]:
        """Return the exchanges of tokens, and then those of sums."""
        gathers, returns = [], []
        own = zip(cut(x, count), cut(own_routing, count), strict=True)
        for number, each in enumerate(own):
            if not slices[number]:  # fewer tokens than slices
                gathers.append(Step((), (), ()))
                returns.append(Step((), (), ()))
                continue
            departures = [Message(peer, as_bytes(rows)) for peer in peers for rows in each]
            arrivals = [
                Message(peer, as_bytes(rows[number][at]))
                for at, peer in enumerate(peers)
                for rows in (tokens, routing)
            ]
            gathers.append(Step((), tuple(departures), tuple(arrivals)))
            trigger = Trigger(counters[number].data_ptr(), 1)
            returns.append(
                Step(
                    (trigger,),
                    tuple(
                        Message(peer, as_bytes(sums[number][at])) for at, peer in enumerate(peers)
                    ),
                    tuple(Message(peer, as_bytes(parts[number][peer])) for peer in peers),
                )
            )
        return [*gathers, *returns]

    def enqueue() -> None:
        own_routing = stock.routing_of(call)
        # Slices are voided one by one, as they are waited for.
        landings = [Landing(peer, 0, 0) for peer in peers]
        with exchanging(exchange, steps_of(own_routing), counters, landings, y) as queue:
            queue.release(count)
            own = cut(stock.sums_of_experts(call, x, own_routing), count)
            for number in range(count):
                queue.wait(number)
                if slices[number]:
                    found = stock.sums_of_experts(
                        call, tokens[number].flatten(0, 1), routing[number].flatten(0, 1)
                    )
                    sums[number].copy_(found.view_as(sums[number]))
                counters[number : number + 1].add_(1)
                queue.release(count + number + 1)
            for number, rows in enumerate(cut(y, count)):
                queue.wait(count + number)
                parts[number][rank].copy_(own[number])
                rows.copy_(parts[number].sum(0, dtype=torch.float32))

    run_products(exchange, count, enqueue, x, y, *tokens, *routing, *sums, *parts)
    return y
