"""Compositions of a machine profile, fitted to measured times of implementations.

What is fitted, and why it is enough, says :mod:`interlace.costs.time`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from interlace.bench.roles import role_of
from interlace.costs.time import Call, MachineProfile, Schedule, parts_us
from interlace.gemm.operator import GemmOperator
from interlace.registry import Implementation, operator_matching, operators

_ITEMSIZES = {"bfloat16": 2, "float16": 2}
"""Dtypes whose times are fitted; the rates of others follow from theirs."""

_PAIR_NAMES = {
    "one_shot": ("cuBLAS + torch one-shot",),
    "two_shot": ("cuBLAS + torch two-shot",),
    "async_tp": ("torch async-TP (cuBLAS + copies)", "torch async-TP (copies + cuBLAS)"),
}
"""Display names of stock pairs in results before they were implementations."""

_LEAST_POINTS = 8
"""Fewer measured points than this say too little about a composition."""

_NEGLIGIBLE = 1e-4
"""Smaller factors are left out."""

_ROUNDS, _LEAST_RATIO = 6, 0.05
"""Rounds of the fit, and the least fraction of a measured time that a round may predict."""


@dataclasses.dataclass(frozen=True)
class Point:
    """The measured time of one implementation at one call.

    Attributes:
        tile: Rows and columns of the fused kernel's tiles, by its configuration.
        us: Median time in microseconds.
    """

    operator: str
    implementation: str
    call: Call
    schedule: Schedule
    tile: tuple[int, int]
    us: float

    def predicted_us(self, profile: MachineProfile) -> float | None:
        """Return what a profile says of this time; None if it does not know the implementation."""
        return profile.predict_us(
            self.operator, self.implementation, self.call, self.schedule, self.tile
        )


def points_of(documents: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Return the measured points of results that ``interlace bench`` wrote.

    A GEMV's are points of the operator around a GEMM that has the same collective: its fused kernel
    is that one's ``impl="gemv"``. Results of other operators are passed over, and of other dtypes
    than 16-bit ones.
    """
    points = []
    for document in documents:
        for result in document["results"]:
            declaration = operators().get(str(result.get("operator")))
            itemsize = _ITEMSIZES.get(str(result.get("dtype")))
            if declaration is None or itemsize is None or "splits" in result:
                continue
            is_gemv = declaration.pattern[:1] == ("gemv",)
            if not (is_gemv or isinstance(declaration, GemmOperator)):
                continue
            if not set(declaration.sizes) <= result.keys():
                continue
            rows, columns, inner = (int(result[name]) for name in declaration.sizes)
            call = Call(rows, columns, inner, itemsize, int(result["world_size"]))
            target = declaration
            if is_gemv:
                target = operator_matching("gemm", declaration.collective)
            tile = (1, 1) if is_gemv else tile_of(str(result["config"]))
            for implementation in target.implementations:
                name = implementation.name
                if is_gemv:
                    # The GEMV's result has its own kernel as "fused", and the stock pairs.
                    name = {"gemv": "fused", "fused": ""}.get(name, name)
                us = _time_of(name, implementation, result.get("times", {}))
                if us is not None:
                    kind = target.name, implementation.name, call, implementation.schedule
                    points.append(Point(*kind, tile, us))
    return points


def _time_of(
    impl: str, implementation: Implementation, times: Mapping[str, Mapping[str, Any]]
) -> float | None:
    """Return the shortest median by which an implementation was measured, in microseconds.

    Args:
        impl: Its name in the result.
    """
    names = {impl, *implementation.former_names} - {""}
    displayed = {*implementation.former_names, *_PAIR_NAMES.get(impl, ())}
    found = [
        float(time["median_us"])
        for name, time in times.items()
        if role_of(name, time)[1] in names or name in displayed
    ]
    return min(found, default=None)


def tile_of(config: str) -> tuple[int, int]:
    """Return ``block_m`` and ``block_n`` of a configuration's text; of an older text, its first two
    numbers.
    """
    named = dict(re.findall(r"(block_[mn])=(\d+)", config))
    numbers = [named["block_m"], named["block_n"]] if named else re.findall(r"\d+", config)[:2]
    block_m, block_n = map(int, numbers or ("128", "256"))
    return block_m, block_n


def fit(profile: MachineProfile, points: Sequence[Point]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the compositions that explain the points best, by operator and implementation.

    Factors are not negative, and the mean square of the logarithms' differences is least.
    """
    grouped: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        grouped[point.operator, point.implementation].append(point)
    compositions: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for (operator, implementation), own in sorted(grouped.items()):
        if len(own) >= _LEAST_POINTS:
            compositions[operator][implementation] = _composition(profile, own)
    return dict(compositions)


def _composition(profile: MachineProfile, points: Sequence[Point]) -> dict[str, float]:
    parts = [
        parts_us(profile, point.operator, point.call, point.schedule, point.tile)
        for point in points
    ]
    names = list(parts[0])
    matrix = np.array([[part[name] for name in names] for part in parts])
    measured = np.array([point.us for point in points])
    predicted = measured
    # The difference relative to the geometric mean of both times is nearly that of their
    # logarithms, so half of a time and its double are equally wrong.
    for _ in range(_ROUNDS):
        weights = 1 / np.sqrt(predicted * measured)
        factors = least_squares(matrix * weights[:, None], measured * weights)
        predicted = np.maximum(matrix @ factors, measured * _LEAST_RATIO)
    return {
        name: float(f"{factor:.4g}")
        for name, factor in zip(names, factors, strict=True)
        if factor > _NEGLIGIBLE
    }


def least_squares(
    matrix: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the factors, none negative, by which the columns come closest to the values.

    Of the subsets of columns whose unconstrained factors are not negative, the best is the answer.
    With nine columns there are 511 subsets.
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), math.inf
    for count in range(1, columns + 1):
        for subset in itertools.combinations(range(columns), count):
            factors, *_ = np.linalg.lstsq(matrix[:, subset], values, rcond=None)
            if (factors < 0).any():
                continue
            error = float(np.sum((matrix[:, subset] @ factors - values) ** 2))
            if error < least:
                least, best = error, np.zeros(columns)
                best[list(subset)] = factors
    return best


def unseen_choices(
    profile: MachineProfile, points: Sequence[Point], folds: int = 5
) -> dict[str, list[tuple[float, float]]]:
    """Return how good choices are at calls that the fit has not seen, by operator.

    The calls are dealt into ``folds`` parts. For each part, compositions are fitted to the others.

    Returns:
        For each call the time of the implementation with the shortest predicted time, as a multiple
        of the fastest stock pair's and of the fastest implementation's.
    """
    calls: dict[tuple[str, Call], list[Point]] = defaultdict(list)
    for point in points:
        calls[point.operator, point.call].append(point)
    groups = list(calls.values())
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for fold in range(folds):
        seen = [point for i, group in enumerate(groups) if i % folds != fold for point in group]
        fitted = dataclasses.replace(profile, compositions=fit(profile, seen))
        for group in groups[fold::folds]:
            declaration = operators()[group[0].operator]
            pairs = [point.us for point in group if declaration.is_pair(point.implementation)]
            chosen = predicted_fastest(fitted, group)
            if chosen is None or not pairs:
                continue
            ratios[declaration.name].append(
                (chosen.us / min(pairs), chosen.us / min(point.us for point in group))
            )
    return dict(ratios)


def predicted_fastest(profile: MachineProfile, points: Iterable[Point]) -> Point | None:
    """Return the point whose predicted time is the shortest; None if the profile knows none."""
    predicted = ((point.predicted_us(profile), point) for point in points)
    known = [(us, point) for us, point in predicted if us is not None]
    return min(known, key=lambda each: each[0])[1] if known else None


def errors(profile: MachineProfile, points: Iterable[Point]) -> list[float]:
    """Return ``predicted / measured`` of every point whose implementation has a composition."""
    predicted = ((point.predicted_us(profile), point.us) for point in points)
    return [us / measured for us, measured in predicted if us is not None]
