"""Tuned tables as files: what ``interlace tune`` writes and ``interlace.tuning`` reads.

``{"machine": {...}, "operator": str, "entries": [...]}``, an entry being one measured point:
world_size, dtype and the operator's sizes; impl; otherwise, the faster one of fused and unfused,
for operands that impl cannot take; config, empty if there is no kernel to configure; fused_us,
mapped_us and the like where measured, unfused_us (the fastest unfused pair) and unfused (its name).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace.bench.report import fastest_impl, summarise
from interlace.errors import ArgumentError
from interlace.tuning import CARRIED

_GEMV = "gemv_all_reduce"
_PRODUCT = ("rows", "columns", "inner")

SIZES = {
    **dict.fromkeys(
        ("gemm_all_to_all", "gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"), _PRODUCT
    ),
    **dict.fromkeys(("bmm_all_to_all", "all_to_all_bmm"), _PRODUCT),  # rows of all products
    _GEMV: ("tokens", "rows", "columns"),
    "embedding_all_to_all": ("tables", "width", "batch", "pooling_factor"),
    "mixture_of_experts": ("tokens", "hidden", "ffn", "experts", "top_k"),
}


def entry(result: Mapping[str, Any]) -> dict[str, Any]:
    """The table's entry for one benchmark result."""
    summary, operator = summarise(result), str(result.get("operator", _GEMV))
    return {
        **{name: result[name] for name in ("world_size", "dtype", *SIZES[operator])},
        "impl": fastest_impl(result)[0],
        "otherwise": fastest_impl(result, among=(_first(result), "unfused"))[0],
        "config": result["config"],
        **{
            f"{way}_us": result["times"][way]["median_us"]
            for way in ("fused", *CARRIED)
            if way in result["times"]
        },
        "unfused_us": summary.unfused[1],
        "unfused": summary.unfused[0],
    }


def _first(result: Mapping[str, Any]) -> str:
    """The implementation that takes any operands: the fused kernel, or products in chunks."""
    return "fused" if "fused" in result["times"] else "chunked"


def read(file: Path, operator: str) -> dict[str, Any] | None:
    """The table in ``file``; None if there is no such file.

    Raises:
        ArgumentError: the file is not a tuned table of this operator.
    """
    if not file.exists():
        return None
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{file} must be a tuned table or not exist; {error}.") from error
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
    old: Mapping[str, Any] | None,
    operator: str,
    machine: Mapping[str, Any],
    entries: list[dict[str, Any]],
) -> dict[str, Any]:
    """A table with ``entries``, and with those of ``old`` at other points; sorted. ``machine`` is
    the newest measurement's.

    Raises:
        ArgumentError: the old table is another GPU's.
    """
    if old is not None:
        here, there = set(machine.get("gpus", [])), set(old["machine"].get("gpus", []))
        if here and there and here != there:
            raise ArgumentError(
                f"a tuned table must be of one kind of GPU; got {', '.join(sorted(here))} for a "
                "table of "
                f"{', '.join(sorted(there))}. Name another file."
            )
    points = {_point(item, operator): item for item in [*(old["entries"] if old else []), *entries]}
    return {
        "machine": dict(machine),
        "operator": operator,
        "entries": [points[point] for point in sorted(points)],
    }


def _point(item: Mapping[str, Any], operator: str) -> tuple[Any, ...]:
    return (
        int(item["world_size"]),
        str(item["dtype"]),
        *(int(item[name]) for name in SIZES[operator]),
    )
