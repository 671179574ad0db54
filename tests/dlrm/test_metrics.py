"""The area under the ROC curve agrees with its definition, ties included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from interlace import ArgumentError
from interlace_dlrm import area_under_roc, binary_cross_entropy, gather_rows


def _by_pairs(scores: list[float], labels: list[int]) -> float:
    """Compute the area over all pairs of a positive and a negative sample: 1 if the positive's
    score is higher, 1/2 if they are equal.
    """
    pairs = [
        (a > b) + 0.5 * (a == b)
        for a, positive in zip(scores, labels, strict=True)
        for b, other_label in zip(scores, labels, strict=True)
        if positive and not other_label
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


def test_the_example_of_scikit_learn() -> None:
    assert area_under_roc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])) == 0.75


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=1, max_size=30))
def test_equal_to_counting_pairs(samples: list[tuple[int, int]]) -> None:
    """Scores have seven values, so there are ties everywhere."""
    scores, labels = [float(score) for score, _ in samples], [label for _, label in samples]
    area, expected = (
        area_under_roc(torch.tensor(scores), torch.tensor(labels)),
        _by_pairs(scores, labels),
    )
    assert area == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_a_large_sample_of_float32() -> None:
    """Ranks exceed float32's integers; a shift of d standard deviations gives Phi(d / sqrt(2))."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200_000) % 2
    scores = torch.randn(200_000, generator=generator) + labels
    assert area_under_roc(scores, labels) == pytest.approx(0.5 * (1 + math.erf(0.5)), abs=0.003)


def test_rejected() -> None:
    with pytest.raises(
        ArgumentError,
        match=r"^area_under_roc: scores and labels must be 1-D and alike; got \[2\] and \[3\]\.$",
    ):
        area_under_roc(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"^area_under_roc: scores must be numbers; got NaN\.$"):
        area_under_roc(torch.tensor([math.nan]), torch.zeros(1))


def test_binary_cross_entropy() -> None:
    logits, labels = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0])
    assert float(binary_cross_entropy(logits, labels)) == pytest.approx(
        (math.log(2) + math.log(1 + math.e**2)) / 2
    )
    assert float(binary_cross_entropy(logits[:0], labels[:0])) == 0


def _gather() -> Any:
    rank = dist.get_rank()
    return gather_rows(torch.full((rank, 2), float(rank))).tolist()


def test_ranks_with_different_numbers_of_rows(ranks: Any) -> None:
    assert (
        ranks(4).run(_gather)
        == [[[1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]] * 4
    )
