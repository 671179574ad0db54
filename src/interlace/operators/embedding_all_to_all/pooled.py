"""The implementation ``pooled``: the kernels without peers, and an all-to-all of torch."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from interlace.operators.embedding_all_to_all import backward, pooling
from interlace.operators.embedding_all_to_all.call import EmbeddingCall, tuned_config
from interlace.operators.embedding_all_to_all.lookups import Sorted


def run(call: EmbeddingCall) -> torch.Tensor:
    """Pool by our kernel, then exchange; return ``[samples of this rank, columns]``."""
    alone = call.without_peers()
    if not call.is_config_given:
        # The sums do not depend on it, so it may be that of this rank's tables.
        config = tuned_config(alone.weights, alone.indices, alone.layout, alone.dtype)
        alone = dataclasses.replace(alone, config=config)
    return exchange(call, pooling.pool(alone))


def run_backward(call: EmbeddingCall, grad: torch.Tensor, target: backward.Target) -> Sorted | None:
    """Exchange the gradients of pooled vectors, then apply them by our kernel."""
    received = exchange_gradients(call, grad)
    return backward.run(call.without_peers(), received, target)


def exchange(call: EmbeddingCall, pooled: torch.Tensor) -> torch.Tensor:
    """Run an all-to-all and unpack.

    ``[batch, columns of this rank]`` -> ``[samples of this rank, columns of all ranks]``.
    """
    columns, to_each, from_each = _elements(call)
    received = _all_to_all(call, pooled.reshape(-1), from_each, to_each)
    # What comes from a rank is contiguous, with that rank's columns for this rank's samples.
    pieces = [
        part.view(call.layout.samples(call.rank), width)
        for part, width in zip(received.split(from_each), columns, strict=True)
    ]
    return torch.cat(pieces, 1)


def exchange_gradients(call: EmbeddingCall, grad: torch.Tensor) -> torch.Tensor:
    """Transpose :func:`exchange`.

    ``[samples of this rank, columns of all ranks]`` -> ``[batch, columns of this rank]``.
    """
    columns, from_each, to_each = _elements(call)
    packed = torch.cat([part.reshape(-1) for part in grad.split(columns, 1)])
    received = _all_to_all(call, packed, from_each, to_each)
    return received.view(call.layout.batch, columns[call.rank])


def _elements(call: EmbeddingCall) -> tuple[list[int], list[int], list[int]]:
    """Return every rank's columns, and the elements of pooled vectors that this rank sends to each
    rank and gets from it.
    """
    layout, columns = call.layout, list(call.layout.rank_columns)
    own_samples, own_columns = layout.samples(call.rank), columns[call.rank]
    to_each = [layout.samples(rank) * own_columns for rank in range(layout.world_size)]
    return columns, to_each, [own_samples * width for width in columns]


def _all_to_all(
    call: EmbeddingCall, packed: torch.Tensor, from_each: list[int], to_each: list[int]
) -> torch.Tensor:
    layout = call.layout
    if layout.world_size == 1:
        return packed
    received = packed.new_empty(sum(from_each))
    # Libraries have a collective for pieces that are alike on all ranks.
    if layout.batch % layout.world_size == 0 and len({*layout.rank_columns}) == 1:
        dist.all_to_all_single(received, packed, group=call.process_group)
    else:
        dist.all_to_all_single(received, packed, from_each, to_each, group=call.process_group)
    return received
