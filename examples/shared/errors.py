"""Errors of a module's results, judged by the roundings of the same module run the simple way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def higher(dtype: str) -> torch.dtype:
    """Return the dtype in which results are exact by comparison with ``dtype``."""
    return torch.float64 if dtype == "float32" else torch.float32


def errors_of(
    results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return each tensor's error: the norm of the difference, relative to the expected norm."""
    assert results.keys() == expected.keys()
    return {
        name: float((results[name] - value).norm() / value.norm())
        for name, value in expected.items()
    }


class Judge:
    """The errors that rounding explains: four times those of the first way.

    Attributes:
        failures: Errors of later ways that are larger.
    """

    def __init__(self, dtype: str) -> None:
        self.failures: list[str] = []
        self._eps = torch.finfo(DTYPES[dtype]).eps
        self._allowed: dict[str, float] = {}

    def worst(self, way: str, ranks: Sequence[dict[str, float]]) -> dict[str, float]:
        """Judge a way, and return its largest errors of all ranks, by tensor."""
        errors = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        if not self._allowed:
            self._allowed = {key: 4 * max(error, self._eps) for key, error in errors.items()}
        # Not `error > allowed`: a NaN must not pass.
        self.failures += [
            f"{way}: {key} {error:.1e}, allowed {self._allowed[key]:.1e}"
            for key, error in errors.items()
            if not error <= self._allowed[key]
        ]
        return errors
