"""Make a machine's profile of what was measured on it, and say how far off its predictions are.

``interlace tune machine`` measures rates (:mod:`interlace.comm.groups.machine_rates`) and calls of
every operator. What the short stay cannot tell, how an implementation composes its time, is taken
from the profile that is known, and scaled. :mod:`interlace.costs.time` says what a composition is.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from interlace.bench.report import PAIR_NAMES, is_disturbed, role_of
from interlace.costs.product_fit import MeasuredRates, with_rates
from interlace.costs.time import (
    Corrections,
    MachineProfile,
    Schedule,
    SizedCall,
    TimedCall,
    place_of,
)
from interlace.gemm.operator import GemmOperator
from interlace.gemm.terms import Terms
from interlace.registry import find_operator

_TRUSTED = 12
"""How many calls the known compositions count as much as. The H200's choose well on H100s as they
are (decision 0019), better than with the ratios of five calls of each implementation.
"""


def profile_from(
    start: MachineProfile,
    gpu: str,
    processors: int,
    rates: MeasuredRates,
    results: Sequence[Mapping[str, Any]],
    source: str,
) -> MachineProfile:
    """Return the profile that measurements show.

    Args:
        start: What is known before: the GPU's own profile, or a guess.
        gpu: The GPU's name, as ``torch.cuda.get_device_name`` has it.
        processors: Its number of streaming multiprocessors.
        rates: Rates of products and links.
        results: Results of calls, as those of :func:`interlace.bench.sweep.bench`.
        source: Where and when it was measured.
    """
    machine = with_rates(start, gpu, processors, rates, source)
    machine = dataclasses.replace(machine, is_guess=False)
    points = points_of([{"results": results}])
    compositions = merged(machine.compositions, scaled(machine, points, _TRUSTED))
    composed = dataclasses.replace(machine, compositions=compositions)
    return dataclasses.replace(composed, corrections=corrections_of(composed, points))


@dataclasses.dataclass(frozen=True)
class MeasuredPoint:
    """The measured time of one implementation at one call.

    Attributes:
        tile: Rows and columns of the fused kernel's tiles, by its configuration.
        us: Median time in microseconds.
    """

    operator: str
    implementation: str
    call: TimedCall
    schedule: Schedule
    tile: tuple[int, int]
    us: float

    def predicted_us(self, profile: MachineProfile) -> float | None:
        """Return what a profile says of this time; None if it does not know the implementation."""
        return profile.predict_us(
            self.operator, self.implementation, self.call, self.schedule, self.tile
        )


def points_of(
    documents: Iterable[Mapping[str, Any]], *, with_disturbed: bool = False
) -> list[MeasuredPoint]:
    """Return the measured points of results that ``interlace bench`` wrote.

    Results of other operators are passed over, and so are times of implementations that no operator
    has, as of ``"pushed_with_signals"``.

    Args:
        with_disturbed: Whether times that other work on the machine has lengthened are points, too,
            to which nothing should be fitted.
    """
    points = []
    for document in documents:
        for result in document["results"]:
            declaration = find_operator(str(result.get("operator")))
            if declaration is None or "splits" in result:
                continue
            call, tile = declaration.timed_call(result), None
            implementations = declaration.implementations
            if isinstance(declaration, GemmOperator):
                if not set(declaration.sizes) <= result.keys():
                    continue
                rows, columns, inner = (int(result[name]) for name in declaration.sizes)
                dtype, ranks = str(result["dtype"]), int(result["world_size"])
                w_along_k = bool(result.get("w_along_k", True))
                call = dataclasses.replace(
                    SizedCall.of_dtype(dtype, rows, columns, inner, ranks, w_along_k=w_along_k),
                    has_block_scales=bool(result.get("has_block_scales")),
                )
                tile = tile_of(str(result["config"]))
                # Nothing is fitted where nothing is predicted: by kernels for few rows, with more
                # rows or with a weight that they copy.
                terms = dataclasses.replace(
                    Terms.of_sizes(rows, columns, getattr(torch, dtype), "cuda", ranks),
                    w_along_k=w_along_k,
                )
                implementations = tuple(
                    implementation
                    for implementation in implementations
                    if implementation.is_predictable(terms)
                )
            if call is None:
                continue
            if int(result["world_size"]) == 1:
                # One rank exchanges nothing, so its pair says nothing of others.
                implementations = tuple(
                    implementation
                    for implementation in implementations
                    if not declaration.is_pair(implementation.name)
                )
            for implementation in implementations:
                name = implementation.name
                us = _time_of(name, result.get("times", {}), with_disturbed)
                if us is not None:
                    kind = declaration.name, name, call, implementation.schedule
                    own_tile = tile or declaration.timed_tile(name, call)
                    points.append(MeasuredPoint(*kind, own_tile, us))
    return points


def _time_of(
    impl: str, times: Mapping[str, Mapping[str, Any]], with_disturbed: bool
) -> float | None:
    """Return the shortest median by which an implementation was measured, in microseconds; None if
    it was not, or only while the machine had other work.

    A stock pair is also known by its display name, which is all that older results say of it.

    Args:
        impl: Its name in the result.
        with_disturbed: Whether times count that were measured while the machine had other work.
    """
    times_us = [
        float(time["median_us"])
        for name, time in times.items()
        if (role_of(time)[1] == impl or name == PAIR_NAMES.get(impl))
        and (with_disturbed or not is_disturbed(time))
    ]
    return min(times_us, default=None)


def tile_of(config: str) -> tuple[int, int]:
    """Return ``block_m`` and ``block_n`` of a configuration's text, 128 and 256 if it has none."""
    named = dict(re.findall(r"(block_[mn])=(\d+)", config))
    return int(named.get("block_m", 128)), int(named.get("block_n", 256))


Compositions = dict[str, dict[str, dict[str, float]]]
"""Factors of the parts of a time, by operator, implementation and part."""


def merged(
    first: Mapping[str, Mapping[str, Mapping[str, float]]], second: Compositions
) -> Compositions:
    """Return the compositions of both, those of ``second`` where both have one."""
    merged: Compositions = {}
    for operator in sorted({*first, *second}):
        both = {**first.get(operator, {}), **second.get(operator, {})}
        merged[operator] = {name: dict(factors) for name, factors in both.items()}
    return merged


def scaled(
    profile: MachineProfile, points: Sequence[MeasuredPoint], trusted: int = 1
) -> Compositions:
    """Return the profile's compositions with the mean of the points' times, by operator and
    implementation.

    A composition has up to eight factors, more than a few calls can tell, so all of them are scaled
    alike, by the geometric mean of measured / composed, drawn to 1.

    Args:
        trusted: How far the ratio is drawn to 1: as if so many further ratios were 1.
    """
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for point in points:
        us = point.predicted_us(profile)
        if us is not None:
            ratios[point.operator, point.implementation].append(math.log(point.us / us))
    compositions: Compositions = defaultdict(dict)
    for (operator, name), logarithms in ratios.items():
        scale = math.exp(math.fsum(logarithms) / (len(logarithms) + trusted))
        compositions[operator][name] = {
            part: float(f"{factor * scale:.4g}")
            for part, factor in profile.compositions[operator][name].items()
        }
    return dict(compositions)


def corrections_of(
    profile: MachineProfile, points: Sequence[MeasuredPoint]
) -> dict[str, Corrections]:
    """Return by how much measured times differ from composed ones, as weights of the calls.

    The logarithms of measured / composed are taken for a smooth function of the sizes plus a
    deviation of each call's own that is as large (Gaussian-process regression with the nearness of
    calls as kernel). So a call that differs from its neighbours says little of others.

    Args:
        profile: The compositions, without corrections.
    """
    grouped: dict[tuple[str, str], dict[TimedCall, float]] = defaultdict(dict)
    for point in points:
        composed_us = point.predicted_us(profile)
        if composed_us is not None:
            ratio = math.log(point.us / composed_us)
            grouped[point.operator, point.implementation][point.call] = ratio
    corrections = {}
    for operator in sorted({operator for operator, _ in grouped}):
        by_implementation = {
            name: ratios for (measured, name), ratios in grouped.items() if measured == operator
        }
        calls = sorted(
            {call for ratios in by_implementation.values() for call in ratios},
            key=lambda call: call.size,
        )
        weights = {}
        for implementation, ratios in sorted(by_implementation.items()):
            by_call = dict(zip(ratios, _weights(ratios), strict=True))
            weights[implementation] = [by_call.get(call, 0.0) for call in calls]
        corrections[operator] = Corrections([call.size for call in calls], weights)
    return corrections


def _weights(ratios: Mapping[TimedCall, float]) -> list[float]:
    """Return the weight of each call in the mean of the Gaussian process through the ratios."""
    positions = np.array([place_of(call.size) for call in ratios])
    distances = ((positions[:, None] - positions[None]) ** 2).sum(axis=-1)
    covariance = np.exp(-distances / 2) + np.eye(len(positions))
    weights = np.linalg.solve(covariance, np.array(list(ratios.values())))
    return [round(float(weight), 4) for weight in weights]


def errors(profile: MachineProfile, points: Iterable[MeasuredPoint]) -> list[float]:
    """Return ``predicted / measured`` of every point whose implementation has a composition, as if
    no call were known by its own time.
    """
    composed, ratios = dataclasses.replace(profile, corrections={}), []
    for point in points:
        us = point.predicted_us(composed)
        if us is None:
            continue
        corrections = profile.corrections.get(point.operator)
        if corrections is not None and point.call.itemsize == 2:
            us *= corrections.common_factor(point.implementation, point.call)
        ratios.append(us / point.us)
    return ratios


def deviations(
    profile: MachineProfile, points: Sequence[MeasuredPoint]
) -> dict[tuple[str, str], list[float]]:
    """Return how far a profile is from each measured time, as a share of it, in ascending order, by
    operator and implementation, in the profile's order.
    """
    found = {
        (operator, name): sorted(
            abs(ratio - 1)
            for ratio in errors(
                profile,
                [
                    point
                    for point in points
                    if (point.operator, point.implementation) == (operator, name)
                ],
            )
        )
        for operator, implementations in profile.compositions.items()
        for name in implementations
    }
    # What was not measured comes from the profile that a fit began with.
    return {key: wrong for key, wrong in found.items() if wrong}
