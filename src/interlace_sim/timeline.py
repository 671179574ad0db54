"""Timelines of results as pictures: the streams of rank 0, and the use of its links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.figure import open_figure, time_unit
from interlace.units import format_ns
from interlace_sim.collectives import TITLES
from interlace_sim.results import LinkUse, Result, Span

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = {
    "embedding": "#0072B2",
    "MLP": "#9AA5B1",
    "interaction": "#CC79A7",
    "expert": "#0072B2",
    "attention": "#CC79A7",
    "product": "#56B4E9",
    "optimizer": "#8C6D31",
    "All-to-All": "#D55E00",
    "AllReduce": "#E69F00",
    "AllGather": "#009E73",
    "ReduceScatter": "#F0E442",
    "message": "#000000",
    "copy": "#882255",
    "other": "#D3D9DF",
}
ADDED: dict[str, Any] = {
    "facecolor": "white",
    "edgecolor": "#BBBBBB",
    "hatch": "..",
    "linewidth": 0.0,
}
"""The look of a pipeline's fill and drain, in which a rank does nothing of the step."""
_STEPS = 240  # parts of a step, of which each has the shares of what is drawn as shares
_MOST_BARS = 60
"""More bars than this in a row are slivers; the row then has the shares of time, as links have."""
_TRAFFIC = {**TITLES, "message": "message"}


def timeline(results: Sequence[Result], file: Path) -> None:
    """Draw one panel per result on one time axis: rank 0's streams, and the use of its links.

    Raises:
        ArgumentError: the file cannot be written.
    """
    panels = [(result.streams(), _links(result)) for result in results]
    heights = [len(streams) + 0.8 * len(links) + 0.6 for streams, links in panels]
    with open_figure(file, 12, 1.6 + 0.52 * sum(heights)) as figure:
        axes = figure.subplots(len(results), 1, sharex=True, height_ratios=heights, squeeze=False)[
            :, 0
        ]
        used: dict[str, Any] = {}
        scale, unit = time_unit(max(result.total_ns for result in results))
        for axis, result, (streams, links) in zip(axes, results, panels, strict=True):
            _panel(axis, result, streams, links, scale, used)
        axes[-1].set_xlim(0, 1.02 * max(result.total_ns for result in results) / scale)
        axes[-1].set_xlabel(unit)
        figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)
        legend_of(figure, used)


def legend_of(figure: Any, used: dict[str, Any]) -> None:
    """Put the legend of what was used under the panels."""
    figure.legend(
        handles=list(used.values()),
        loc="outside lower center",
        ncols=min(8, len(used)),
        frameon=False,
        fontsize=9,
    )


def _panel(
    axis: Any,
    result: Result,
    streams: list[str],
    links: list[str],
    scale: float,
    used: dict[str, Any],
) -> None:
    from matplotlib.patches import Patch

    rows = [*streams, *(f"link {link}" for link in links)]
    simulated_ns = result.total_ns - result.added_ns
    for row, stream in enumerate(streams):
        bars = _merged([span for span in result.spans if span.row == stream])
        if len(bars) <= _MOST_BARS:
            for family, start, end, fused in bars:
                bar_of(axis, row, (start / scale, (end - start) / scale), (family, fused), used)
            continue
        uses: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        for family, start, end, fused in bars:
            uses.setdefault((family, fused), []).append((start, end))
        _shares(axis, simulated_ns, uses, row, scale, used)
        rows[row] = f"{stream}, share of time"
    by_link = _by_link(result.link_uses)
    for row, link in enumerate(links, start=len(streams)):
        of_link = {
            (_TRAFFIC.get(traffic, "other"), False): uses
            for traffic, uses in by_link.get(link, {}).items()
        }
        _shares(axis, simulated_ns, of_link, row, scale, used)
    axis.axvline(result.bound.time_ns / scale, color="black", linestyle=":", linewidth=1.2)
    axis.annotate(
        "physical bound",
        (result.bound.time_ns / scale, -0.62),
        ha="right",
        va="center",
        fontsize=8,
        xytext=(-4, 0),
        textcoords="offset points",
    )
    axis.axvline(result.total_ns / scale, color="black", linewidth=1)
    if result.added_ns:
        axis.axvspan(
            (result.total_ns - result.added_ns) / scale,
            result.total_ns / scale,
            zorder=0,
            **ADDED,
        )
        used.setdefault("added", Patch(label="pipeline fill and drain", **ADDED))
    axis.set_yticks(range(len(rows)), rows, fontsize=9)
    axis.set_ylim(len(rows) - 0.4, -0.95)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_title(
        f"{result.name}: {format_ns(result.total_ns)}, of which {format_ns(result.exposed_ns)} "
        "exposed",
        loc="left",
        fontsize=10,
    )


def bar_of(
    axis: Any, row: int, place: tuple[float, float], kind: tuple[str, bool], used: dict[str, Any]
) -> None:
    """Draw a bar of a row, and put what it is into the legend.

    Args:
        place: Its start and its length on the axis.
        kind: The family of the tasks, and whether they are fused.
    """
    family, fused = kind
    colour = _COLOURS[family]
    axis.barh(
        row,
        place[1],
        left=place[0],
        height=0.72,
        color=colour,
        hatch="////" if fused else None,
        edgecolor="white" if fused else colour,
        linewidth=0,
    )
    _use(kind, used)


def _use(kind: tuple[str, bool], used: dict[str, Any]) -> None:
    """Put a family, and what hatching means, into the legend."""
    from matplotlib.patches import Patch

    family, fused = kind
    used.setdefault(family, Patch(color=_COLOURS[family], label=family))
    if fused:
        look: dict[str, Any] = {"facecolor": "#777777", "edgecolor": "white", "hatch": "////"}
        used.setdefault("fused", Patch(label="fused: computes and sends", **look))


def _links(result: Result) -> list[str]:
    """List the busiest links, at most four."""
    busy = {
        name: time for name, time in result.busy_ns.items() if name in result.sent_bytes and time
    }
    return sorted(sorted(busy, key=lambda name: -busy[name])[:4])


# A task belongs to the family of the first of these that its name contains, so longer and more
# specific words come first.
_FAMILIES = (
    ("activations", "message"),
    ("copy", "copy"),
    ("gradients", "AllReduce"),
    ("embedding", "embedding"),
    ("interaction", "interaction"),
    ("optimizer", "optimizer"),
    ("attention", "attention"),
    ("dispatch", "expert"),
    ("combine", "expert"),
    ("first weight", "expert"),
    ("second weight", "expert"),
    ("FC", "product"),
    ("QKV", "product"),
    ("output", "product"),
    ("GEM", "product"),
    ("top", "MLP"),
    ("bottom", "MLP"),
    *TITLES.items(),
)


def family_of(name: str) -> str:
    """Return the family of a task's colour; a fused task has its computation's."""
    if " + " not in name:
        collective = next((title for title in TITLES.values() if title in name), None)
        if collective:
            return collective
    else:
        name = name.replace("gradient ", "")
    return next((family for part, family in _FAMILIES if part in name), "other")


def _merged(spans: list[Span]) -> list[tuple[str, int, int, bool]]:
    """Merge neighbours of one family into one bar: (family, start, end, fused)."""
    out: list[tuple[str, int, int, bool]] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        family, fused = family_of(span.name), " + " in span.name
        # A microsecond between bars is less than a pixel.
        if (
            out
            and out[-1][0] == family
            and out[-1][3] == fused
            and span.start_ns - out[-1][2] <= 1000
        ):
            out[-1] = (family, out[-1][1], span.end_ns, fused)
        else:
            out.append((family, span.start_ns, span.end_ns, fused))
    return out


def _by_link(uses: Iterable[LinkUse]) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """Return the starts and ends of uses by link and kind of traffic."""
    out: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for use in uses:
        kinds = out.setdefault(use.link, {})
        kinds.setdefault(use.traffic, []).append((use.start_ns, use.end_ns))
    return out


def busy_until(uses: Sequence[tuple[int, int]], edges: Any) -> Any:
    """Return for each edge the nanoseconds before it in which (start, end) uses were busy."""
    import numpy as np

    busy = np.zeros(len(edges))
    # What began before an edge, less what ended before it: a use counts up to the edge.
    for times, sign in zip(np.sort(np.array(uses, dtype=float), axis=0).T, (1, -1), strict=True):
        count = np.searchsorted(times, edges)
        sums = np.concatenate(([0.0], np.cumsum(times)))
        busy += sign * (count * edges - sums[count])
    return busy


def _shares(
    axis: Any,
    total_ns: int,
    by_kind: Mapping[tuple[str, bool], Sequence[tuple[int, int]]],
    row: int,
    scale: float,
    used: dict[str, Any],
) -> None:
    """Draw the share of time that a link or a stream was busy, by family and whether fused."""
    import numpy as np

    edges = np.linspace(0, max(1, total_ns), _STEPS + 1)
    below = np.zeros(_STEPS)
    for kind, uses in by_kind.items():
        # The busy time until each edge; differences between edges give each step's share exactly,
        # which counting samples would not.
        share = np.diff(busy_until(uses, edges)) / np.diff(edges)
        family, fused = kind
        # Rows are 0.72 high, and the vertical axis points down.
        low = row + 0.36 - 0.72 * below
        axis.fill_between(
            np.repeat(edges, 2)[1:-1] / scale,
            np.repeat(low, 2),
            np.repeat(low - 0.72 * share, 2),
            facecolor=_COLOURS[family],
            hatch="////" if fused else None,
            edgecolor="white" if fused else _COLOURS[family],
            linewidth=0,
        )
        _use(kind, used)
        below = below + share
    axis.axhline(row + 0.36, color="#BBBBBB", linewidth=0.6)
