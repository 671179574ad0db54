"""A trace as a picture that is read in ten seconds."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from interlace.errors import ArgumentError
from interlace.figure import open_figure, time_unit
from interlace.tracing.perfetto import SIMULATED, UNTIMED
from interlace.units import format_bytes

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = {
    "compute": ("#56B4E9", "computes a tile"),
    "product": ("#0072B2", "a library's product"),
    "put": ("#E69F00", "puts and signals"),
    "wait": ("#D55E00", "waits for a peer"),
    "copy": ("#009E73", "copy engine"),
    "collective": ("#CC79A7", "a library's collective"),
    "other": ("#D3D9DF", "sums, stores, other"),
}
_LINK = "#8C6D31"
_MOST_RANKS = 2  # that are drawn of a timeline
_KEY_ARROWS, _MOST_ARROWS = 4, 6
_ROW = re.compile(r"^(?P<kernel>.+) (?P<launch>\d+), program (?P<program>\d+), SM \d+$")

_Key = tuple[int, int]  # process and row


class _Bar(NamedTuple):
    start: float
    end: float
    category: str


class _Arrow(NamedTuple):
    source: _Key
    target: _Key
    departure: float
    arrival: float
    waited: float


@dataclasses.dataclass
class _Trace:
    """A document's names, bars of each row, arrows, and bytes in flight; times in nanoseconds."""

    processes: dict[int, str]
    names: dict[_Key, str]
    bars: dict[_Key, list[_Bar]]
    arrows: list[_Arrow]
    flights: dict[tuple[int, str], list[tuple[float, float]]]
    facts: dict[str, Any]


def draw_trace(document: dict[str, Any], file: Path, *, rows: int = 12, width: float = 12) -> None:
    """Draw a document of :meth:`interlace.tracing.Trace.to_perfetto`.

    Args:
        rows: Programs of each rank that are drawn; of more, some.
        width: Inches.

    Raises:
        ArgumentError: The document is no such trace, or the picture cannot be written.
    """
    trace = _read(document)
    ranks = _ranks(trace, is_timed=trace.facts.get("clock") != UNTIMED)
    arrows = _key_arrows(trace, ranks)
    chosen = {pid: _chosen(trace, pid, rows, arrows) for pid in ranks}
    drawn = {pid // SIMULATED for pid in ranks}
    links = {pid: _links(trace, pid, ranks) for pid in trace.processes if pid // SIMULATED in drawn}
    links = {pid: names for pid, names in links.items() if names}
    panels: list[tuple[int, bool]] = []
    for pid in ranks:
        panels.append((pid, False))
        # The links of a timeline come below its ranks.
        following = [link for link in links if pid < link < pid + SIMULATED]
        is_last = pid == max(peer for peer in ranks if peer // SIMULATED == pid // SIMULATED)
        panels += [(link, True) for link in following if is_last]
    heights = [
        0.35 + 0.26 * (len(links[pid]) if is_link else len(chosen[pid])) for pid, is_link in panels
    ]
    timing = _order(trace, chosen) if trace.facts.get("clock") == UNTIMED else None
    with open_figure(file, width, 1.9 + sum(heights)) as figure:
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[
            :, 0
        ]
        times = [bar.end for pid in ranks for key in chosen[pid] for bar in trace.bars[key]]
        scale, unit = time_unit(max(times, default=1.0))
        x = timing or (lambda time_ns: time_ns / scale)
        positions: dict[_Key, tuple[Any, float]] = {}
        used: set[str] = set()
        for axis, (pid, is_link) in zip(axes, panels, strict=True):
            if is_link:
                _draw_links(axis, trace, pid, links[pid], x)
            else:
                used |= _draw_rank(axis, trace, pid, chosen[pid], x, positions)
        others = sorted(trace.arrows, key=lambda arrow: -arrow.waited)
        drawn_arrows = _draw_arrows(figure, [*arrows, *others], positions, x)
        axes[-1].set_xlim(0, 1.01 * x(max(times, default=1.0)))
        axes[-1].set_xlabel(
            "order of events: on the CPU backend their times mean nothing" if timing else unit
        )
        _headline(figure, trace, width)
        _legend(figure, used, drawn_arrows > 0, bool(links), width)


def _read(document: Any) -> _Trace:
    """Read a document of Chrome's format."""
    if not (isinstance(document, dict) and isinstance(document.get("traceEvents"), list)):
        raise ArgumentError(
            "a trace must be a document with traceEvents, as `interlace trace` writes it; this one "
            "has none."
        )
    trace = _Trace({}, {}, defaultdict(list), [], defaultdict(list), document.get("otherData", {}))
    departures: dict[int, tuple[_Key, float]] = {}
    arrivals: list[tuple[int, _Key, float]] = []
    for event in document["traceEvents"]:
        key = event["pid"], event["tid"]
        time_ns = 1e3 * event.get("ts", 0.0)
        match event["ph"]:
            case "M" if event["name"] == "process_name":
                trace.processes[event["pid"]] = event["args"]["name"]
            case "M" if event["name"] == "thread_name":
                trace.names[key] = event["args"]["name"]
            case "X" if event["cat"] != "launch":
                trace.bars[key].append(_Bar(time_ns, time_ns + 1e3 * event["dur"], event["cat"]))
            case "s":
                departures[event["id"]] = key, time_ns
            case "f":
                arrivals.append((event["id"], key, time_ns))
            case "C" if event["name"].endswith("bytes in flight"):
                link = event["name"].removesuffix(": bytes in flight")
                trace.flights[event["pid"], link].append((time_ns, event["args"]["bytes"]))
    for bars in trace.bars.values():
        bars.sort()
    for number, target, arrival_ns in arrivals:
        source, departure_ns = departures[number]
        waited = _waited(trace.bars.get(target, []), arrival_ns, departure_ns)
        trace.arrows.append(_Arrow(source, target, departure_ns, arrival_ns, waited))
    if not trace.bars:
        raise ArgumentError("a picture must have something to show; the trace has no events.")
    return trace


def _waited(bars: Sequence[_Bar], arrival_ns: float, departure_ns: float) -> float:
    """Return how long a program had waited for what arrived; 0 if it was sent before the wait."""
    # Times in a file are rounded, so the wait that ends at the arrival may end a little beside it.
    index = bisect.bisect_right(bars, arrival_ns - 0.5, key=lambda bar: bar.end)
    if index == len(bars) or bars[index].category != "wait":
        return 0.0
    bar = bars[index]
    return bar.end - bar.start if bar.start <= departure_ns and bar.start < arrival_ns else 0.0


def _ranks(trace: _Trace, *, is_timed: bool) -> list[int]:
    """Return the processes of the ranks to draw: of each timeline the first ones with events.

    What has an order only has no time axis that a simulation could share.
    """
    filled = {pid for pid, _ in trace.bars}
    chosen: list[int] = []
    for is_simulated in (False, True) if is_timed else (False,):
        of_timeline = [
            pid
            for pid, name in sorted(trace.processes.items())
            if pid in filled
            and "links" not in name
            and name.startswith("simulated") == is_simulated
        ]
        most_ranks = 1 if is_simulated and chosen else _MOST_RANKS
        chosen += of_timeline[:most_ranks]
    return chosen


def _links(trace: _Trace, pid: int, ranks: Sequence[int]) -> list[str]:
    """Return the links of a process between the ranks that are drawn, or some that leave one."""
    numbers = {str(rank % SIMULATED) for rank in ranks if rank // SIMULATED == pid // SIMULATED}
    links = sorted(name for process, name in trace.flights if process == pid)
    inside = [name for name in links if set(name.split(" to ")) <= numbers]
    return inside or [name for name in links if name.split()[0] in numbers][:_MOST_RANKS]


def _key_arrows(trace: _Trace, ranks: Sequence[int]) -> list[_Arrow]:
    """Return the arrows behind the longest waits, whose rows are drawn in any case."""
    inside = [
        arrow
        for arrow in trace.arrows
        if arrow.waited and arrow.source[0] in ranks and arrow.target[0] in ranks
    ]
    inside.sort(key=lambda arrow: -arrow.waited)
    by_target: dict[_Key, _Arrow] = {}
    for arrow in inside:
        by_target.setdefault(arrow.target, arrow)
    return list(by_target.values())[:_KEY_ARROWS]


def _chosen(trace: _Trace, pid: int, rows: int, arrows: Sequence[_Arrow]) -> list[_Key]:
    """Return the rows of a rank to draw: of each launch some programs, and all streams."""
    launches: dict[str, list[_Key]] = defaultdict(list)
    streams: list[_Key] = []
    for key, name in sorted(trace.names.items()):
        if key[0] != pid or key not in trace.bars:
            continue
        match = _ROW.match(name)
        if match:
            launches[match["launch"]].append(key)
        else:
            streams.append(key)
    wanted = {key for arrow in arrows for key in (arrow.source, arrow.target)}
    total = sum(map(len, launches.values()))
    chosen: list[_Key] = []
    for keys in launches.values():
        count = min(len(keys), max(1, round(rows * len(keys) / total)))
        steps = max(count - 1, 1)
        spread = {keys[index * (len(keys) - 1) // steps] for index in range(count)}
        chosen += sorted(spread | (wanted & set(keys)))
    return [*chosen, *streams]


def _order(trace: _Trace, chosen: dict[int, list[_Key]]) -> Callable[[float], float]:
    """Return the function from a time to the number of beginnings and ends before it."""
    bars = [bar for keys in chosen.values() for key in keys for bar in trace.bars[key]]
    times = sorted({time for bar in bars for time in (bar.start, bar.end)})
    return lambda time_ns: float(bisect.bisect_left(times, time_ns))


def _draw_rank(
    axis: Any,
    trace: _Trace,
    pid: int,
    keys: Sequence[_Key],
    x: Callable[[float], float],
    positions: dict[_Key, tuple[Any, float]],
) -> set[str]:
    """Draw a row per program and stream; return the categories that occur."""
    used: set[str] = set()
    labels = []
    kernels = {match["launch"] for key in keys if (match := _ROW.match(trace.names[key]))}
    for row, key in enumerate(keys):
        positions[key] = (axis, row)
        for category, bars in itertools.groupby(
            sorted(trace.bars[key], key=lambda bar: bar.category), key=lambda bar: bar.category
        ):
            used.add(category)
            pieces = [(x(bar.start), x(bar.end) - x(bar.start)) for bar in bars]
            colour = _COLOURS[category][0]
            axis.broken_barh(
                pieces, (row - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.3
            )
        match = _ROW.match(trace.names[key])
        kernel = f"{match['kernel'][-18:]} " if match and len(kernels) > 1 else ""
        labels.append(f"{kernel or 'program '}{match['program']}" if match else trace.names[key])
    axis.set_yticks(range(len(keys)), labels, fontsize=8)
    axis.set_ylim(len(keys) - 0.4, -0.6)
    count = sum(bool(_ROW.match(name)) for key, name in trace.names.items() if key[0] == pid)
    shown = sum(bool(_ROW.match(trace.names[key])) for key in keys)
    suffix = f", {shown} of {count} programs" if shown < count else ""
    axis.set_title(f"{trace.processes[pid]}{suffix}", loc="left", fontsize=9)
    _clean(axis)
    return used


def _draw_links(
    axis: Any, trace: _Trace, pid: int, links: Sequence[str], x: Callable[[float], float]
) -> None:
    """Draw the bytes in flight on each link."""
    most_bytes = max(size for link in links for _, size in trace.flights[pid, link]) or 1
    for row, link in enumerate(links):
        points = [(0.0, 0.0), *trace.flights[pid, link]]
        low = row + 0.4
        axis.fill_between(
            [x(time) for time, _ in points],
            low,
            [low - 0.8 * size / most_bytes for _, size in points],
            step="post",
            color=_LINK,
            linewidth=0,
        )
        axis.axhline(low, color="#BBBBBB", linewidth=0.5)
    axis.set_yticks(range(len(links)), links, fontsize=8)
    axis.set_ylim(len(links) - 0.4, -0.6)
    title = f"{trace.processes[pid]}: bytes in flight, at most {format_bytes(most_bytes)}"
    axis.set_title(title, loc="left", fontsize=9)
    _clean(axis)


def _clean(axis: Any) -> None:
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _draw_arrows(
    figure: Any,
    arrows: Sequence[_Arrow],
    positions: dict[_Key, tuple[Any, float]],
    x: Callable[[float], float],
) -> int:
    """Draw arrows between rows that are there, the first ones; return how many."""
    from matplotlib.patches import ConnectionPatch

    # Arrows of nearly the same time would lie on top of one another.
    distance = 0.01 * max((x(arrow.arrival) for arrow in arrows), default=0.0)
    drawn: list[float] = []
    for arrow in arrows:
        ends = positions.get(arrow.source), positions.get(arrow.target)
        arrival = x(arrow.arrival)
        if not arrow.waited or None in ends or len(drawn) == _MOST_ARROWS:
            continue
        if any(abs(arrival - earlier) < distance for earlier in drawn):
            continue
        drawn.append(arrival)
        (source_axis, source_row), (target_axis, target_row) = ends  # type: ignore[misc]
        figure.add_artist(
            ConnectionPatch(
                (x(arrow.departure), source_row),
                (x(arrow.arrival), target_row),
                "data",
                "data",
                axesA=source_axis,
                axesB=target_axis,
                arrowstyle="-|>",
                color="black",
                linewidth=0.9,
                mutation_scale=8,
            )
        )
    return len(drawn)


def _headline(figure: Any, trace: _Trace, width: float) -> None:
    """Write the finding, and below it what was traced."""
    facts = trace.facts
    findings = [("", facts.get("finding")), ("simulated: ", facts.get("simulated_finding"))]
    if facts.get("clock") == UNTIMED:
        findings = findings[:1]
    if not facts.get("finding"):
        findings = [("", facts.get("simulated_finding"))]
    characters = int(9.5 * width)
    lines = [
        line
        for prefix, finding in findings
        if finding
        for line in textwrap.wrap(prefix + finding, characters)
    ]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=12, fontweight="bold")
    title = "\n".join(textwrap.wrap(facts.get("title", ""), int(1.3 * characters)))
    first = figure.axes[0]
    first.set_title(f"{title}\n\n{first.get_title(loc='left')}" if title else "", loc="left",
                    fontsize=9)  # fmt: skip


def _legend(figure: Any, used: set[str], has_arrows: bool, has_links: bool, width: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=colour, label=label)
        for category, (colour, label) in _COLOURS.items()
        if category in used
    ]
    if has_arrows:
        handles.append(Line2D([], [], color="black", marker=">", label="ends a wait"))
    if has_links:
        handles.append(Patch(color=_LINK, label="bytes in flight"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), max(2, int(width / 1.9))),
        frameon=False,
        fontsize=9,
    )
