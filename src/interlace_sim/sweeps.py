"""Sweeps: every combination of some parameters' values, on all processors, each run once and
remembered.

The memory is a folder of JSON files. A file's name is a hash of the scenario, of the files that the
scenario names, and of the simulator's own source, so a changed preset or model is run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from interlace.cache_folder import write_whole
from interlace.documents import to_json
from interlace.errors import ConfigError
from interlace_sim.machine import find
from interlace_sim.results import csv_text
from interlace_sim.scenario import Scenario

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

Progress = Callable[[int, int], None]
"""Called with the runs that are done and the number of all of them."""

VALUES = ("total_ns", "exposed_ns", "bound_ns", "saved_percent", "events")


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination and its outcome.

    Attributes:
        parameters: The combination.
        saved_percent: Time saved in percent of the scenario with nothing fused; 0 for that one.
        error: Reason for which the combination cannot be run; the figures are 0 then.
        cached: Whether the outcome was remembered.
    """

    parameters: dict[str, Any]
    total_ns: int = 0
    exposed_ns: int = 0
    bound_ns: int = 0
    saved_percent: float = 0.0
    events: int = 0
    error: str = ""
    cached: bool = False


def sweep(
    base: Scenario,
    parameters: Mapping[str, Sequence[Any]],
    *,
    workers: int | None = None,
    cache_folder: Path | None = None,
    progress: Progress | None = None,
) -> list[Point]:
    """Run every combination of the parameters' values, the last parameter varying fastest.

    Args:
        parameters: Name -> values; names as in :meth:`interlace_sim.scenario.Scenario.change`.
        base: The scenario whose parameters vary.
        workers: Number of processes; None is all processors, 1 runs in this process.
        cache_folder: Folder of remembered outcomes; None remembers nothing.
        progress: Called after every run.

    Raises:
        ConfigError: a parameter does not exist, or has no values.
    """
    for name, values in parameters.items():
        if not values:
            raise ConfigError(f"parameter {name} must have values; got none. Say {name}=A,B.")
    combinations = [
        dict(zip(parameters, values, strict=True))
        for values in itertools.product(*parameters.values())
    ]
    scenarios = [base.change(combination).complete() for combination in combinations]
    # Every point needs its unfused twin for the saving; twins that coincide run once.
    unfused = [dataclasses.replace(scenario, fused="none") for scenario in scenarios]
    every = list(dict.fromkeys([*scenarios, *unfused]))
    outcomes = run_all(every, workers, cache_folder, progress)
    points = []
    for combination, scenario, plain in zip(combinations, scenarios, unfused, strict=True):
        outcome, reference = outcomes[scenario], outcomes[plain]
        error = outcome.get("error") or reference.get("error") or ""
        if error:
            points.append(Point(combination, error=error))
            continue
        total = reference["total_ns"]
        saved = 100 * (1 - outcome["total_ns"] / total) if total else 0.0
        points.append(
            Point(
                combination,
                outcome["total_ns"],
                outcome["exposed_ns"],
                outcome["bound_ns"],
                saved,
                outcome["events"],
                cached=outcome["cached"],
            )
        )
    return points


def run_all(
    scenarios: Sequence[Scenario],
    workers: int | None,
    folder: Path | None,
    progress: Progress | None = None,
) -> dict[Scenario, dict[str, Any]]:
    """Run every scenario once and return its figures; scenarios must be complete."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the cache {folder} must be a folder that can be written; {error.strerror}. Name "
                "another, or use no cache."
            ) from error
    figures: dict[Scenario, dict[str, Any]] = {}
    for scenario in scenarios:
        remembered = _recall(folder, scenario)
        if remembered is not None:
            figures[scenario] = {**remembered, "cached": True}
    left = [scenario for scenario in scenarios if scenario not in figures]
    outcomes = map_processes(run_one, left, workers, progress)
    for scenario, outcome in zip(left, outcomes, strict=True):
        figures[scenario] = {**outcome, "cached": False}
        _remember(folder, scenario, outcome)
    return figures


def map_processes(
    function: Callable[[Item], Outcome],
    items: Sequence[Item],
    workers: int | None,
    progress: Progress | None = None,
) -> Iterator[Outcome]:
    """Call a function on every item, in several processes, and yield the outcomes in order.

    Args:
        function: A function of a module, which processes can import.
        items: Its arguments.
        workers: Number of processes; None is all processors, 1 runs in this process.
        progress: Called before the first outcome and after each.
    """
    count = min(len(items), workers or os.cpu_count() or 1)
    with contextlib.ExitStack() as stack:
        outcomes: Iterator[Outcome] = map(function, items)
        if count > 1:
            # Spawned and not forked: a caller may hold threads and locks, of torch for instance.
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(
                ProcessPoolExecutor(count, mp_context=context, initializer=_end_when_interrupted)
            )
            # Chunks save messages, and four per process keep the processes evenly busy.
            outcomes = pool.map(function, items, chunksize=max(1, len(items) // (4 * count)))
        report = progress or (lambda done, total: None)
        report(0, len(items))
        for number, outcome in enumerate(outcomes):
            report(number + 1, len(items))
            yield outcome


def _end_when_interrupted() -> None:
    # A process that turned Ctrl-C into an exception of its item would go on with the next item,
    # and the caller waits for that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_one(scenario: Scenario) -> dict[str, Any]:
    """Simulate a scenario and return its figures, or its error if it cannot be run."""
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
    """Hash every file of this package that a result depends on."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    costs = root.parent / "costs"
    for file in sorted([*root.rglob("*.py"), *costs.rglob("*.py"), *costs.rglob("*.json")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _key(scenario: Scenario) -> str:
    digest = hashlib.sha256(_source_hash().encode())
    digest.update(json.dumps(dataclasses.asdict(scenario), sort_keys=True).encode())
    # Presets and files are hashed by contents, so that an edited file is run again.
    for folder, name in (("machines", scenario.machine), (scenario.kind, scenario.model)):
        if name:
            try:
                digest.update(find(folder, name).read_bytes())
            except OSError:
                # The run itself will say what is wrong with the file.
                digest.update(b"?")
    return digest.hexdigest()[:32]


def _recall(folder: Path | None, scenario: Scenario) -> dict[str, Any] | None:
    if folder is None:
        return None
    try:
        document = json.loads((folder / f"{_key(scenario)}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    # A file that a full disk cut short, or that was edited, is run again.
    is_whole = isinstance(document, dict) and all(
        type(document.get(name)) is int for name in ("total_ns", "exposed_ns", "bound_ns", "events")
    )
    return document if is_whole else None


def _remember(folder: Path | None, scenario: Scenario, outcome: dict[str, Any]) -> None:
    if folder is None or "error" in outcome:
        return
    # What cannot be remembered, in a folder that may only be read, is run again.
    with contextlib.suppress(OSError):
        write_whole(folder / f"{_key(scenario)}.json", to_json(outcome))


def to_csv(points: Sequence[Point]) -> str:
    """Return the points as CSV, one line per combination."""
    names = list(points[0].parameters) if points else []
    return csv_text(
        [*names, *VALUES, "error"],
        (
            [
                *(point.parameters[name] for name in names),
                point.total_ns,
                point.exposed_ns,
                point.bound_ns,
                f"{point.saved_percent:.3f}",
                point.events,
                point.error,
            ]
            for point in points
        ),
    )


def parse_parameter(text: str) -> tuple[str, list[Any]]:
    """Parse a parameter and its values: ``"nodes=16,32"`` is ``("nodes", [16, 32])``.

    Raises:
        ConfigError: the text does not have that form.
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
    # Booleans are written as in YAML.
    return {"true": True, "false": False}.get(stripped.lower(), stripped)
