"""Traces of results for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

There is one row per stream and one per kind of link. Rows are named as in traces of the real
kernels: ``compute``, a row for each of the library's streams, ``copy engine``, ``link ...`` and
``memory``. Times are microseconds, as the format requires, with nanoseconds after the point.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from typing import Any

from interlace_sim.astra.graph import Node
from interlace_sim.astra.workload import Report
from interlace_sim.collectives import TITLES
from interlace_sim.results import LinkUse, Result


def to_perfetto(results: list[Result]) -> dict[str, Any]:
    """Return a trace in Chrome's format; each result is a process, which is rank 0 of that run.

    Flows lead from a task to its first and last bytes.
    """
    events: list[dict[str, Any]] = []
    for pid, result in enumerate(results):
        rows = {row: tid for tid, row in enumerate(_rows(result))}
        events.append(named("process", pid, f"{result.name}, rank 0 of {result.ranks}"))
        for row, tid in rows.items():
            events.append(named("thread", pid, row, tid))
            # Without an index, Perfetto sorts rows by their first event.
            sort_index = {"sort_index": tid}
            events.append({**events[-1], "name": "thread_sort_index", "args": sort_index})
        critical = {task.name for task in result.critical_path()}
        for span in result.spans:
            arguments = {"critical": span.name in critical}
            events.append(
                slice_event(pid, rows[span.row], span.name, span.start_ns, span.end_ns, arguments)
            )
        for use in result.link_uses:
            events.append(
                slice_event(
                    pid,
                    rows[f"link {use.link}"],
                    use.traffic,
                    use.start_ns,
                    use.end_ns,
                    {"bytes": round(use.size)},
                )
            )
        events += _flows(pid, rows, result)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def report_to_perfetto(
    report: Report, graphs: Sequence[Sequence[Node]], npus: int = 64
) -> dict[str, Any]:
    """Return a trace of a run of ASTRA-sim's graphs; each of the first ``npus`` NPUs is a process.

    An NPU has one row per unit that works at a time: computation, communication, host. Receives may
    wait at the same time, so there are as many rows of them as wait at most.
    """
    # A host node has a row of its own, 3, whatever its kind; further receives follow.
    rows = {"compute": 0, "collective": 1, "send": 1, "none": 2}
    names = ("compute", "communication", "other", "host")
    events: list[dict[str, Any]] = []
    for pid, (spans, graph) in enumerate(zip(report.spans[:npus], graphs, strict=False)):
        events.append(named("process", pid, f"NPU {pid}"))
        nodes = {node.id: node for node in graph}
        used: dict[int, str] = {}
        # End of the last receive of each row of them, and the row; the earliest end first.
        receives: list[tuple[int, int]] = []
        # By their starts, so that a receive takes a row that is free until it ends.
        for ident, start, end in sorted(spans, key=lambda span: span[1:]):
            node = nodes[ident]
            if node.kind == "receive" and not node.cpu:
                free = receives and receives[0][0] <= start
                lane = heapq.heappop(receives)[1] if free else len(receives)
                heapq.heappush(receives, (end, lane))
                tid = len(names) + lane
                used[tid] = f"receives {lane + 1}" if lane else "receives"
            else:
                tid = 3 if node.cpu else rows[node.kind]
                used[tid] = names[tid]
            events.append(
                slice_event(pid, tid, node.name, start, end, {"node": ident, "bytes": node.size})
            )
        events += [named("thread", pid, name, tid) for tid, name in used.items()]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _rows(result: Result) -> list[str]:
    links = list(dict.fromkeys(use.link for use in result.link_uses))
    return [*result.streams(), *(f"link {link}" for link in sorted(links))]


def named(kind: str, pid: int, name: str, tid: int | None = None) -> dict[str, Any]:
    """Return the event that names a process, or a thread (a row)."""
    thread = {} if tid is None else {"tid": tid}
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, **thread, "args": {"name": name}}


def slice_event(
    pid: int, tid: int, name: str, start: int, end: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the event of a bar in a row, from ``start`` to ``end`` in nanoseconds."""
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": arguments,
    }


def _flows(pid: int, rows: dict[str, int], result: Result) -> list[dict[str, Any]]:
    """List flows from each communicating task to its traffic's first and last use of a link."""
    flows: list[dict[str, Any]] = []
    by_traffic: dict[str, list[LinkUse]] = {}
    for use in result.link_uses:
        by_traffic.setdefault(use.traffic, []).append(use)
    for uses in by_traffic.values():
        uses.sort(key=_start_ns)
    for number, task in enumerate(result.tasks):
        ends: list[LinkUse] = []
        for traffic in dict.fromkeys(_traffics(task.name, task.row)):
            uses = by_traffic.get(traffic, [])
            # A step has thousands of tasks and millions of uses, so each task's are looked up.
            first = bisect.bisect_left(uses, task.start_ns, key=_start_ns)
            end = bisect.bisect_right(uses, task.end_ns, key=_start_ns)
            if first < end:
                ends += uses[first], uses[end - 1]
        ends.sort(key=_start_ns)
        # Arrows to every use would hide the picture; the first and last show the span.
        for number_in_task, use in enumerate(ends[:1] + ends[-1:]):
            flow = {
                "cat": "message",
                "name": use.traffic,
                "id": f"{pid}.{number}.{number_in_task}",
                "pid": pid,
            }
            flows.append({**flow, "ph": "s", "tid": rows[task.row], "ts": task.start_ns / 1000})
            flows.append(
                {
                    **flow,
                    "ph": "f",
                    "bp": "e",
                    "tid": rows[f"link {use.link}"],
                    "ts": use.start_ns / 1000,
                }
            )
    return flows


def _start_ns(use: LinkUse) -> int:
    return use.start_ns


def _traffics(name: str, row: str) -> tuple[str, ...]:
    """Return the kinds of traffic that a task may have caused."""
    by_row = (
        [row]
        if row in TITLES
        else ["message"]
        if row == "copy engine"
        else ["all_reduce"]
        if row == "gradients"
        else []
    )
    return (*by_row, *(traffic for traffic, title in TITLES.items() if title in name))
