"""A rank's lookups in the order of the rows that they look up, by which gradients are summed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from interlace.comm.launching.kernels import Launch
from interlace.comm.runtime.interpreter import require
from interlace.operators.embedding_all_to_all.call import EmbeddingCall
from interlace.units import ceil_div

_BLOCK = 1024
"""Lookups of a program of the kernels around the sort."""


@dataclasses.dataclass(frozen=True)
class Sorted:
    """This rank's lookups in the order of tables and rows.

    The sizes of all tensors are known without looking at the numbers.

    Attributes:
        keys: The number of each lookup's row among all rows of the rank; ascending.
        bags: The bag of each lookup.
        scale: The factor of each lookup, float32; None for 1.
        segments_begun: How many segments, which are distinct rows, begin up to each lookup.
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
    segments_begun: torch.Tensor
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
            segments_begun=zero,
            segments=zero.repeat(2),
            runs=zero.repeat(2),
            run_bags=zero,
            run_keys=zero,
            run_segments=zero,
            run_count=zero,
        )
    require(call.group.backend)
    from interlace.operators.embedding_all_to_all.kernels import sorting

    def launch(kernel: Any, constants: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        constants = {"BLOCK": _BLOCK, **(constants or {})}
        Launch(kernel, (ceil_div(count, _BLOCK),), {**arguments, "count": count}, constants)()

    def empty(dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    first_keys = call.group.cache.tables.on_device([first_keys_of(rows)[:-1]])[0]
    numbers = torch.arange(tables * batch, dtype=torch.int32, device=device)
    lengths = call.offsets.diff()
    # Told the size, torch need not wait for the device to add up the lengths.
    bags = torch.repeat_interleave(numbers, lengths, output_size=count)
    # Keys that fit in 32 bits sort in less time than keys of 64.
    keys = empty(torch.int32 if sum(rows) < 2**31 - 1 else torch.int64)
    launch(
        sorting.number_rows,
        indices=call.indices,
        bags=bags,
        first_keys=first_keys,
        keys=keys,
        batch=batch,
    )
    # A stable sort keeps the lookups of a row in their order, and so the bits of their sum.
    keys, order = torch.sort(keys, stable=True)
    scale = call.scale
    if call.mode == "mean":
        scale = lengths.clamp(min=1).float().reciprocal()[bags]
    sorted_bags, begins = empty(), empty()
    sorted_scale = None if scale is None else empty(torch.float32)
    launch(
        sorting.mark_segments,
        keys=keys,
        order=order,
        bags=bags,
        scale=scale,
        sorted_bags=sorted_bags,
        sorted_scale=sorted_scale,
        begins=begins,
    )
    del bags, order, lengths, numbers  # their memory is used again
    segments_begun = begins.cumsum(0, dtype=torch.int32)
    segments, runs = (
        torch.full([count + 1], count, dtype=torch.int32, device=device) for _ in range(2)
    )
    launch(sorting.open_segments, begun=segments_begun, segments=segments)
    launch(
        sorting.mark_runs,
        {"LOOKUPS": call.config.run_lookups},
        begun=segments_begun,
        segments=segments,
        begins=begins,
    )
    runs_begun = begins.cumsum(0, dtype=torch.int32)
    run_bags, run_keys, run_segments = empty(), torch.empty_like(keys), empty()
    launch(
        sorting.open_runs,
        begun=runs_begun,
        keys=keys,
        bags=sorted_bags,
        segments_begun=segments_begun,
        runs=runs,
        run_bags=run_bags,
        run_keys=run_keys,
        run_segments=run_segments,
    )
    return Sorted(
        keys=keys,
        bags=sorted_bags,
        scale=sorted_scale,
        segments_begun=segments_begun,
        segments=segments,
        runs=runs,
        run_bags=run_bags,
        run_keys=run_keys,
        run_segments=run_segments,
        run_count=runs_begun[-1:],
    )
