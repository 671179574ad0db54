"""Batches: the same global batches for any number of ranks, the same rows on any machine, and
clicks that can be learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from interlace import ArgumentError
from interlace_dlrm import Batch, BatchStream, DataError, Records, SyntheticClicks, collate
from interlace_dlrm.records import hash_to_rows, log_transform, mix

ROWS = [50, 2, 1000]


def _join(parts: list[Batch], lookups: int | list[int]) -> list[list[torch.Tensor]]:
    """Ranks' parts of one global batch, as each sample's bag of each table."""
    fixed = torch.tensor([lookups] * len(ROWS) if isinstance(lookups, int) else lookups)
    bags = []
    for part in parts:
        n = len(part.labels)
        ends = part.offsets
        if ends is None:
            ends = torch.cat(
                [torch.zeros(1, dtype=torch.int64), fixed.repeat_interleave(n).cumsum(0)]
            )
        flat = [part.indices[ends[i] : ends[i + 1]] for i in range(len(ROWS) * n)]
        bags += [[flat[t * n + i] for t in range(len(ROWS))] for i in range(n)]
    return bags


def test_ids_become_the_same_rows_everywhere() -> None:
    # Splitmix64's own test vector
    assert mix(np.array([0, 1], np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    ids = np.array([0, 0x05DB9164, 2**32 - 1, -1])
    assert hash_to_rows(ids, 1000).tolist() == [
        1 + int(z) % 999 for z in mix(ids[:3].astype(np.uint64))
    ] + [0]
    assert set(hash_to_rows(np.arange(1000), 7).tolist()) == set(range(1, 7))


def test_integers_are_log_transformed_as_in_the_reference() -> None:
    assert log_transform(np.array([-3, 0, 1])).tolist() == [0, 0, np.float32(np.log(2))]


@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("lookups", [1, [1, 3, 2]])
def test_a_global_batch_does_not_depend_on_the_ranks(
    lookups: int | list[int], jagged: bool
) -> None:
    def parts(world_size: int) -> list[list[Batch]]:
        options: dict[str, Any] = {
            "rows": ROWS,
            "lookups": lookups,
            "jagged": jagged,
            "world_size": world_size,
        }
        streams = [
            BatchStream(SyntheticClicks(100, seed=3), 24, rank=rank, **options)
            for rank in range(world_size)
        ]
        return [list(batch) for batch in zip(*streams, strict=True)]

    whole, quarters = parts(1), parts(4)
    assert len(whole) == len(quarters) == 4  # the last four samples are dropped
    for one, four in zip(whole, quarters, strict=True):
        assert torch.equal(one[0].dense, torch.cat([part.dense for part in four]))
        assert torch.equal(one[0].labels, torch.cat([part.labels for part in four]))
        for bags, same in zip(_join(one, lookups), _join(four, lookups), strict=True):
            assert [bag.tolist() for bag in bags] == [bag.tolist() for bag in same]
    lengths = {len(bag) for batch in whole for bags in _join(batch, lookups) for bag in bags}
    assert (0 in lengths) == jagged


def test_the_last_batch_is_filled_up_when_asked_for() -> None:
    padded = [
        list(BatchStream(SyntheticClicks(10), 8, rows=ROWS, rank=rank, world_size=4, last="pad"))
        for rank in range(4)
    ]
    assert [[int(batch.valid.sum()) for batch in batches] for batches in padded] == [
        [2, 2],
        [2, 0],
        [2, 0],
        [2, 0],
    ]
    assert all(len(batch.labels) == 2 for batches in padded for batch in batches)
    assert torch.equal(padded[3][1].dense, padded[0][1].dense[[1, 1]])


def test_held_out_batches() -> None:
    def labels(**options: object) -> list[list[float]]:
        return [
            batch.labels.tolist()
            for batch in BatchStream(SyntheticClicks(80), 8, rows=ROWS, **options)
        ]  # type: ignore[arg-type]

    everything = labels()
    assert labels(held_out_every=5, held_out=True) == [everything[4], everything[9]]
    assert labels(held_out_every=5) == everything[:4] + everything[5:9]


def test_a_stream_without_a_batch_is_an_error() -> None:
    """Unless it is of the batches that are held out, of which few records have none."""

    def count(samples: int, **options: Any) -> int:
        return len(list(BatchStream(SyntheticClicks(samples), 8, rows=ROWS, **options)))

    for samples, options, rule in [
        (7, {}, "8 records or more, for one batch; got 7. Give more data, or take a smaller batch"),
        (0, {"last": "pad"}, "1 records or more, for one batch; got 0. Give more data"),
    ]:
        with pytest.raises(DataError) as caught:
            count(samples, **options)
        assert str(caught.value) == f"BatchStream: the source must have {rule}."
    assert count(7, last="pad") == 1
    assert count(7, held_out_every=2, held_out=True, last="pad") == 0


def test_synthetic_clicks_depend_on_the_seed_alone() -> None:
    one, same, other = (Records.join(SyntheticClicks(1500, seed=seed)) for seed in (1, 1, 2))
    for name in ("labels", "integers", "categories"):
        assert np.array_equal(getattr(one, name), getattr(same, name))
        assert not np.array_equal(getattr(one, name), getattr(other, name))
    commonest = np.sort(np.unique(one.categories[:, 0], return_counts=True)[1])[::-1]
    assert commonest[0] > 1.5 * commonest[2] > 10  # Zipf: 1, 1/2, 1/3 ...
    held_out = SyntheticClicks(1500, seed=5, model_seed=1)
    source = SyntheticClicks(1500, seed=1)
    score = source._score(
        *(getattr(Records.join(held_out), name) for name in ("integers", "categories"))
    )
    labels = Records.join(held_out).labels
    assert score[labels == 1].mean() > score[labels == 0].mean() + 1  # one hidden model for both


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda records: BatchStream([records], 10, rows=ROWS, world_size=4),
            "BatchStream: the global batch must divide evenly over 4 ranks; got 10. Take 8.",
        ),
        (
            lambda records: BatchStream([records], 8, rows=ROWS, last="keep"),
            "BatchStream: last must be drop or pad; got 'keep'.",
        ),
        (
            lambda records: BatchStream([records], 8, rows=ROWS, held_out_every=1),
            "BatchStream: held_out_every must be 0 or at least 2; got 1.",
        ),
        (
            lambda records: collate(records, [5, 1]),
            (
                "collate: there must be 1 to 26 tables of at least 2 rows and 1 lookup each; got "
                "rows [5, 1] and lookups [1, 1]."
            ),
        ),
        (
            lambda records: SyntheticClicks(-1),
            (
                "SyntheticClicks: cardinality must be positive and samples not negative; got 1000 "
                "and -1."
            ),
        ),
    ],
)
def test_rejected(make: Callable[[Records], object], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(Records.empty())
    assert str(caught.value) == message
