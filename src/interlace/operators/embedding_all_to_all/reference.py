"""``embedding_all_to_all`` in steps of torch, which the fused kernels are checked against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.gemm.reference import is_alone


def pool(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale: torch.Tensor | None,
    mode: str,
    batch: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Pool this rank's tables for every sample: ``[batch, columns of this rank]``."""
    # A rank without tables has no columns, and takes part in the exchange all the same.
    pooled = [indices.new_empty(batch, 0, dtype=dtype)]
    for table, weight in enumerate(weights):
        bounds = offsets[table * batch : (table + 1) * batch + 1]
        part = slice(int(bounds[0]), int(bounds[-1]))
        scales = None if scale is None else scale[part].to(weight.dtype)
        # Offsets of a table go on where those of the table before it end; torch counts from 0.
        bags = (bounds - bounds[0]).to(indices.dtype)
        pooled.append(
            F.embedding_bag(
                indices[part], weight, bags, None, 2.0, False, mode, False, scales, True
            ).to(dtype)
        )
    return torch.cat(pooled, 1)


def exchange(
    pooled: torch.Tensor,
    samples: list[int],
    columns: list[int],
    rank: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Run an all-to-all and unpack.

    ``[batch, columns[rank]]`` -> ``[samples[rank], sum of columns]``.
    """
    to_each, from_each = (
        [count * columns[rank] for count in samples],
        [samples[rank] * width for width in columns],
    )
    are_equal = _are_equal(samples, columns)
    received = _all_to_all(pooled.reshape(-1), from_each, to_each, are_equal, group)
    # What comes from a rank is contiguous, with that rank's columns for this rank's samples.
    pieces = [
        part.view(samples[rank], width)
        for part, width in zip(received.split(from_each), columns, strict=True)
    ]
    return torch.cat(pieces, 1)


def exchange_gradient(
    gradient: torch.Tensor,
    samples: list[int],
    columns: list[int],
    rank: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Transpose :func:`exchange`.

    ``[samples[rank], sum of columns]`` -> ``[batch, columns[rank]]``.
    """
    packed = torch.cat([part.reshape(-1) for part in gradient.split(columns, 1)])
    to_each, from_each = (
        [samples[rank] * width for width in columns],
        [count * columns[rank] for count in samples],
    )
    received = _all_to_all(packed, from_each, to_each, _are_equal(samples, columns), group)
    return received.view(sum(samples), columns[rank])


def row_gradients(
    gradient: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None, mode: str
) -> torch.Tensor:
    """Return the gradients of one table's lookups, one row per lookup.

    ``gradient [batch, width]``, ``offsets [batch + 1]`` -> float32 ``[lookups, width]``.
    """
    lengths = offsets.diff()
    per_bag = (
        gradient.float() / lengths.clamp(min=1)[:, None] if mode == "mean" else gradient.float()
    )
    # Each lookup of a bag has the bag's gradient.
    per_lookup = per_bag.repeat_interleave(lengths, 0)
    return per_lookup if scale is None else per_lookup * scale.float()[:, None]


def _are_equal(samples: list[int], columns: list[int]) -> bool:
    """Return whether all pieces of all ranks are alike, for which libraries have a collective."""
    return len({*samples}) == len({*columns}) == 1


def _all_to_all(
    packed: torch.Tensor,
    from_each: list[int],
    to_each: list[int],
    are_equal: bool,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    if is_alone(group):
        return packed
    received = packed.new_empty(sum(from_each))
    if are_equal:
        dist.all_to_all_single(received, packed, group=group)
    else:
        dist.all_to_all_single(received, packed, from_each, to_each, group=group)
    return received
