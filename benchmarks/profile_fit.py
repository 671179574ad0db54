"""``interlace tune profile``: fit a machine's profile to results that were measured on it.

The profiles that are shipped are made so. What is fitted, and why it is enough, says
:mod:`interlace.costs.time`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.sweep import predicted_fastest, summary_table
from interlace.bench import machine_profile, report
from interlace.bench.machine_profile import (
    Compositions,
    MeasuredPoint,
    corrections_of,
    merged,
    scaled,
)
from interlace.cli.console import make_console, make_table
from interlace.cli.outputs import Outputs
from interlace.costs.known_profiles import profile_of
from interlace.costs.time import MachineProfile, TimedCall
from interlace.errors import ArgumentError
from interlace.registry import operators

_LEAST_POINTS = 8
"""Fewer measured points than this say too little about a composition."""

_NEGLIGIBLE = 1e-4
"""Smaller factors are left out."""

_AS_GOOD = 1e-9
"""Relative difference of sums of squares that rounding explains."""

_ROUNDS, _LEAST_RATIO = 6, 0.05
"""Rounds of the fit, and the least fraction of a measured time that a round may predict."""


def run_profile(files: Sequence[Path], outputs: Outputs) -> None:
    """Fit how implementations compose their times to results, and print how far they are off.

    Raises:
        ArgumentError: The results are of several kinds of GPUs, or too few.
    """
    documents = [report.read_document(file) for file in files]
    gpus = {gpu for document in documents for gpu in document["machine"]["gpus"]}
    if len(gpus) != 1:
        raise ArgumentError(
            f"a profile must be of one kind of GPU; got {', '.join(sorted(gpus)) or 'none'}."
        )
    points = machine_profile.points_of(documents)
    start = profile_of(gpus.pop())
    refitted = fitted(start, points)
    if not refitted.compositions:
        raise ArgumentError(f"results must have more of a product's times; got {len(points)}.")
    calls = {(point.operator, point.call) for point in points}
    # The source keeps what earlier fits said of products and links, which this one leaves as it is.
    profile = dataclasses.replace(
        refitted,
        source=f"{start.source.split('; compositions')[0]}; compositions: {len(points)} times of "
        f"{len(calls)} calls",
        results=sorted(file.name for file in files),
    )
    table = make_table("operator", "implementation", "times", "median error", "90 % below")
    for (operator, name), wrong in machine_profile.deviations(profile, points).items():
        figures = statistics.median(wrong), wrong[int(0.9 * (len(wrong) - 1))]
        table.add_row(operator, name, str(len(wrong)), *(f"{value:.1%}" for value in figures))
    console = make_console()
    console.print(table)
    trusted = {*points}
    disturbed = [
        point
        for point in machine_profile.points_of(documents, with_disturbed=True)
        if point not in trusted
    ]
    unseen = unseen_choices(start, points, disturbed)
    compared = sum(map(len, unseen.values()))
    measured = len({(point.operator, point.call) for point in (*points, *disturbed)})
    caption = (
        f"{measured} calls measured, {compared} compared, {measured - compared} left out, which no "
        f"prediction or no stock pair has. {len(disturbed)} times that other work has lengthened "
        "count here, and nothing is fitted to them."
    )
    console.print(summary_table(unseen, "Calls that the fit has not seen", caption))
    outputs.write_json(lambda: dataclasses.asdict(profile))
    outputs.say_written(console, "Profile")


def fit(profile: MachineProfile, points: Sequence[MeasuredPoint]) -> Compositions:
    """Return the compositions that explain the points best, by operator and implementation.

    Factors are not negative, and the mean square of the logarithms' differences is least. Those of
    parts that no point has are the profile's.
    """
    grouped: dict[tuple[str, str], list[MeasuredPoint]] = defaultdict(list)
    for point in points:
        grouped[point.operator, point.implementation].append(point)
    compositions: Compositions = defaultdict(dict)
    for (operator, implementation), points_of_one in sorted(grouped.items()):
        if len(points_of_one) >= _LEAST_POINTS:
            known = profile.compositions.get(operator, {}).get(implementation, {})
            compositions[operator][implementation] = _composition(profile, points_of_one, known)
    return dict(compositions)


def fitted(profile: MachineProfile, points: Sequence[MeasuredPoint]) -> MachineProfile:
    """Return a profile with the compositions and corrections that explain the points best.

    What the points do not show, other operators or dtypes, is taken from ``profile``.
    """
    by_itemsize: dict[int, list[MeasuredPoint]] = defaultdict(list)
    for point in points:
        by_itemsize[point.call.itemsize].append(point)
    wide = dataclasses.replace(
        profile,
        compositions=merged(profile.compositions, fit(profile, by_itemsize[2])),
        other_compositions={},
        corrections={},
    )
    by_size = {
        str(itemsize): merged(scaled(wide, points_of_size), fit(profile, points_of_size))
        for itemsize, points_of_size in sorted(by_itemsize.items())
        if itemsize != 2
    }
    others = {**profile.other_compositions, **by_size}
    composed = dataclasses.replace(wide, other_compositions=others)
    return dataclasses.replace(composed, corrections=corrections_of(composed, by_itemsize[2]))


def _composition(
    profile: MachineProfile, points: Sequence[MeasuredPoint], known: Mapping[str, float]
) -> dict[str, float]:
    """Return the factors of one implementation's parts.

    Args:
        known: The factors that are known, of which those count whose part no point has: calls of
            two ranks do not show what a further peer costs.
    """
    parts = [
        point.call.parts_us(profile, point.operator, point.schedule, point.tile) for point in points
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
    fitted_factors = {
        name: float(f"{factor:.4g}")
        for name, factor in zip(names, factors, strict=True)
        if factor > _NEGLIGIBLE
    }
    unseen = [name for name, column in zip(names, matrix.T, strict=True) if not column.any()]
    return {name: known[name] for name in unseen if name in known} | fitted_factors


def least_squares(
    matrix: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the factors, none negative, by which the columns come closest to the values.

    Of the subsets of columns whose unconstrained factors are not negative, the best is the answer,
    and of those that are as good the smallest: columns that values do not tell apart must not share
    a factor, as elsewhere they differ. With eight columns there are 255 subsets.
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), math.inf
    for count in range(1, columns + 1):
        for subset in itertools.combinations(range(columns), count):
            factors, *_ = np.linalg.lstsq(matrix[:, subset], values, rcond=None)
            if (factors < 0).any():
                continue
            error = float(np.sum((matrix[:, subset] @ factors - values) ** 2))
            if error < least * (1 - _AS_GOOD):
                least, best = error, np.zeros(columns)
                best[list(subset)] = factors
    return best


def unseen_choices(
    profile: MachineProfile,
    points: Sequence[MeasuredPoint],
    disturbed: Sequence[MeasuredPoint] = (),
    folds: int = 5,
) -> dict[str, list[tuple[float, float]]]:
    """Return how good choices are at calls that the fit has not seen, by operator.

    The calls are dealt into ``folds`` parts. For each part, the profile is fitted to the others.

    Args:
        disturbed: Points of the same calls that other work has lengthened. They count, but nothing
            is fitted to them.

    Returns:
        For each call the time of the implementation with the shortest predicted time, as a multiple
        of the fastest stock pair's and of the fastest implementation's.
    """
    calls: dict[tuple[str, TimedCall], list[MeasuredPoint]] = defaultdict(list)
    for point in (*points, *disturbed):
        calls[point.operator, point.call].append(point)
    groups, untrusted = list(calls.values()), {*disturbed}
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for fold in range(folds):
        seen = [point for i, group in enumerate(groups) if i % folds != fold for point in group]
        refitted = fitted(profile, [point for point in seen if point not in untrusted])
        for group in groups[fold::folds]:
            declaration = operators()[group[0].operator]
            pairs = [point.us for point in group if declaration.is_pair(point.implementation)]
            chosen = predicted_fastest(refitted, group)
            if chosen is None or not pairs:
                continue
            ratios[declaration.name].append(
                (chosen.us / min(pairs), chosen.us / min(point.us for point in group))
            )
    return dict(ratios)
