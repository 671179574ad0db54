"""Pictures of results: timelines, bars, heat maps, correlation, tornado, curves.

Each function writes one PNG, SVG or PDF file, its last argument, and raises ArgumentError if the
file cannot be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from interlace.figure import open_figure, time_unit
from interlace.units import format_number
from interlace_sim.layer_picture import has_layers, layer
from interlace_sim.results import Result
from interlace_sim.timeline import ADDED, timeline

__all__ = [
    "bars",
    "correlation",
    "curve",
    "has_layers",
    "heat_map",
    "layer",
    "open_figure",
    "timeline",
    "tornado",
]


def bars(results: Sequence[tuple[str, Result]], file: Path) -> None:
    """Draw each result's computation and exposed communication as a bar, and its physical bound."""
    with open_figure(file, 2.2 + 1.5 * len(results), 4.4) as figure:
        axis = figure.subplots()
        scale, unit = time_unit(max(result.total_ns for _, result in results))
        # Savings refer to the first bar, which callers make the unfused one.
        base = results[0][1].total_ns
        computed = [
            (result.total_ns - result.exposed_ns - result.added_ns) / scale for _, result in results
        ]
        exposed = [result.exposed_ns / scale for _, result in results]
        added = [result.added_ns / scale for _, result in results]
        positions = range(len(results))
        figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)
        axis.bar(positions, computed, color="#9AA5B1", width=0.6, label="computation")
        axis.bar(
            positions,
            exposed,
            bottom=computed,
            color="#D55E00",
            width=0.6,
            label="exposed communication",
        )
        if any(added):
            bottom = [a + b for a, b in zip(computed, exposed, strict=True)]
            axis.bar(
                positions,
                added,
                bottom=bottom,
                width=0.6,
                label="pipeline fill and drain",
                **ADDED,
            )
        for position, (_, result) in zip(positions, results, strict=True):
            bound = result.bound.time_ns / scale
            axis.plot(
                [position - 0.38, position + 0.38],
                [bound, bound],
                color="black",
                linestyle=":",
                label="physical bound" if position == 0 else None,
            )
            # The first bar is the reference, so its own label has no percentage.
            saved = 1 - result.total_ns / base
            text = format_number(result.total_ns / scale) + (
                f"\n{-100 * saved:+.1f} %" if position else ""
            )
            axis.annotate(
                text,
                (position, result.total_ns / scale),
                ha="center",
                va="bottom",
                fontsize=9,
                xytext=(0, 2),
                textcoords="offset points",
            )
        axis.set_xticks(positions, [name for name, _ in results])
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
    """Draw a table of numbers as colours, with the numbers."""
    import numpy as np

    data = np.array(values, dtype=float)
    with open_figure(file, 2.6 + 0.95 * len(columns), 1.9 + 0.5 * len(rows)) as figure:
        axis = figure.subplots()
        image = axis.imshow(data, cmap="viridis", aspect="auto")
        axis.set_xticks(range(len(columns)), columns)
        axis.set_yticks(range(len(rows)), rows)
        axis.set_xlabel(labels[1])
        axis.set_ylabel(labels[0])
        # White on the dark half of the colour map, black on the light half.
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
    """Draw points (group, theirs, ours) on logarithmic axes, with the diagonal."""
    markers = ("o", "s", "^", "D", "v", "P", "X")
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
    with open_figure(file, 6.4, 5.6) as figure:
        axis = figure.subplots()
        # A margin of a factor of 1.5 keeps the outermost points off the frame.
        low, high = min(min(p[1:]) for p in points) / 1.5, max(max(p[1:]) for p in points) * 1.5
        axis.plot([low, high], [low, high], color="#BBBBBB", linewidth=1, zorder=0)
        for number, group in enumerate(dict.fromkeys(point[0] for point in points)):
            selected = [point for point in points if point[0] == group]
            axis.scatter(
                [p[1] for p in selected],
                [p[2] for p in selected],
                s=26,
                alpha=0.75,
                label=f"{group} ({len(selected)})",
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
    """Draw the range of each assumption around the base, the widest on top.

    Args:
        rows: (assumption, value at low, value at high, name of low, name of high).
        base: Value with all assumptions as in the presets.
        published: Value of the paper.
        title: Heading.
        label: Title of the horizontal axis.
        file: Picture file.
    """
    from matplotlib.patches import Patch

    ordered = sorted(rows, key=lambda row: max(row[1], row[2], base) - min(row[1], row[2], base))
    with open_figure(file, 10, 1.9 + 0.34 * len(ordered)) as figure:
        axis = figure.subplots()
        for position, (_, low, high, _, _) in enumerate(ordered):
            # The longer bar is drawn first, so that one on its side does not hide the shorter one.
            for value, colour in sorted(
                ((low, "#56B4E9"), (high, "#0072B2")), key=lambda end: -abs(end[0] - base)
            ):
                axis.barh(position, value - base, left=base, height=0.66, color=colour)
        axis.axvline(base, color="black", linewidth=1)
        axis.axvline(published, color="#D55E00", linestyle="--", linewidth=1.3)
        # The two labels point away from each other, so that they do not overlap.
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
    """Draw lines over a logarithmic axis, and horizontal marks."""
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
        # Lines come in pairs of one colour: forward dashed, both passes solid.
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
