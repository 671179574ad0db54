"""A rank's lookups in the order of the rows that they look up, by which gradients are summed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from interlace.operators.embedding_all_to_all.call import EmbeddingCall


@dataclasses.dataclass(frozen=True)
class Sorted:
    """This rank's lookups in the order of tables and rows.

    The sizes of all tensors are known without looking at the numbers.

    Attributes:
        keys: The number of each lookup's row among all rows of the rank; ascending.
        bags: The bag of each lookup.
        scale: The factor of each lookup, float32; None for 1.
        segment_of: The number of each lookup's distinct row.
        segments: The first lookup of each distinct row; beyond the last, the number of lookups.
        runs: The first lookup of each run of at most ``run_lookups`` lookups of one row; beyond the
            last, the number of lookups.
        run_bags, run_keys, run_segments: The bag of each run's first lookup, the key of its row and
            the segment of its row.
        run_count: The number of runs, on the device.
    """

    keys: torch.Tensor
    bags: torch.Tensor
    scale: torch.Tensor | None
    segment_of: torch.Tensor
    segments: torch.Tensor
    runs: torch.Tensor
    run_bags: torch.Tensor
    run_keys: torch.Tensor
    run_segments: torch.Tensor
    run_count: torch.Tensor


def first_keys_of(rows: Sequence[int]) -> list[int]:
    """Return the number of each table's first row among all rows of the rank, and of all rows."""
    return [0, *itertools.accumulate(rows)]


def sort_lookups(call: EmbeddingCall, rows: Sequence[int]) -> Sorted:
    """Sort this rank's lookups by row.

    The order depends on indices and offsets alone, not on gradients; the host does not wait.

    Args:
        call: The call, whose configuration says how long a run is.
        rows: Rows of each of this rank's tables.
    """
    device, count = call.indices.device, call.indices.shape[0]
    batch, tables = call.layout.batch, len(rows)
    if not count:
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        return Sorted(
            keys=zero,
            bags=zero,
            scale=None if call.scale is None else zero.float(),
            segment_of=zero,
            segments=zero.repeat(2),
            runs=zero.repeat(2),
            run_bags=zero,
            run_keys=zero,
            run_segments=zero,
            run_count=zero,
        )
    # Keys that fit in 32 bits sort in less time than keys of 64.
    small = sum(rows) < 2**31 - 1
    first_keys = call.group.cache.tables.on_device([first_keys_of(rows)[:-1]])[0]
    numbers = torch.arange(tables * batch, dtype=torch.int32, device=device)
    lengths = call.offsets.diff()
    # Told the size, torch need not wait for the device to add up the lengths.
    bags = torch.repeat_interleave(numbers, lengths, output_size=count)
    keys = call.indices + first_keys[torch.div(bags, batch, rounding_mode="floor")]
    # A stable sort keeps the lookups of a row in their order, and so the bits of their sum.
    keys, order = torch.sort(keys.to(torch.int32 if small else torch.int64), stable=True)
    scale = None if call.scale is None else call.scale.float()
    if call.mode == "mean":
        scale = lengths.clamp(min=1).float().reciprocal()[bags]
    # A segment begins where the key is another one than before.
    new = torch.ones(count, dtype=torch.bool, device=device)
    torch.ne(keys[1:], keys[:-1], out=new[1:])
    positions = torch.arange(count + 1, dtype=torch.int32, device=device)
    segment_of, segments = _starts(new, positions)
    # A run begins with its segment, and again after every ``run_lookups`` lookups of it.
    first = (positions[:-1] - segments[segment_of]) % call.config.run_lookups == 0
    run_of, runs = _starts(first, positions)
    # Factors and bags are put in the order of the keys; the first lookup of each run is gathered
    # for the kernel, which then needs one load for it and not two.
    scale, bags = None if scale is None else scale[order], bags[order]
    openings = runs.clamp(max=count - 1)
    return Sorted(
        keys=keys,
        bags=bags,
        scale=scale,
        segment_of=segment_of,
        segments=segments,
        runs=runs,
        run_bags=bags.index_select(0, openings),
        run_keys=keys.index_select(0, openings),
        run_segments=segment_of.index_select(0, openings),
        run_count=run_of[-1:] + 1,
    )


def _starts(first: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the group that each element is in, and the first element of each group.

    ``first`` says which elements begin a group.
    """
    group_of = first.cumsum(0, dtype=torch.int32) - 1
    return group_of, torch.searchsorted(group_of, positions, out_int32=True)
