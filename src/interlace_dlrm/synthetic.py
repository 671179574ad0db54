"""Synthetic clicks in the form of Criteo's, from a hidden model that a model can learn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from interlace.errors import ArgumentError
from interlace_dlrm.records import CATEGORIES, INTEGERS, MISSING, Records, log_transform, mix

_BLOCK = 1024
_MISSING_RATE = 0.05
_ID_BITS = np.uint64(32)


class SyntheticClicks:
    """A stream of records that only depends on ``seed`` and ``model_seed``.

    Integers are log-normal. The k-th commonest of a feature's categories has a probability of about
    ``1 / k`` (Zipf's law), so a few rows of a table are looked up all the time, and most rows
    hardly ever. One value in twenty is missing. The label is drawn with probability
    ``sigmoid(score)``, where the score adds a weight for each integer's logarithm and a weight for
    each category; the weights are drawn from the seed as well.

    Args:
        samples: Number of records in the stream; None makes it endless.
        seed: Seed of the records; streams of one ``model_seed`` differ by it.
        model_seed: Seed of the hidden model; ``seed`` by default. Held-out records need the
            training records' model and another ``seed``.
        cardinality: Number of categories of a feature.

    Raises:
        ArgumentError: there is less than one category, or a negative number of samples.

    Example:
        >>> train = SyntheticClicks(10_000, seed=1)
        >>> held_out = SyntheticClicks(2_000, seed=2, model_seed=1)
    """

    def __init__(
        self,
        samples: int | None,
        *,
        seed: int = 0,
        model_seed: int | None = None,
        cardinality: int = 1000,
    ) -> None:
        if cardinality < 1 or (samples is not None and samples < 0):
            raise ArgumentError(
                "SyntheticClicks: cardinality must be positive and samples not negative; got "
                f"{cardinality} and {samples}."
            )
        self.samples, self.seed, self.cardinality = samples, seed, cardinality
        self.model_seed = seed if model_seed is None else model_seed
        hidden = np.random.default_rng([self.model_seed, 0])
        self._weights = hidden.normal(0, 0.25, INTEGERS)
        self._scales = hidden.uniform(0.5, 3.0, INTEGERS)
        self._salts = hidden.integers(0, 2**63, CATEGORIES, dtype=np.uint64)

    def __iter__(self) -> Iterator[Records]:
        """Iterate over the records in blocks; every iteration gives equal records."""
        made = 0
        while self.samples is None or made < self.samples:
            records = self._block(made // _BLOCK)
            if self.samples is not None:
                records = records[: self.samples - made]
            made += len(records)
            yield records

    def _block(self, number: int) -> Records:
        draw = np.random.default_rng([self.seed, 1, number])
        integers = draw.lognormal(self._scales, 1.0, (_BLOCK, INTEGERS)).astype(np.int64)
        integers[draw.random(integers.shape) < _MISSING_RATE] = 0
        # An inverse of the distribution function of 1/k: the logarithm of k is uniform.
        common = ((self.cardinality + 1) ** draw.random((_BLOCK, CATEGORIES))).astype(np.uint64)
        ids = (mix(common ^ self._salts) >> _ID_BITS).astype(np.int64)
        ids[draw.random(ids.shape) < _MISSING_RATE] = MISSING
        probability = 1 / (1 + np.exp(-self._score(integers, ids)))
        return Records((draw.random(_BLOCK) < probability).astype(np.uint8), integers, ids)

    def _score(
        self, integers: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        dense = (log_transform(integers) - self._scales) @ self._weights
        # An id's weight is a hash of it, uniform in (-1, 1), so that no weights are stored for ids
        # that never occur.
        weights = mix(ids.astype(np.uint64) ^ self._salts) / 2.0**63 - 1
        return np.asarray(dense + 0.7 * weights.sum(axis=1) - 0.5, dtype=np.float64)
