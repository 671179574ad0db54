"""Tuned tables as files: what ``interlace tune`` writes and ``interlace.tuning`` reads.

``{"machine": {...}, "operator": str, "entries": [...]}``, an entry being one measured point:
world_size, dtype and the operator's sizes; impl; config, empty if there is no kernel to configure;
fused_us, chunked_us and the like where measured, unfused_us (the fastest unfused pair) and unfused
(its name).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace.bench.report import fastest_impl, impl_times, own_impls, summarise
from interlace.documents import read_json
from interlace.errors import ArgumentError
from interlace.registry import operator_named


def entry(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table's entry for one benchmark result."""
    summary, operator = summarise(result), operator_named(str(result["operator"]))
    times = impl_times(result)
    return {
        **{name: result[name] for name in ("world_size", "dtype", *operator.sizes)},
        "impl": fastest_impl(result)[0],
        "config": result["config"],
        **{f"{impl}_us": times[impl] for impl in own_impls(result)},
        "unfused_us": summary.unfused[1],
        "unfused": summary.unfused[0],
    }


def read(file: Path, operator: str) -> dict[str, Any] | None:
    """Read the table in ``file``; return None if there is no such file.

    Raises:
        ArgumentError: the file is not a tuned table of this operator.
    """
    if not file.exists():
        return None
    table = read_json(file, "a tuned table or not exist")
    if (
        not isinstance(table, dict)
        or table.get("operator") != operator
        or not isinstance(table.get("entries"), list)
    ):
        raise ArgumentError(
            f"{file} must be a tuned table of {operator}; it is not. Name another file."
        )
    return table


def merge(
    old_table: Mapping[str, Any] | None,
    operator: str,
    machine: Mapping[str, Any],
    entries: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return a sorted table with ``entries``, and with those of ``old_table`` at other points.

    ``machine`` is the newest measurement's.

    Raises:
        ArgumentError: ``old_table`` is another GPU's.
    """
    # Times of different GPUs cannot be compared, so a table has entries of one kind only.
    if old_table is not None:
        gpus, old_gpus = set(machine.get("gpus", [])), set(old_table["machine"].get("gpus", []))
        if gpus and old_gpus and gpus != old_gpus:
            raise ArgumentError(
                f"a tuned table must be of one kind of GPU; got {', '.join(sorted(gpus))} for a "
                "table of "
                f"{', '.join(sorted(old_gpus))}. Name another file."
            )
    points = {
        _point(item, operator): item
        for item in [*(old_table["entries"] if old_table else []), *entries]
    }
    return {
        "machine": dict(machine),
        "operator": operator,
        "entries": [points[point] for point in sorted(points)],
    }


def _point(item: Mapping[str, Any], operator: str) -> tuple[Any, ...]:
    return (
        int(item["world_size"]),
        str(item["dtype"]),
        *(int(item[name]) for name in operator_named(operator).sizes),
    )
