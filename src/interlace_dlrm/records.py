"""Records of a click log, and their transformation for a model, in plain numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

INTEGERS = 13
"""Integer features of a record, called I1 to I13 by Criteo."""

CATEGORIES = 26
"""Categorical features of a record, called C1 to C26."""

MISSING = -1
"""The id of a missing category; real ids are 0 to 2**32 - 1."""


@dataclasses.dataclass(frozen=True)
class Records:
    """A number n of records.

    Attributes:
        labels: Uint8 ``[n]``: 1 for clicked, 0 for not.
        integers: int64 ``[n, 13]``; a missing integer is 0, as in the DLRM reference.
        categories: int64 ``[n, 26]``: the 32-bit ids; a missing id is :data:`MISSING`.
    """

    labels: npt.NDArray[np.uint8]
    integers: npt.NDArray[np.int64]
    categories: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> Records:
        return Records(self.labels[rows], self.integers[rows], self.categories[rows])

    @classmethod
    def join(cls, parts: Iterable[Records]) -> Records:
        """Join the records of ``parts`` in order."""
        listed = list(parts)
        return cls(
            np.concatenate([part.labels for part in listed]),
            np.concatenate([part.integers for part in listed]),
            np.concatenate([part.categories for part in listed]),
        )

    @classmethod
    def empty(cls) -> Records:
        """Return no records."""
        return cls(
            np.zeros(0, np.uint8), np.zeros((0, INTEGERS), np.int64),
            np.zeros((0, CATEGORIES), np.int64)
        )  # fmt: skip


def log_transform(integers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return ``log(1 + max(x, 0))``, as the DLRM reference does; a missing integer, 0, stays 0."""
    return np.log1p(np.maximum(integers, 0)).astype(np.float32)


def hash_to_rows(ids: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    """Map ids to rows of a table: a missing id to row 0, an id to ``1 + mix(id) % (rows - 1)``.

    ``mix`` is splitmix64's finaliser, which gives equal rows on every machine and in every run,
    unlike Python's ``hash``.
    """
    # Row 0 is reserved for missing ids, so ids share the other rows - 1.
    mixed = mix(ids.astype(np.uint64))
    return np.where(ids < 0, 0, 1 + (mixed % np.uint64(rows - 1)).astype(np.int64))


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix 64 bits into 64 bits by splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    # Unsigned 64-bit arithmetic wraps around, which is what the algorithm relies on.
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
