"""What Chrome's trace format asks of a document, as Perfetto's importer reads it."""

from __future__ import annotations

import bisect
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

_PHASES = {"M", "X", "i", "s", "f", "C"}
_US = 0.002  # times are rounded to a nanosecond; two of them meet in an edge
_Row = tuple[int, int]


def violations(document: Any) -> list[str]:
    """Return in words what is wrong with a document; nothing if Perfetto shows all of it.

    Perfetto drops a bar that overlaps another one of its row without lying inside it, an arrow
    that begins or ends outside of all bars, and a name of a row that comes twice.
    """
    json.dumps(document, allow_nan=False)
    assert document.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    return list(_violations(document["traceEvents"]))


def _violations(events: list[dict[str, Any]]) -> Iterator[str]:
    names: Counter[tuple[int, int, str]] = Counter()
    bars: dict[_Row, list[tuple[float, float]]] = defaultdict(list)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    counters: dict[tuple[int, str], float] = defaultdict(float)
    for event in events:
        if event["ph"] not in _PHASES or not {"pid", "tid", "name"} <= event.keys():
            yield f"no event: {event}"
            continue
        row = event["pid"], event["tid"]
        if type(row[0]) is not int or type(row[1]) is not int:
            yield f"rows must be numbers: {row}"
        if event["ph"] == "M":
            names[(*row, event["name"])] += 1
            continue
        if not (isinstance(event["ts"], float | int) and 0 <= event["ts"] < math.inf):
            yield f"no time: {event}"
        if event["ph"] == "X":
            if event["dur"] < 0:
                yield f"a negative duration: {event}"
            bars[row].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in ("s", "f"):
            if event["ph"] in flows[event["id"]]:
                yield f"an arrow with two ends of a kind: {event}"
            flows[event["id"]][event["ph"]] = event
        elif event["ph"] == "C":
            if event["ts"] < counters[event["pid"], event["name"]]:
                yield f"a counter goes back in time: {event}"
            counters[event["pid"], event["name"]] = event["ts"]
            if any(value < 0 for value in event["args"].values()):
                yield f"a negative counter: {event}"
        if event["ph"] != "C" and (*row, "thread_name") not in names:
            yield f"a row without a name before: {event}"
        if (event["pid"], 0, "process_name") not in names:
            yield f"a process without a name before: {event}"
    yield from (f"named twice: {name}" for name, count in names.items() if count > 1)
    for row, of_row in bars.items():
        of_row.sort(key=lambda bar: (bar[0], -bar[1]))
        yield from _overlaps(row, of_row)
    for number, ends in flows.items():
        if ends.keys() != {"s", "f"}:
            yield f"arrow {number} has only {list(ends)}"
        elif ends["f"]["ts"] < ends["s"]["ts"]:
            yield f"arrow {number} leads back in time"
        for event in ends.values():
            if not _lies_on(bars[event["pid"], event["tid"]], event["ts"]):
                yield f"arrow {number} hangs in the air: {event}"


def _overlaps(row: _Row, bars: list[tuple[float, float]]) -> Iterator[str]:
    open_ends: list[float] = []
    for start, end in bars:
        while open_ends and open_ends[-1] <= start + _US:
            open_ends.pop()
        if open_ends and end > open_ends[-1] + _US:
            yield f"row {row}: a bar from {start} to {end} overlaps one that ends {open_ends[-1]}"
        open_ends.append(end)


def _lies_on(bars: list[tuple[float, float]], time: float) -> bool:
    # Bars of a row with arrows follow one another.
    index = bisect.bisect_right(bars, time + _US, key=lambda bar: bar[0]) - 1
    return index >= 0 and time <= bars[index][1] + _US
