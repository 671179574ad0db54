"""One layer of a step as a picture: what of it waits for communication, unfused and fused."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from interlace.figure import open_figure, time_unit
from interlace.units import format_ns
from interlace_sim.results import Result, Span
from interlace_sim.timeline import bar_of, family_of, legend_of

_LAYER = re.compile(r"^(?:m\d+ )?l(\d+) ")
_CHARACTER_INCHES = 0.066  # of the labels in bars
_INCHES = 11.0  # of both columns
_MOST_LINES = 4


class Window(NamedTuple):
    """The tasks of one layer in one pass, as rank 0 ran them.

    Attributes:
        title: The pass: forward or backward.
        start_ns, end_ns: From the first task's start to the last one's end.
        spans: The tasks, without the layer in their names.
    """

    title: str
    start_ns: int
    end_ns: int
    spans: tuple[Span, ...]


def has_layers(result: Result) -> bool:
    """Tell if a result is of a model with layers that are alike."""
    return any(_LAYER.match(span.name) for span in result.spans)


def windows(result: Result) -> tuple[int, list[Window]]:
    """Return the layer in the middle, and its forward and backward pass of the first microbatch.

    All-reduces of gradients are left out: they run while other layers compute.
    """
    spans = [span for span in result.spans if _LAYER.match(span.name) and span.row != "gradients"]
    layers = sorted({int(match[1]) for span in spans if (match := _LAYER.match(span.name))})
    layer = layers[len(layers) // 2]
    first = min(spans, key=lambda span: span.start_ns).name
    microbatch = first.split()[0] + " " if first.startswith("m") else ""
    prefix = f"{microbatch}l{layer} "
    passes: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.name.startswith(prefix):
            name = span.name.removeprefix(prefix)
            title = "backward" if re.search("gradient|backward", name) else "forward"
            passes.setdefault(title, []).append(Span(span.row, name, span.start_ns, span.end_ns))
    return layer, [
        Window(title, found[0].start_ns, max(span.end_ns for span in found), tuple(found))
        for title, found in passes.items()
    ]


def layer(results: Sequence[Result], file: Path) -> None:
    """Draw one layer of each result: a panel per result, with its forward and its backward pass.

    Raises:
        ArgumentError: the file cannot be written.
    """
    found = [windows(result) for result in results]
    lengths = [
        max(window.end_ns - window.start_ns for window in column)
        for column in zip(*(passes for _, passes in found), strict=True)
    ]
    rows = [_rows(passes) for _, passes in found]
    scale, unit = time_unit(max(lengths))
    with open_figure(file, _INCHES + 1, 1.5 + sum(0.5 + 0.75 * len(names) for names in rows)) as (
        figure
    ):
        axes = figure.subplots(
            len(results),
            len(lengths),
            sharex="col",
            sharey="row",
            squeeze=False,
            height_ratios=[0.4 + len(names) for names in rows],
            width_ratios=lengths,
        )
        used: dict[str, Any] = {}
        for line, result, (number, passes), names in zip(axes, results, found, rows, strict=True):
            times = [format_ns(window.end_ns - window.start_ns) for window in passes]
            for axis, window, time in zip(line, passes, times, strict=True):
                _pass(axis, window, names, scale, _INCHES * scale / sum(lengths), used)
                axis.set_title(f"\n{window.title}: {time}", loc="left", fontsize=10)
            # The name goes over both columns.
            title = f"{result.name}; layer {number}\n{passes[0].title}: {times[0]}"
            line[0].set_title(title, loc="left", fontsize=10)
        for axis, length in zip(axes[-1], lengths, strict=True):
            axis.set_xlim(0, length / scale)
            axis.set_xlabel(f"{unit} from the layer's first task")
        legend_of(figure, used)


def _edges(row: int, rows: int) -> tuple[float, float]:
    """Return the lower and the upper end of a row, as shares of the panel's height."""
    return 1 - (row + 0.9) / rows, 1 - (row + 0.1) / rows


def _rows(passes: Sequence[Window]) -> list[str]:
    """List the streams of a layer: computation first."""
    names = {span.row for window in passes for span in window.spans}
    return sorted(names, key=lambda name: (name != "compute", name))


def _pass(
    axis: Any,
    window: Window,
    names: Sequence[str],
    scale: float,
    inches: float,
    used: dict[str, Any],
) -> None:
    """Draw one pass; a bar has its task's name where there is room.

    Args:
        inches: Length of a unit of the axis.
    """
    for span in window.spans:
        family, is_fused = family_of(span.name), " + " in span.name
        start, length = (span.start_ns - window.start_ns), span.end_ns - span.start_ns
        row = names.index(span.row)
        bar_of(axis, row, (start / scale, length / scale), (family, is_fused), used)
        axis.axvline(start / scale, *_edges(row, len(names)), color="white", linewidth=1.5)
        characters = int(length / scale * inches / _CHARACTER_INCHES)
        lines = textwrap.wrap(
            span.name, max(1, characters), break_long_words=False, break_on_hyphens=False
        )
        if len(lines) <= _MOST_LINES and max(map(len, lines)) <= characters:
            axis.text(
                (start + length / 2) / scale,
                row,
                "\n".join(lines),
                ha="center",
                va="center",
                fontsize=7,
                bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
            )
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
