"""Calibration: a machine file fitted to measurements, with its error on points held out of the fit.

Measurements are read from one or several JSON files:

- matrix products: lists of ``{"m", "n", "k", "us"}`` under any key (two bytes per element);
- collectives: lists of ``{"op", "gpus", "bytes", "us"}`` under any key;
- documents that ``interlace bench gemv_all_reduce --json`` wrote: only their cuBLAS times.

Every fourth point, by order, is held out. Computation is fitted as
:class:`interlace_sim.machine.Gpu` models it; a collective's time as launch, steps and bytes over a
share of the links' bandwidth.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from interlace.errors import ConfigError
from interlace_sim.collectives import least_sent_bytes
from interlace_sim.configfile import integer, mapped, number, read
from interlace_sim.machine import Machine

HOLD_OUT = 4
_PARAMETERS = ("flops_efficiency", "memory_efficiency", "kernel_ns", "roofline_norm")


@dataclasses.dataclass(frozen=True)
class Product:
    """A measured matrix product with two bytes per element."""

    m: int
    n: int
    k: int
    ns: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def memory_bytes(self) -> float:
        return 2.0 * (self.m * self.k + self.n * self.k + self.m * self.n)


@dataclasses.dataclass(frozen=True)
class Timing:
    """A measured collective of ``size`` bytes on each of ``gpus`` GPUs."""

    kind: str
    gpus: int
    size: int
    ns: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted values, and the relative errors of their predictions on points that were held out.

    Attributes:
        quantity: ``"matrix products"`` or ``"collectives"``.
        values: Fitted values by their key in a machine file.
        points: Number of points that the fit used.
        held_out: Number of points that the errors come from.
    """

    quantity: str
    values: dict[str, float]
    points: int
    held_out: int
    mean_error: float
    median_error: float
    worst_error: float


Point = TypeVar("Point", Product, Timing)


def read_measurements(files: Sequence[Path]) -> tuple[list[Product], list[Timing]]:
    """Read all products and collectives of some files.

    Raises:
        ConfigError: a file has neither, or a value that no measurement has.
    """
    products: list[Product] = []
    timings: list[Timing] = []
    for file in files:
        document = read(file)
        before = len(products) + len(timings)
        if isinstance(document, dict) and isinstance(document.get("results"), list):
            products += _bench(document["results"], f"{file}, results")
        # Keys are free, so that users may add notes and name their measurements.
        for key, items in document.items() if isinstance(document, dict) else ():
            if isinstance(items, list) and items and isinstance(items[0], dict):
                locations = [f"{file}, {str(key)[:60]}[{place}]" for place in range(len(items))]
                if {"m", "n", "k", "us"} <= items[0].keys():
                    products += map(_product, items, locations)
                elif {"op", "gpus", "bytes", "us"} <= items[0].keys():
                    timings += map(_timing, items, locations)
        if len(products) + len(timings) == before:
            raise ConfigError(
                f"{file} must have lists of m, n, k, us or of op, gpus, bytes, us, or be a bench "
                "document; it has none."
            )
    return products, timings


def _product(item: Any, location: str) -> Product:
    values = mapped(item, location)
    m, n, k = (integer(values.get(name), f"{location}.{name}", least=1) for name in "mnk")
    return Product(m, n, k, _ns(values.get("us"), location))


def _timing(item: Any, location: str) -> Timing:
    values = mapped(item, location)
    return Timing(
        _kind(values.get("op"), location),
        integer(values.get("gpus"), f"{location}.gpus", least=2, most=2**20),
        integer(values.get("bytes"), f"{location}.bytes", least=1),
        _ns(values.get("us"), location),
    )


def _ns(us: Any, location: str) -> float:
    return 1e3 * number(us, f"{location}: microseconds", least=1e-3, most=1e15)


def _kind(name: Any, source: str) -> str:
    plain = str(name).replace("alltoall", "all_to_all")
    if plain not in ("all_to_all", "all_reduce", "reduce_scatter", "all_gather"):
        raise ConfigError(
            f"{source}: op must be all_to_all, all_reduce, reduce_scatter or all_gather; got "
            f"{name!r}."
        )
    return plain


def _bench(results: list[Any], source: str) -> list[Product]:
    products = []
    for place, item in enumerate(results):
        location = f"{source}[{place}]"
        result = mapped(item, location)
        times = mapped(result.get("times", {}), f"{location}.times")
        # The library's time is the better of its two routines for few rows.
        alone = min(
            (
                _ns(mapped(times[name], f"{location}.times").get("median_us"), location)
                for name in ("cuBLAS mm alone", "cuBLAS mv alone")
                if name in times
            ),
            default=None,
        )
        if alone is not None and {"rows", "columns", "inner"} <= result.keys():
            m, n, k = (
                integer(result[name], f"{location}.{name}", least=1)
                for name in ("rows", "columns", "inner")
            )
            products.append(Product(m, n, k, alone))
    return products


def fit_products(products: Sequence[Product], flops_per_s: float, memory_bytes_per_s: float) -> Fit:
    """Fit the four figures of the roofline of :class:`interlace_sim.machine.Gpu`.

    Raises:
        ConfigError: there are too few points to fit and to check.
    """
    if len(products) < 2 * HOLD_OUT:
        raise ConfigError(
            f"a fit must have at least {2 * HOLD_OUT} matrix products; got {len(products)}. "
            "Measure more."
        )

    def predict(parameters: np.ndarray, points: Sequence[Product]) -> np.ndarray:
        # Shares are fitted through a logistic and times through an exponential, so that the search
        # is unbounded and the values stay possible.
        flops_share, memory_share = (
            1 / (1 + np.exp(-parameters[0])),
            1 / (1 + np.exp(-parameters[1])),
        )
        kernel, norm = np.exp(parameters[2]), 1 + np.exp(parameters[3])
        compute = np.array([p.flops for p in points]) * 1e9 / (flops_per_s * flops_share)
        memory = (
            np.array([p.memory_bytes for p in points]) * 1e9 / (memory_bytes_per_s * memory_share)
        )
        larger, smaller = np.maximum(compute, memory), np.minimum(compute, memory)
        return np.asarray(kernel + larger * (1 + (smaller / larger) ** norm) ** (1 / norm))

    def values(best: np.ndarray) -> dict[str, float]:
        shares = (1 / (1 + math.exp(-x)) for x in best[:2])
        fitted = (*shares, math.exp(best[2]), 1 + math.exp(best[3]))
        return dict(zip(_PARAMETERS, fitted, strict=True))

    start = np.array([1.0, 1.5, math.log(3000.0), 0.5])
    return _fit("matrix products", products, predict, start, values)


def steps(kind: str, gpus: int) -> int:
    """Return the dependent steps of the library's algorithm: a ring's, or 1 for an all-to-all."""
    return {"all_to_all": 1, "all_reduce": 2 * (gpus - 1)}.get(kind, gpus - 1)


def fit_collectives(timings: Sequence[Timing], link_bytes_per_s: float) -> Fit:
    """Fit a launch and a step time for all collectives, and a share of the bandwidth per kind.

    Raises:
        ConfigError: there are too few points.
    """
    # Launch and steps belong to the library, so all collectives share them; the algorithms differ
    # in the share of the bandwidth.
    kinds = sorted({t.kind for t in timings})
    if len(timings) < 2 * HOLD_OUT * len(kinds):
        raise ConfigError(
            f"a fit must have at least {2 * HOLD_OUT} timings of each collective; got "
            f"{len(timings)} of {len(kinds)}. Measure more."
        )

    def predict(parameters: np.ndarray, points: Sequence[Timing]) -> np.ndarray:
        launch, step = np.exp(parameters[0]), np.exp(parameters[1])
        share = dict(zip(kinds, 1 / (1 + np.exp(-parameters[2:])), strict=True))
        return np.array(
            [
                launch
                + step * steps(t.kind, t.gpus)
                + 1e9
                * least_sent_bytes(t.kind, t.size, t.gpus)
                / (link_bytes_per_s * share[t.kind])
                for t in points
            ]
        )

    def values(best: np.ndarray) -> dict[str, float]:
        return {
            "launch_ns": math.exp(best[0]),
            "step_ns": math.exp(best[1]),
            **{
                f"efficiency_of.{kind}": float(1 / (1 + math.exp(-x)))
                for kind, x in zip(kinds, best[2:], strict=True)
            },
        }

    start = np.array([math.log(8000.0), math.log(600.0), *([1.0] * len(kinds))])
    return _fit("collectives", timings, predict, start, values)


def _fit(
    quantity: str,
    points: Sequence[Point],
    predict: Callable[[np.ndarray, Sequence[Point]], np.ndarray],
    start: np.ndarray,
    values: Callable[[np.ndarray], dict[str, float]],
) -> Fit:
    """Fit a model's parameters to three of four points, and check them on the fourth."""
    # Every fourth point, so that sizes from small to large are held out.
    unseen = list(points[HOLD_OUT - 1 :: HOLD_OUT])
    seen = [point for number, point in enumerate(points) if number % HOLD_OUT != HOLD_OUT - 1]
    measured = np.array([point.ns for point in seen])

    # The loss is the mean error of logarithms: relative errors count alike at all sizes, and
    # outliers less than in squares.
    def loss(parameters: np.ndarray) -> float:
        return float(np.mean(np.abs(np.log(predict(parameters, seen) / measured))))

    best = minimise(loss, start)
    errors = np.abs(predict(best, unseen) / np.array([point.ns for point in unseen]) - 1)
    return Fit(
        quantity,
        values(best),
        len(seen),
        len(errors),
        float(errors.mean()),
        float(np.median(errors)),
        float(errors.max()),
    )


def minimise(
    loss: Callable[[np.ndarray], float], start: np.ndarray, rounds: int = 1500
) -> np.ndarray:
    """Nelder and Mead's simplex, restarted once around the best point; deterministic."""
    best = start
    for scale in (0.5, 0.1):
        best = _simplex(loss, best, scale, rounds)
    return best


def _simplex(
    loss: Callable[[np.ndarray], float], start: np.ndarray, scale: float, rounds: int
) -> np.ndarray:
    corners = [start, *(start + scale * row for row in np.eye(len(start)))]
    values = [loss(corner) for corner in corners]
    for _ in range(rounds):
        order = np.argsort(values, kind="stable")
        corners, values = [corners[i] for i in order], [values[i] for i in order]
        if values[-1] - values[0] < 1e-9:
            break
        middle = np.mean(corners[:-1], axis=0)
        mirrored = 2 * middle - corners[-1]
        # Nelder and Mead's simplex (1965): mirror the worst corner; go further if that is best,
        # halfway if it is worst, else shrink all corners to the best.
        value = loss(mirrored)
        if value < values[0]:
            far = 3 * middle - 2 * corners[-1]
            far_value = loss(far)
            corners[-1], values[-1] = (far, far_value) if far_value < value else (mirrored, value)
        elif value < values[-2]:
            corners[-1], values[-1] = mirrored, value
        else:
            near = (middle + corners[-1]) / 2
            near_value = loss(near)
            if near_value < values[-1]:
                corners[-1], values[-1] = near, near_value
            else:
                corners = [corners[0], *((corner + corners[0]) / 2 for corner in corners[1:])]
                values = [values[0], *(loss(corner) for corner in corners[1:])]
    return corners[int(np.argmin(values))]


def machine_document(
    base: Machine, fits: Sequence[Fit], source: str, name: str, gpus: int = 4
) -> dict[str, Any]:
    """Return the base machine with the fitted values, as a YAML file has it.

    A fitted step contains the links' latency, which the simulator adds by itself, and the time of
    the reduction.

    Args:
        base: Machine of the values that were not fitted.
        fits: Fitted values.
        source: Source of the measurements.
        name: The machine's name.
        gpus: GPUs of the measured collectives; the base's network between them has the latency.
    """
    # The simulator adds the links' latency to each step by itself, so it must not count twice.
    latency = base.build_topology(gpus).path_latency_ns(0, 1)
    document: dict[str, Any] = base.model_dump(exclude_none=True)
    document["name"] = name
    document["note"] = "Written by interlace sim calibrate; " + " ".join(
        f"{fit.quantity}: {100 * fit.mean_error:.1f} % mean, {100 * fit.median_error:.1f} % median "
        f"error on {fit.held_out} held-out points."
        for fit in fits
    )
    for fit in fits:
        part = document["gpu" if fit.quantity == "matrix products" else "collectives"]
        # A profile would time the products instead of the fitted values.
        part.pop("profile", None)
        for key, value in fit.values.items():
            if key == "step_ns":
                value = max(0.0, value - latency)
                part["reduction"] = {
                    "value": 0.0,
                    "source": "held by the fitted efficiencies",
                    "confidence": "derived",
                }
            sourced = {
                "value": float(f"{value:.4g}"),
                "source": f"fit to {fit.points} points of {source}",
                "confidence": "measured",
            }
            head, _, kind = key.partition(".")
            if kind:
                part.setdefault(head, {})[kind] = sourced
            else:
                part[head] = sourced
    return document


def to_yaml(document: dict[str, Any]) -> str:
    """Return a machine document as the text of a YAML file."""
    return yaml.safe_dump(document, sort_keys=False, width=120)
