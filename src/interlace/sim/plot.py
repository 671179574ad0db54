"""Pictures of results: timelines, bars, heat maps, correlation, tornado, curves. Each function
writes one PNG or SVG file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from interlace.errors import ArgumentError
from interlace.sim.collectives import TITLES
from interlace.sim.results import Result, Span
from interlace.units import format_ns

# Okabe and Ito's colours, told apart by everyone.
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
_FUSED_EDGE = "#D55E00"


@contextlib.contextmanager
def open_figure(file: Path, width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches, written to ``file`` at the end; ArgumentError where that cannot
    be.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    try:
        yield figure
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"{file} must be a PNG, SVG or PDF file that can be written; {error}."
        ) from error
    finally:
        pyplot.close(figure)


def timeline(results: Sequence[Result], file: Path) -> None:
    """One panel a result, on one time axis: what rank 0 did in each stream, and how busy its links
    were.
    """
    panels = [(_streams(result), _links(result)) for result in results]
    heights = [len(streams) + 0.8 * len(links) + 0.6 for streams, links in panels]
    with open_figure(file, 12, 1.6 + 0.52 * sum(heights)) as figure:
        axes = figure.subplots(len(results), 1, sharex=True, height_ratios=heights, squeeze=False)[
            :, 0
        ]
        used: dict[str, Any] = {}
        scale, unit = _unit(max(result.total_ns for result in results))
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
    for number, link in enumerate(links):
        _utilisation(axis, result, link, len(streams) + number, scale, used)
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


def _streams(result: Result) -> list[str]:
    names = list(dict.fromkeys(span.row for span in result.spans))
    return sorted(names, key=lambda row: (row != "compute", row))


def _links(result: Result) -> list[str]:
    """The links that were busiest, at most four."""
    busy = {
        name: time for name, time in result.busy_ns.items() if name in result.sent_bytes and time
    }
    return sorted(sorted(busy, key=lambda name: -busy[name])[:4])


# What a task's name holds, the first that fits, and its family.
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
    """The colour's name: of a fused task, its computation's."""
    if " + " not in name:
        collective = next((title for title in TITLES.values() if title in name), None)
        if collective:
            return collective
    else:
        name = name.replace("gradient ", "")
    return next((family for part, family in _FAMILIES if part in name), "other")


def _merged(spans: list[Span]) -> list[tuple[str, int, int, bool]]:
    """Neighbours of one family as one bar: (family, start, end, fused)."""
    out: list[tuple[str, int, int, bool]] = []
    for span in sorted(spans, key=lambda span: span.start_ns):
        family, fused = _family(span.name), " + " in span.name
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


def _utilisation(
    axis: Any, result: Result, link: str, row: int, scale: float, used: dict[str, Any]
) -> None:
    """How busy a link was, in 240 steps of time, by kind of traffic."""
    import numpy as np
    from matplotlib.patches import Patch

    steps = 240
    edges = np.linspace(0, max(1, result.total_ns - result.added_ns), steps + 1)
    below = np.zeros(steps)
    for traffic in dict.fromkeys(use.traffic for use in result.link_uses if use.link == link):
        uses = [
            (use.start_ns, use.end_ns)
            for use in result.link_uses
            if use.link == link and use.traffic == traffic
        ]
        busy = np.zeros(steps + 1)
        for start, end in uses:  # the integral of the link's being busy, at every edge
            busy += np.clip(edges - start, 0, end - start)
        share = np.diff(busy) / np.diff(edges)
        family = _TRAFFIC.get(traffic, "other")
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


def bars(results: Sequence[tuple[str, Result]], file: Path) -> None:
    """Total time of each result, computation and exposed communication, and the physical bound."""
    with open_figure(file, 2.2 + 1.5 * len(results), 4.4) as figure:
        axis = figure.subplots()
        scale, unit = _unit(max(result.total_ns for _, result in results))
        base = results[0][1].total_ns
        computed = [
            (result.total_ns - result.exposed_ns - result.added_ns) / scale for _, result in results
        ]
        exposed = [result.exposed_ns / scale for _, result in results]
        added = [result.added_ns / scale for _, result in results]
        places = range(len(results))
        figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)
        axis.bar(places, computed, color="#9AA5B1", width=0.6, label="computation")
        axis.bar(
            places,
            exposed,
            bottom=computed,
            color="#D55E00",
            width=0.6,
            label="exposed communication",
        )
        if any(added):
            bottom = [a + b for a, b in zip(computed, exposed, strict=True)]
            axis.bar(
                places,
                added,
                bottom=bottom,
                color="#E69F00",
                width=0.6,
                label="pipeline fill and drain",
            )
        for place, (_, result) in zip(places, results, strict=True):
            bound = result.bound.time_ns / scale
            axis.plot(
                [place - 0.38, place + 0.38],
                [bound, bound],
                color="black",
                linestyle=":",
                label="physical bound" if place == 0 else None,
            )
            saved = 1 - result.total_ns / base
            text = f"{result.total_ns / scale:.3g}" + (f"\n{-100 * saved:+.1f} %" if place else "")
            axis.annotate(
                text,
                (place, result.total_ns / scale),
                ha="center",
                va="bottom",
                fontsize=9,
                xytext=(0, 2),
                textcoords="offset points",
            )
        axis.set_xticks(places, [name for name, _ in results])
        axis.set_ylabel(unit)
        axis.margins(y=0.14)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(
            f"{results[0][1].name.split(', fused')[0]}\n{results[0][1].ranks} ranks, "
            f"{results[0][1].topology}",
            fontsize=11,
            loc="left",
        )
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    title: str,
    labels: tuple[str, str],
    file: Path,
) -> None:
    """A table of numbers as colours, each with its number."""
    import numpy as np

    data = np.array(values, dtype=float)
    with open_figure(file, 2.6 + 0.95 * len(columns), 1.9 + 0.5 * len(rows)) as figure:
        axis = figure.subplots()
        image = axis.imshow(data, cmap="viridis", aspect="auto")
        axis.set_xticks(range(len(columns)), columns)
        axis.set_yticks(range(len(rows)), rows)
        axis.set_xlabel(labels[1])
        axis.set_ylabel(labels[0])
        middle = (np.nanmin(data) + np.nanmax(data)) / 2
        for row in range(len(rows)):
            for column in range(len(columns)):
                value = data[row, column]
                axis.text(
                    column,
                    row,
                    f"{value:.1f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if value < middle else "black",
                )
        axis.set_title(title, fontsize=11, loc="left")
        figure.colorbar(image, ax=axis)


def correlation(
    points: Sequence[tuple[str, float, float]], title: str, labels: tuple[str, str], file: Path
) -> None:
    """(group, theirs, ours) on logarithmic axes, with the diagonal."""
    markers = ("o", "s", "^", "D", "v", "P", "X")
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
    with open_figure(file, 6.4, 5.6) as figure:
        axis = figure.subplots()
        low, high = min(min(p[1:]) for p in points) / 1.5, max(max(p[1:]) for p in points) * 1.5
        axis.plot([low, high], [low, high], color="#BBBBBB", linewidth=1, zorder=0)
        for number, group in enumerate(dict.fromkeys(point[0] for point in points)):
            mine = [point for point in points if point[0] == group]
            axis.scatter(
                [p[1] for p in mine],
                [p[2] for p in mine],
                s=26,
                alpha=0.75,
                label=f"{group} ({len(mine)})",
                marker=markers[number % 7],
                color=colours[number % 7],
            )
        axis.set(
            xscale="log",
            yscale="log",
            xlim=(low, high),
            ylim=(low, high),
            xlabel=labels[0],
            ylabel=labels[1],
        )
        axis.set_title(title, fontsize=11, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)


def tornado(
    rows: Sequence[tuple[str, float, float, str, str]],
    base: float,
    published: float,
    title: str,
    label: str,
    file: Path,
) -> None:
    """(assumption, value at low, value at high, name of low, name of high), the widest first,
    around the base.
    """
    from matplotlib.patches import Patch

    ordered = sorted(rows, key=lambda row: max(row[1], row[2], base) - min(row[1], row[2], base))
    with open_figure(file, 10, 1.9 + 0.34 * len(ordered)) as figure:
        axis = figure.subplots()
        for place, (_, low, high, _, _) in enumerate(ordered):
            for value, colour in sorted(
                ((low, "#56B4E9"), (high, "#0072B2")), key=lambda end: -abs(end[0] - base)
            ):
                axis.barh(place, value - base, left=base, height=0.66, color=colour)
        axis.axvline(base, color="black", linewidth=1)
        axis.axvline(published, color="#D55E00", linestyle="--", linewidth=1.3)
        paper_side = 1 if published > base else -1
        for value, text, colour, side in (
            (published, f"paper: {published:g} %", "#D55E00", paper_side),
            (base, f"presets: {base:.1f} %", "black", -paper_side),
        ):
            spot = (value, len(ordered) - 0.3)
            axis.annotate(
                text,
                spot,
                color=colour,
                fontsize=9,
                ha="left" if side > 0 else "right",
                xytext=(4 * side, 0),
                textcoords="offset points",
            )
        axis.set_yticks(
            range(len(ordered)), [f"{row[0]}: {row[3]} to {row[4]}" for row in ordered], fontsize=9
        )
        axis.set_xlabel(label)
        axis.set_ylim(-0.6, len(ordered) + 0.2)
        axis.margins(x=0.05)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
        figure.suptitle(title, fontsize=11)
        handles = [
            Patch(color="#56B4E9", label="at the first value"),
            Patch(color="#0072B2", label="at the second value"),
        ]
        axis.legend(handles=handles, frameon=False, fontsize=9, loc="lower right")


def curve(
    x: Sequence[int],
    lines: Sequence[tuple[str, Sequence[float]]],
    marks: Sequence[tuple[str, float]],
    title: str,
    labels: tuple[str, str],
    file: Path,
) -> None:
    """Lines over a logarithmic axis, and horizontal marks."""
    colours = (
        "#0072B2",
        "#D55E00",
        "#009E73",
        "#CC79A7",
        "#E69F00",
        "#56B4E9",
        "#000000",
        "#8C6D31",
    )
    with open_figure(file, 8, 4.6) as figure:
        axis = figure.subplots()
        for number, (name, values) in enumerate(lines):
            axis.plot(
                x,
                values,
                marker="o",
                markersize=4,
                label=name,
                color=colours[number // 2 % 8],
                linestyle="-" if number % 2 else "--",
            )
        for name, value in marks:
            axis.axhline(value, color="black", linestyle=":", linewidth=1.2)
            axis.annotate(
                name, (1.01, value), xycoords=("axes fraction", "data"), va="center", fontsize=9
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(x), [str(value) for value in x])
        axis.set_xlabel(labels[0])
        axis.set_ylabel(labels[1])
        axis.set_ylim(bottom=min(0, *(min(values) for _, values in lines)))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axis.set_title(title, fontsize=11, loc="left")


def _unit(largest_ns: float) -> tuple[float, str]:
    return (1e6, "milliseconds") if largest_ns >= 1e6 else (1e3, "microseconds")
