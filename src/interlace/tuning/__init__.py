"""Shape -> implementation and configuration: the measured tables, and the nearest entry of one."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Point:
    """The coordinates of a call in a tuned table: ranks, dtype (``"bfloat16"``), and the operator's
    sizes by name.
    """

    world_size: int
    dtype: str
    sizes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measured point.

    Attributes:
        impl: The fastest implementation there.
        us: The microseconds that it took; None where that was not noted.
        config: The fused kernel's best; empty for an operator without a kernel of its own.
        reason: What was measured, for :func:`interlace.explain`.
        faster: Implementations that are faster than the fastest unfused pair.
        is_exact: Whether the entry is of the very sizes, ranks and dtype that were asked for.
        world_size: The number of ranks that were measured.
    """

    impl: str
    us: float | None
    config: str
    reason: str
    faster: tuple[str, ...]
    is_exact: bool
    world_size: int


# A size that differs by more than this factor is another regime: better a default than a wrong
# lesson.
_FARTHEST_LOG2 = 2.0


def nearest(
    operator: str,
    device_name: str,
    point: Point,
    regime: Callable[[Mapping[str, int]], object] = lambda sizes: None,
) -> Entry | None:
    """Return the entry of ``operator``'s table for this GPU whose sizes are nearest, by the sum of
    log2 ratios.

    Only entries of a dtype as wide count, since a configuration fills shared memory, and those of
    the same ``regime``, as of :meth:`Configuration.regime`; those with as many ranks come first.
    None where no entry has every size within a factor of four.
    """
    best: tuple[float, dict[str, Any]] | None = None
    names, here = tuple(point.sizes), regime(point.sizes)
    at = _place(point.sizes, names)
    for entry, its_regime, place in _placed(
        operator, device_name, _width(point.dtype), names, regime
    ):
        if its_regime != here:
            continue
        # Sizes decide; the dtype only breaks a tie between entries of about equal sizes.
        distance = 0.0 if entry["dtype"] == point.dtype else 0.01
        for log2_size, log2_known in zip(at, place, strict=True):
            log2_ratio = abs(log2_size - log2_known)
            if log2_ratio > _FARTHEST_LOG2:
                break
            distance += log2_ratio
        else:
            distance += 5.0 * abs(math.log2(point.world_size / int(entry["world_size"])))
            if best is None or distance < best[0]:
                best = (distance, entry)
    if best is None:
        return None
    entry = best[1]
    sizes = ", ".join(f"{name} {entry[name]}" for name in point.sizes)
    ours = [key.removesuffix("_us") for key in entry if key.endswith("_us")]
    ours.remove("unfused")
    times = "".join(f"{way} {entry[f'{way}_us']} us, " for way in ours)
    pair = f" ({entry['unfused']})" if "unfused" in entry else ""
    reason = (
        f"measured on {device_name} at {entry['world_size']} ranks, {entry['dtype']}, {sizes}: "
        f"{times}best unfused pair {entry['unfused_us']} us{pair}"
    )
    faster = tuple(way for way in ours if entry[f"{way}_us"] < entry["unfused_us"])
    return Entry(
        str(entry["impl"]),
        entry.get(f"{entry['impl']}_us"),
        str(entry["config"]),
        reason,
        faster,
        is_exact=best[0] == 0,
        world_size=int(entry["world_size"]),
    )


def _place(sizes: Mapping[str, Any], names: tuple[str, ...]) -> tuple[float, ...]:
    return tuple(math.log2(max(int(sizes[name]), 1)) for name in names)


@functools.lru_cache(maxsize=64)
def _placed(
    operator: str,
    device_name: str,
    width: int,
    names: tuple[str, ...],
    regime: Callable[[Mapping[str, int]], object],
) -> list[tuple[dict[str, Any], object, tuple[float, ...]]]:
    """Return a table's entries of a dtype as wide, each with its regime and its place."""
    return [
        (entry, regime(entry), _place(entry, names))
        for entry in _table(operator, device_name)
        if _width(str(entry["dtype"])) == width
    ]


def file_name(operator: str, device_name: str) -> str:
    """The name of ``operator``'s table for a GPU, as ``torch.cuda.get_device_name`` calls it."""
    return f"{operator}.{device_name.lower().replace(' ', '_')}.json"


def _width(dtype: str) -> int:
    if dtype.startswith("float8"):
        return 1
    return 4 if dtype == "float32" else 2


@functools.cache
def _table(operator: str, device_name: str) -> list[dict[str, Any]]:
    file = (
        importlib.resources.files("interlace.tuning") / "tables" / file_name(operator, device_name)
    )
    if not file.is_file():
        return []
    entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["entries"]
    return entries
