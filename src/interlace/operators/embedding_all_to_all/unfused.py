"""The backward pass by an all-to-all of torch, and dense gradients of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.comm import process_group_named
from interlace.operators.embedding_all_to_all import reference
from interlace.operators.embedding_all_to_all.launch import EmbeddingCall
from interlace.operators.embedding_all_to_all.layout import dense_bounds


def exchange(call: EmbeddingCall, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradients of this rank's tables, ``[batch, columns of this rank]``.

    They travel by an all-to-all of torch.
    """
    call.group.check()
    layout = call.layout
    samples = [layout.samples(rank) for rank in range(layout.world_size)]
    process_group = process_group_named(call.group_name)
    return reference.exchange_gradient(
        grad, samples, list(layout.rank_columns), call.rank, process_group
    )


def store_dense(
    call: EmbeddingCall,
    table_grads: torch.Tensor,
    values: torch.Tensor,
    rows: Sequence[int],
    trainable: Sequence[bool],
) -> None:
    """Store dense gradients in ``values``, table by table, from those of the pooled vectors."""
    widths, batch = call.layout.widths[call.rank], call.layout.batch
    starts = dense_bounds(rows, widths)
    for table, part in enumerate(table_grads.split(list(widths), 1)):
        if not trainable[table]:
            continue
        bounds = call.offsets[table * batch : (table + 1) * batch + 1]
        lookups = slice(int(bounds[0]), int(bounds[-1]))
        scale = None if call.scale is None else call.scale[lookups]
        total = torch.zeros(
            rows[table], widths[table], dtype=torch.float32, device=table_grads.device
        )
        total.index_add_(
            0, call.indices[lookups], reference.row_gradients(part, bounds, scale, call.mode)
        )
        values[starts[table] :][: total.numel()].copy_(total.reshape(-1))
