"""The implementations that exchange by an all-to-all of torch: ``pooled``, by the kernels without
peers, and ``unfused``, by PyTorch's operators.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.operators.embedding_all_to_all import backward, pooling
from interlace.operators.embedding_all_to_all.call import EmbeddingCall, tuned_config
from interlace.operators.embedding_all_to_all.lookups import Sorted


def run_pooled(call: EmbeddingCall) -> torch.Tensor:
    """Pool by our kernel, then exchange; return ``[samples of this rank, columns]``."""
    alone = call.without_peers()
    if not call.is_config_given:
        # The sums do not depend on it, so it may be that of this rank's tables.
        config = tuned_config(alone.weights, alone.indices, alone.layout, alone.dtype)
        alone = dataclasses.replace(alone, config=config)
    return _exchange(call, pooling.pool(alone))


def run_pooled_backward(
    call: EmbeddingCall, grad: torch.Tensor, target: backward.Target
) -> Sorted | None:
    """Exchange the gradients of pooled vectors, then apply them by our kernel."""
    received = _exchange_gradients(call, grad)
    return backward.run(call.without_peers(), received, target)


def run_unfused(call: EmbeddingCall) -> torch.Tensor:
    """Pool by ``F.embedding_bag``, then exchange; return ``[samples of this rank, columns]``."""
    # A rank without tables has no columns, and takes part in the exchange all the same.
    pooled = [call.indices.new_empty(call.layout.batch, 0, dtype=call.dtype)]
    for table, weight in enumerate(call.weights):
        bounds, indices, scale = _lookups_of(call, table)
        # Offsets of a table go on where those of the table before it end; torch counts from 0.
        bags = (bounds - bounds[0]).to(indices.dtype)
        factors = None if scale is None else scale.to(weight.dtype)
        pooled.append(
            F.embedding_bag(
                indices, weight, bags, None, 2.0, False, call.mode, False, factors, True
            ).to(call.dtype)
        )
    return _exchange(call, torch.cat(pooled, 1))


def run_unfused_backward(
    call: EmbeddingCall, grad: torch.Tensor, target: backward.Target
) -> Sorted | None:
    """Exchange the gradients of pooled vectors, then sum dense ones by torch, others by our kernel.

    Returns None for dense gradients, for which lookups are not sorted.
    """
    received = _exchange_gradients(call, grad)
    if target.values is None or target.by_segment:
        return backward.run(call.without_peers(), received, target)
    _store_dense(call, received, target, target.values)
    return None


def _exchange(call: EmbeddingCall, pooled: torch.Tensor) -> torch.Tensor:
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


def _exchange_gradients(call: EmbeddingCall, grad: torch.Tensor) -> torch.Tensor:
    """Transpose :func:`_exchange`.

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


def _store_dense(
    call: EmbeddingCall,
    grads: torch.Tensor,
    target: backward.Target,
    values: torch.Tensor,
) -> None:
    """Store dense gradients in ``values``, table by table, from those of the pooled vectors."""
    widths = call.layout.widths[call.rank]
    for table, part in enumerate(grads.split(list(widths), 1)):
        if target.places[table] < 0:
            continue
        bounds, indices, scale = _lookups_of(call, table)
        total = torch.zeros(
            target.rows[table], widths[table], dtype=torch.float32, device=grads.device
        )
        total.index_add_(0, indices, _row_gradients(part, bounds, scale, call.mode))
        start = target.places[table] // values.itemsize
        values[start : start + total.numel()].copy_(total.reshape(-1))


def _lookups_of(
    call: EmbeddingCall, table: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the offsets, the indices and the factors of a table; waits for the device."""
    batch = call.layout.batch
    bounds = call.offsets[table * batch : (table + 1) * batch + 1]
    part = slice(int(bounds[0]), int(bounds[-1]))
    return bounds, call.indices[part], None if call.scale is None else call.scale[part]


def _row_gradients(
    grad: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None, mode: str
) -> torch.Tensor:
    """Return the gradients of one table's lookups, one row per lookup.

    ``grad [batch, width]``, ``offsets [batch + 1]`` -> float32 ``[lookups, width]``.
    """
    lengths = offsets.diff()
    per_bag = grad.float() / lengths.clamp(min=1)[:, None] if mode == "mean" else grad.float()
    # Each lookup of a bag has the bag's gradient.
    per_lookup = per_bag.repeat_interleave(lengths, 0)
    return per_lookup if scale is None else per_lookup * scale.float()[:, None]
