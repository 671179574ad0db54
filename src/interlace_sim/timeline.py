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
    "ReduceScatter": "#009E73",
    "message": "#000000",
    "copy": "#8C6D31",
    "other": "#56B4E9",
}
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
    for row, stream in enumerate(streams):
        for family, start, end, fused in _merged(
            [span for span in result.spans if span.row == stream]
        ):
            colour = _COLOURS[family]
            axis.barh(
                row,
                (end - start) / scale,
                left=start / scale,
                height=0.72,
                color=colour,
                hatch="////" if fused else None,
                edgecolor="white" if fused else colour,
                linewidth=0,
            )
            used.setdefault(family, Patch(color=colour, label=family))
            if fused:
                used.setdefault(
                    "fused",
                    Patch(
                        facecolor="#777777",
                        edgecolor="white",
                        hatch="////",
                        label="fused: computes and sends",
                    ),
                )
    by_link = _by_link(result.link_uses)
    simulated_ns = result.total_ns - result.added_ns
    for number, link in enumerate(links):
        row = len(streams) + number
        _utilisation(axis, simulated_ns, by_link.get(link, {}), row, scale, used)
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
            color="#F3E3B5",
            zorder=0,
        )
        used.setdefault("added", Patch(color="#F3E3B5", label="pipeline fill and drain"))
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


def _family(name: str) -> str:
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
        family, fused = _family(span.name), " + " in span.name
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


def _utilisation(
    axis: Any,
    total_ns: int,
    by_traffic: Mapping[str, Sequence[tuple[int, int]]],
    row: int,
    scale: float,
    used: dict[str, Any],
) -> None:
    """Draw the share of time that a link was busy, in 240 steps, by kind of traffic."""
    import numpy as np
    from matplotlib.patches import Patch

    steps = 240
    edges = np.linspace(0, max(1, total_ns), steps + 1)
    below = np.zeros(steps)
    for traffic, uses in by_traffic.items():
        # The busy time until each edge; differences between edges give each step's share exactly,
        # which counting samples would not.
        share = np.diff(busy_until(uses, edges)) / np.diff(edges)
        family = _TRAFFIC.get(traffic, "other")
        # Rows are 0.72 high, and the vertical axis points down.
        low = row + 0.36 - 0.72 * below
        axis.fill_between(
            np.repeat(edges, 2)[1:-1] / scale,
            np.repeat(low, 2),
            np.repeat(low - 0.72 * share, 2),
            color=_COLOURS[family],
            linewidth=0,
        )
        used.setdefault(family, Patch(color=_COLOURS[family], label=family))
        below = below + share
    axis.axhline(row + 0.36, color="#BBBBBB", linewidth=0.6)
