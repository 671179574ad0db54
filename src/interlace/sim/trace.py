"""A result as a trace for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``: one row a
stream, one a kind of link.

Rows are named as in traces of the real kernels: ``compute``, a row for each of the library's
streams, ``copy engine``, ``link ...`` and ``memory``. Times are microseconds, as the format wants,
with nanoseconds behind the point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from interlace.sim.astra.workload import Node, Report
from interlace.sim.collectives import TITLES
from interlace.sim.results import Result


def to_perfetto(results: list[Result]) -> dict[str, Any]:
    """Chrome's trace format: each result is a process, rank 0 of that run. Flows lead from the task
    to its first and last bytes.
    """
    events: list[dict[str, Any]] = []
    for pid, result in enumerate(results):
        rows = {row: tid for tid, row in enumerate(_rows(result))}
        events.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": pid,
                "args": {"name": f"{result.name}, rank 0 of {result.ranks}"},
            }
        )
        for row, tid in rows.items():
            events.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}}
            )
            events.append(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": pid,
                    "tid": tid,
                    "args": {"sort_index": tid},
                }
            )
        critical = {task.name for task in result.critical_path()}
        for span in result.spans:
            arguments = {"critical": span.name in critical}
            events.append(
                _slice(pid, rows[span.row], span.name, span.start_ns, span.end_ns, arguments)
            )
        for use in result.link_uses:
            events.append(
                _slice(
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
    """A run of ASTRA-sim's graphs: each of the first ``npus`` NPUs is a process, with rows for what
    it does at once.
    """
    rows = {"compute": 0, "collective": 1, "send": 1, "receive": 2, "none": 3}
    events: list[dict[str, Any]] = []
    for pid, (spans, graph) in enumerate(zip(report.spans[:npus], graphs, strict=False)):
        events.append(
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"NPU {pid}"}}
        )
        nodes = {node.id: node for node in graph}
        used: dict[int, str] = {}
        for ident, start, end in spans:
            node = nodes[ident]
            tid = 4 if node.cpu else rows[node.kind]
            used[tid] = ("compute", "communication", "receives", "other", "host")[tid]
            events.append(
                _slice(pid, tid, node.name, start, end, {"node": ident, "bytes": node.size})
            )
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            for tid, name in used.items()
        ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _rows(result: Result) -> list[str]:
    streams = list(dict.fromkeys(span.row for span in result.spans))
    streams.sort(key=lambda row: (row != "compute", row))
    links = list(dict.fromkeys(use.link for use in result.link_uses))
    return [*streams, *(f"link {link}" for link in sorted(links))]


def _slice(
    pid: int, tid: int, name: str, start: int, end: int, arguments: dict[str, Any]
) -> dict[str, Any]:
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
    """From each communicating task to the first and the last link use of its traffic while it runs."""
    flows: list[dict[str, Any]] = []
    for number, task in enumerate(result.tasks):
        during = [
            use
            for use in result.link_uses
            if use.traffic
            and use.traffic in _traffics(task.name, task.row)
            and task.start_ns <= use.start_ns <= task.end_ns
        ]
        for which, use in enumerate(during[:1] + during[-1:]):
            flow = {
                "cat": "message",
                "name": use.traffic,
                "id": f"{pid}.{number}.{which}",
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


def _traffics(name: str, row: str) -> tuple[str, ...]:
    """The kinds of traffic that a task may have caused."""
    by_row = (
        [row]
        if row.startswith("all_")
        else ["message"]
        if row == "copy engine"
        else ["all_reduce"]
        if row == "gradients"
        else []
    )
    return (*by_row, *(traffic for traffic, title in TITLES.items() if title in name))
