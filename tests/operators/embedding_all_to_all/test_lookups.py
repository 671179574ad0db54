"""Lookups in the order of their rows: segments and runs, compared with a loop over all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.operators.embedding_all_to_all.lookups import sort_lookups

ROWS = (7, 300, 1)
BATCH, RUN = 40, 4


def _call(mode: str, scale: torch.Tensor | None, index_dtype: torch.dtype) -> Any:
    """A call of more lookups than a program of the kernels takes, with empty bags among them."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 50, [len(ROWS) * BATCH], generator=generator)
    lengths[::9] = 0
    tables = torch.repeat_interleave(torch.arange(len(ROWS)).repeat_interleave(BATCH), lengths)
    indices = (torch.rand(len(tables), generator=generator) * torch.tensor(ROWS)[tables]).long()
    on_device = torch.tensor
    return SimpleNamespace(
        group=SimpleNamespace(
            backend="cpu", cache=SimpleNamespace(tables=SimpleNamespace(on_device=on_device))
        ),
        indices=indices.to(index_dtype),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        layout=SimpleNamespace(batch=BATCH),
        mode=mode,
        scale=None if scale is None else torch.rand(len(indices), generator=generator).to(scale),
        config=SimpleNamespace(run_lookups=RUN),
    )


def _check(mode: str, weights: torch.dtype | None, index_dtype: torch.dtype) -> None:
    call = _call(mode, None if weights is None else torch.zeros([], dtype=weights), index_dtype)
    found = sort_lookups(call, ROWS)
    lengths = call.offsets.diff()
    bags = [bag for bag, length in enumerate(lengths.tolist()) for _ in range(length)]
    first_keys = [0, ROWS[0], ROWS[0] + ROWS[1]]
    keys = [
        first_keys[bag // BATCH] + index
        for bag, index in zip(bags, call.indices.tolist(), strict=True)
    ]
    assert len(keys) > 2000, "several programs take part"
    order = sorted(range(len(keys)), key=lambda lookup: (keys[lookup], lookup))
    assert found.keys.tolist() == [keys[lookup] for lookup in order]
    assert found.bags.tolist() == [bags[lookup] for lookup in order]
    if mode == "mean":
        expected = [1 / max(lengths[bags[lookup]].item(), 1) for lookup in order]
        torch.testing.assert_close(found.scale, torch.tensor(expected))
    elif weights is None:
        assert found.scale is None
    else:
        assert found.scale is not None
        assert torch.equal(found.scale, call.scale.float()[order])
    segments, runs = [], []
    for place, key in enumerate(found.keys.tolist()):
        if place == 0 or key != found.keys[place - 1]:
            segments.append(place)
        if (place - segments[-1]) % RUN == 0:
            runs.append((place, len(segments) - 1))
        assert found.segments_begun[place] == len(segments)
    count = len(keys)
    assert found.segments.tolist() == segments + [count] * (count + 1 - len(segments))
    assert found.run_count.tolist() == [len(runs)]
    assert found.runs.tolist() == [run for run, _ in runs] + [count] * (count + 1 - len(runs))
    assert found.run_segments[: len(runs)].tolist() == [segment for _, segment in runs]
    starts = [run for run, _ in runs]
    assert torch.equal(found.run_bags[: len(runs)], found.bags[starts])
    assert torch.equal(found.run_keys[: len(runs)], found.keys[starts])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("mode", "weights"),
    [("sum", None), ("sum", torch.float32), ("sum", torch.bfloat16), ("mean", None)],
)
def test_segments_and_runs(
    ranks: Any, mode: str, weights: torch.dtype | None, index_dtype: torch.dtype
) -> None:
    ranks(1).run(_check, mode, weights, index_dtype)
