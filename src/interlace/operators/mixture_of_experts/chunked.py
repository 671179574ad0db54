"""``impl="chunked"``: the layer between nodes, whose tokens and sums travel in slices.

As in ``"unfused"`` by grouped products, every rank multiplies the tokens of all ranks by its own
experts, so that all sizes are known to the host. Tokens leave at once, in slices. This rank's own
tokens are multiplied while the first slice travels; then each slice that has arrived, and its sums
leave for the tokens' ranks while the next one is multiplied.

The backward pass works alike on tokens and gradients. It computes the forward pass anew up to the
activation, and the gradients of the weights while the last slices travel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from interlace.comm.groups.carrier import CHANNELS
from interlace.comm.groups.slices import Step, run_in_slices
from interlace.comm.launching.leaving_sms import grouped_leaving_sms
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
from interlace.mapped.stamped import Landing, reserve_stamps
from interlace.operators.mixture_of_experts import grouped
from interlace.operators.mixture_of_experts.call import LayerCall
from interlace.operators.mixture_of_experts.choice import ExpertTerms, times_between_nodes, unmet
from interlace.operators.mixture_of_experts.config import OPERATOR
from interlace.operators.mixture_of_experts.layout import Saved

_MOST_UNMEASURED = 2
"""Slices, at most, where no network was measured: the experts' weights are read again for each."""


def refusal(terms: ExpertTerms) -> str | None:
    """Return what a call must have for ``impl="chunked"`` and has not, or None."""
    if terms.nodes == 1:
        return "ranks of several nodes"
    return unmet((*grouped.rules(terms), terms.capacity_rule))


def _slice_lengths(call: LayerCall) -> list[int]:
    """Return the number of tokens of one rank in each slice, the same on every rank."""
    tokens, times = call.sizes.tokens, times_between_nodes(call.terms, call.x.device)
    count = None if times is None else times.slices_of("chunked")
    if count is None:
        count = min(slices_by_size(call.x.nbytes), _MOST_UNMEASURED, tokens)
    least, more = divmod(tokens, count)
    return [least + 1] * more + [least] * (count - more)


def _together(exchanges: Sequence[list[Step]]) -> list[Step]:
    """Return steps that make several exchanges at once, when the first one's triggers say so."""
    return [
        Step(
            steps[0].triggers,
            tuple(message for step in steps for message in step.departures),
            tuple(message for step in steps for message in step.arrivals),
        )
        for steps in zip(*exchanges, strict=True)
    ]


class _Memory(NamedTuple):
    """The memory of a call's exchanges; each attribute has a tensor for each kind of rows.

    Attributes:
        rows: What this rank sends to all.
        arriving: The same of every peer in turn, slice by slice.
        found: What is computed for that.
        parts: What is computed for this rank's rows, by every rank in its order, slice by slice.
        own: This rank's part of it.
        results: The sums of the parts.
    """

    rows: Sequence[torch.Tensor]
    arriving: Sequence[torch.Tensor]
    found: Sequence[torch.Tensor]
    parts: Sequence[torch.Tensor]
    own: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]


def _enqueue(
    call: LayerCall,
    lengths: Sequence[int],
    memory: _Memory,
    counters: torch.Tensor,
    compute: Callable[..., None],
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Enqueue the exchanges of a call, and what it computes; within ``Group.running``.

    Args:
        lengths: See :func:`_slice_lengths`.
        compute: Computes what is found for rows: takes rows of each kind, and memory for each kind
            of results.
        meanwhile: Enqueues what runs while the last slices travel.
    """
    group, count, peers = call.group, len(lengths), peers_in_turn(call.group)

    def sliced(rows: torch.Tensor, sources: int) -> list[torch.Tensor]:
        """Return the slices of rows of several ranks, ``[sources, rows, columns]`` each."""
        parts = rows.split([sources * length for length in lengths])
        return [part.view(sources, -1, rows.shape[1]) for part in parts]

    def by_peer(slices: list[torch.Tensor]) -> Slices:
        return {peer: [tensor[at] for tensor in slices] for at, peer in enumerate(peers)}

    arrived, found = (
        [sliced(each, len(peers)) for each in kinds] for kinds in (memory.arriving, memory.found)
    )
    of_ranks = [sliced(each, group.world_size) for each in memory.parts]
    # This rank's rows leave for all peers at once; what was found for the peers' rows, slice by
    # slice.
    gathers = [
        steps_of(dict.fromkeys(peers, cut(rows, count)), by_peer(arriving), None)
        for rows, arriving in zip(memory.rows, arrived, strict=True)
    ]
    returns = [
        steps_of(by_peer(sums), {peer: [each[peer] for each in parts] for peer in peers}, counters)
        for sums, parts in zip(found, of_ranks, strict=True)
    ]
    steps = [*_together(gathers), *_together(returns)]
    # Nothing lands: slices are voided one by one, as they are waited for.
    landings = [Landing(peer, 0, 0) for peer in peers]
    # One exchange at a time: a slice that shares the network with the next one arrives later, and
    # its products begin later (decision 0023).
    with (
        exchanging(call, steps, counters, landings, memory.results[0], lanes=1) as queue,
        grouped_leaving_sms(CHANNELS, group.device),
    ):
        queue.release(count)
        compute(*memory.rows, *memory.own)
        for number in range(count):
            queue.wait(number)
            compute(*(each[number].flatten(0, 1) for each in (*arrived, *found)))
            counters[number : number + 1].add_(1)
            queue.release(count + number + 1)
        meanwhile()
        own, results = (
            [cut(each, count) for each in kinds] for kinds in (memory.own, memory.results)
        )
        for number in range(count):
            queue.wait(count + number)
            for parts, mine, result in zip(of_ranks, own, results, strict=True):
                parts[number][group.rank].copy_(mine[number])
                result[number].copy_(parts[number].sum(0, dtype=torch.float32))


def run(call: LayerCall) -> tuple[torch.Tensor, Saved]:
    """Return ``y [T, hidden]``; tensors for the backward pass are not filled. Collective in the
    group's first call.

    A token's sum over its experts on one rank is float32, and rounded to the dtype of x; the sum
    over ranks is float32, in their order, and rounded once.
    """
    lengths, sizes = _slice_lengths(call), call.sizes
    x, peers = call.x.contiguous(), sizes.world_size - 1
    tokens, sums = x.new_empty(2, peers * sizes.tokens, sizes.hidden)
    routing = x.new_empty(peers * sizes.tokens, 2 * sizes.top_k, dtype=torch.float32)
    parts = x.new_empty(sizes.world_size * sizes.tokens, sizes.hidden)
    own, y = torch.empty_like(x), torch.empty_like(x)
    counters = counters_of(call, len(lengths))

    def enqueue() -> None:
        rows = x, grouped.routing_of(call)
        memory = _Memory(rows, (tokens, routing), (sums,), (parts,), (own,), (y,))
        compute = functools.partial(grouped.sum_experts, call)
        _enqueue(call, lengths, memory, counters, compute)

    run_products(call, len(lengths), enqueue, x, y, tokens, sums, routing, parts, own)
    return y, call.unused()


def backward(
    call: LayerCall, grad: torch.Tensor, saved: Saved, needed: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of x, weights, w_in, w_out, b_in and b_out. Collective in the group's
    first call.

    The last four are empty unless they are ``needed``. Gradients of x are rounded and summed as the
    results of :func:`run`.
    """
    lengths, sizes = _slice_lengths(call), call.sizes
    ranks, tokens = sizes.world_size, sizes.tokens
    x = call.x.contiguous()
    rows = x, grad.contiguous(), grouped.routing_of(call)
    # Of all ranks, this one's own first, and then slice by slice.
    of_all = [each.new_empty(ranks * tokens, each.shape[1]) for each in rows]
    for every, each in zip(of_all, rows, strict=True):
        every[:tokens].copy_(each)
    # The gradients of x and of weights.
    widths = (sizes.hidden, x.dtype), (sizes.top_k, torch.float32)
    found, parts, own, results = (
        [x.new_empty(count * tokens, width, dtype=dtype) for width, dtype in widths]
        for count in (ranks - 1, ranks, 1, 1)
    )
    memory = _Memory(rows, [every[tokens:] for every in of_all], found, parts, own, results)
    counters = counters_of(call, len(lengths))
    gradients: list[torch.Tensor] = []

    def enqueue() -> None:
        passed = grouped.Passed.of(call)
        _enqueue(
            call,
            lengths,
            memory,
            counters,
            functools.partial(grouped.sum_gradients, call, passed),
            lambda: gradients.extend(
                grouped.gradients_of_parameters(call, passed, needed, *of_all)
            ),
        )

    reserve_stamps(call.group, OPERATOR)
    # Gradients of weights are new memory in each call, so no graph could hold it.
    run_in_slices(call.group, OPERATOR, None, enqueue, ())
    return results[0], results[1], *gradients
