"""Many scenarios: every combination of some parameters' values, on all processors, each run once
and remembered.

The memory is a folder of JSON files named by a hash of the scenario, of the files that it names,
and of the simulator's own source; so a changed preset or model is run again, and nothing else is.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import itertools
import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from interlace.errors import ConfigError
from interlace.sim.machine import find
from interlace.sim.scenario import Scenario

VALUES = ("total_ns", "exposed_ns", "bound_ns", "saved_percent", "events")


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination and its outcome.

    Attributes:
        saved_percent: of the time of the same scenario with nothing fused; 0 for that one.
        error: why this combination cannot be run; the figures are 0 then.
    """

    parameters: dict[str, Any]
    total_ns: int = 0
    exposed_ns: int = 0
    bound_ns: int = 0
    saved_percent: float = 0.0
    events: int = 0
    error: str = ""
    cached: bool = False


def default_cache() -> Path:
    """Under the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "interlace" / "sim"


def sweep(
    base: Scenario,
    parameters: Mapping[str, Sequence[Any]],
    *,
    workers: int | None = None,
    cache_folder: Path | None = None,
) -> list[Point]:
    """Run every combination, the last parameter varying fastest.

    Args:
        parameters: name -> values; names as in :meth:`interlace.sim.scenario.Scenario.change`.
        workers: processes; None is all processors, 1 runs here.
        cache_folder: where outcomes are remembered; None forgets them.

    Raises:
        ConfigError: a parameter that does not exist, or without values.
    """
    for name, values in parameters.items():
        if not values:
            raise ConfigError(f"parameter {name} must have values; got none. Say {name}=A,B.")
    combinations = [
        dict(zip(parameters, values, strict=True))
        for values in itertools.product(*parameters.values())
    ]
    scenarios = [base.change(combination).complete() for combination in combinations]
    unfused = [dataclasses.replace(scenario, fused="none") for scenario in scenarios]
    outcomes = run_all(list(dict.fromkeys([*scenarios, *unfused])), workers, cache_folder)
    points = []
    for combination, scenario, plain in zip(combinations, scenarios, unfused, strict=True):
        mine, other = outcomes[scenario], outcomes[plain]
        error = mine.get("error") or other.get("error") or ""
        if error:
            points.append(Point(combination, error=error))
            continue
        saved = 100 * (1 - mine["total_ns"] / other["total_ns"]) if other["total_ns"] else 0.0
        points.append(
            Point(
                combination,
                mine["total_ns"],
                mine["exposed_ns"],
                mine["bound_ns"],
                saved,
                mine["events"],
                cached=mine["cached"],
            )
        )
    return points


def run_all(
    scenarios: Sequence[Scenario], workers: int | None, folder: Path | None
) -> dict[Scenario, dict[str, Any]]:
    """Every scenario's figures, each run once; scenarios must be complete."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the cache {folder} must be a folder that can be written; {error.strerror}. Name "
                "another, or use no cache."
            ) from error
    found: dict[Scenario, dict[str, Any]] = {}
    for scenario in scenarios:
        remembered = _recall(folder, scenario)
        if remembered is not None:
            found[scenario] = {**remembered, "cached": True}
    left = [scenario for scenario in scenarios if scenario not in found]
    count = min(len(left), workers or os.cpu_count() or 1)
    if count > 1:
        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
            outcomes = list(pool.map(run_one, left, chunksize=max(1, len(left) // (4 * count))))
    else:
        outcomes = [run_one(scenario) for scenario in left]
    for scenario, outcome in zip(left, outcomes, strict=True):
        found[scenario] = {**outcome, "cached": False}
        _remember(folder, scenario, outcome)
    return found


def run_one(scenario: Scenario) -> dict[str, Any]:
    """A scenario's figures; or, where it cannot be run, why."""
    try:
        result = scenario.simulate()
    except ConfigError as error:
        return {"error": str(error)}
    return {
        "total_ns": result.total_ns,
        "exposed_ns": result.exposed_ns,
        "bound_ns": round(result.bound.time_ns),
        "events": result.events,
    }


@cache
def _source_hash() -> str:
    """Of everything that a result depends on in this package."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*root.rglob("*.py"), *(root.parent / "costs").rglob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _key(scenario: Scenario) -> str:
    digest = hashlib.sha256(_source_hash().encode())
    digest.update(json.dumps(dataclasses.asdict(scenario), sort_keys=True).encode())
    for folder, name in (("machines", scenario.machine), (scenario.kind, scenario.model)):
        if name:
            try:
                digest.update(find(folder, name).read_bytes())
            except OSError:
                digest.update(b"?")  # the run will say what is wrong with it
    return digest.hexdigest()[:32]


def _recall(folder: Path | None, scenario: Scenario) -> dict[str, Any] | None:
    if folder is None:
        return None
    try:
        found = json.loads((folder / f"{_key(scenario)}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "total_ns" in found else None


def _remember(folder: Path | None, scenario: Scenario, outcome: dict[str, Any]) -> None:
    if folder is None or "error" in outcome:
        return
    file = folder / f"{_key(scenario)}.json"
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(outcome), encoding="utf-8")
    part.replace(file)  # whole or not at all


def to_csv(points: Sequence[Point]) -> str:
    """One line per combination."""
    names = list(points[0].parameters) if points else []
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *VALUES, "error"])
    for point in points:
        figures = [
            point.total_ns,
            point.exposed_ns,
            point.bound_ns,
            f"{point.saved_percent:.3f}",
            point.events,
        ]
        writer.writerow([*(point.parameters[name] for name in names), *figures, point.error])
    return out.getvalue()


def parse_parameter(text: str) -> tuple[str, list[Any]]:
    """``"nodes=16,32"`` -> ``("nodes", [16, 32])``; numbers where they are numbers.

    Raises:
        ConfigError: it is not of that form.
    """
    name, sign, values = text.partition("=")
    if not sign or not name or not values:
        raise ConfigError(
            f"a parameter must be NAME=VALUE,VALUE; got {text!r}. Say nodes=16,32,64."
        )
    return name.strip().replace("-", "_") if "." not in name else name.strip(), [
        parse_value(value) for value in values.split(",")
    ]


def parse_value(text: str) -> Any:
    """A number, a truth value, or the text itself."""
    stripped = text.strip()
    for kind in (int, float):
        try:
            return kind(stripped)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(stripped.lower(), stripped)
