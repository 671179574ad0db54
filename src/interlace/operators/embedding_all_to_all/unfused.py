"""The implementation ``unfused``: PyTorch's operators, and an all-to-all of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from interlace.operators.embedding_all_to_all import backward
from interlace.operators.embedding_all_to_all.call import EmbeddingCall
from interlace.operators.embedding_all_to_all.lookups import Sorted
from interlace.operators.embedding_all_to_all.pooled import exchange, exchange_gradients


def run(call: EmbeddingCall) -> torch.Tensor:
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
    return exchange(call, torch.cat(pooled, 1))


def run_backward(call: EmbeddingCall, grad: torch.Tensor, target: backward.Target) -> Sorted | None:
    """Exchange the gradients of pooled vectors, then sum dense ones by torch, others by our kernel.

    Returns None for dense gradients, for which lookups are not sorted.
    """
    received = exchange_gradients(call, grad)
    if target.values is None or target.by_segment:
        return backward.run(call.without_peers(), received, target)
    _store_dense(call, received, target, target.values)
    return None


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
