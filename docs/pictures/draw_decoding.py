"""Draw the picture of docs/decoding.md: ``python docs/pictures/draw_decoding.py``.

Needs matplotlib. The picture shows what ``benchmarks/decode_layer.py`` has measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import matplotlib as mpl
from draw import COMPUTE, FOLDER, GREY, PALE, SEND, SHADES, SUM, block, canvas, label, legend, save

MEASURED = "../../benchmarks/results/exploration/2026-11-25-decode-layer-2xh200.json"

_LEFT, _SCALE = 14.0, 0.295
"""Where time 0 is, and units of the picture per microsecond."""

_HEIGHT = 5.0
_NOTHING = "between kernels"
# Part of a kernel's name -> what it does; the first part that is found counts.
_KINDS = {
    "multiply_sum_and_norm": "product, sum, residual and norm",
    "AllReduce": "all-reduce of NCCL",
    "sdpa": "attention",
    "multiply_few_rows": "product",
    "nvjet": "product",
    "splitKreduce": "product",
    "": "elementwise kernels, norms",
}
_COLOURS = {
    "product": COMPUTE,
    "product, sum, residual and norm": SHADES[2],
    "all-reduce of NCCL": SEND,
    "attention": SUM,
    "elementwise kernels, norms": GREY,
    _NOTHING: PALE,
}
# What the products and sums of a layer are, in their order. Inductor has more kernels for the same.
_NAMES = {
    "Inductor": ("q", "k", "v", "o", "sum", "gate", "up", "down", "sum"),
    "Interlace": ("q k v", "o, sum, norm", "gate, up", "down, sum, norm"),
}
_SHORTEST_US = 7.0
"""Bars shorter than this have no room for their name."""


def kind_of(kernel: str) -> str:
    """Return what a kernel does."""
    return next(kind for part, kind in _KINDS.items() if part in kernel)


def layer() -> None:
    """One layer of a decoding step, by Inductor and by Interlace."""
    results = json.loads((FOLDER / MEASURED).read_text(encoding="utf-8"))["results"]
    ends = {result["way"]: result["kernels"][-1][2] for result in results}
    saved = 1 - ends["Interlace"] / ends["Inductor"]
    figure, axes = canvas(113, 34)
    title = f"One layer of a decoding step takes {saved:.0%} less time"
    label(axes, 2, 31.5, title, bold=True, size=11)
    text = "Llama 3 70B, one sequence, one of two H200s; gate, up and down have 235 MB of weights each"
    label(axes, 2, 28.8, text, size=8.5, color=GREY)
    for y, result in zip((19.5, 11.0), results, strict=True):
        way, kernels = result["way"], result["kernels"]
        label(axes, _LEFT - 1, y + _HEIGHT / 2, way, ha="right", bold=True)
        block(axes, _LEFT, y, ends[way] * _SCALE, _HEIGHT, PALE)
        for name, start, end in kernels:
            width = (end - start) * _SCALE
            block(axes, _LEFT + start * _SCALE, y, width, _HEIGHT, _COLOURS[kind_of(name)])
        _name_bars(axes, y, kernels, _NAMES[way])
        label(axes, _LEFT + ends[way] * _SCALE + 1, y + _HEIGHT / 2, f"{ends[way]:.0f} us", bold=True)
    axis_y = 8.2
    for us in range(0, 301, 50):
        x = _LEFT + us * _SCALE
        axes.plot([x, x], [axis_y, axis_y + 0.8], color=GREY, linewidth=0.8)
        label(axes, x, axis_y - 1.3, f"{us}" if us else "0 us", ha="center", size=8, color=GREY)
    x = 2.0
    entries = []
    for kind, colour in _COLOURS.items():
        entries.append((x, colour, kind))
        x += 5.5 + 0.72 * len(kind)
    legend(axes, 1.5, entries)
    save(figure, "decoding-layer")


def _name_bars(
    axes: mpl.axes.Axes, y: float, kernels: Iterable[tuple[str, float, float]], names: Iterable[str]
) -> None:
    """Write into products and sums what they are, where there is room."""
    remaining = iter(names)
    for name, start, end in kernels:
        kind = kind_of(name)
        if kind in ("attention", "elementwise kernels, norms") or "splitKreduce" in name:
            continue
        text = next(remaining)
        if end - start >= _SHORTEST_US:
            middle = _LEFT + (start + end) / 2 * _SCALE
            is_dark = kind == "product"
            small = len(text) * 0.95 > (end - start) * _SCALE
            label(
                axes, middle, y + _HEIGHT + 0.9 if small else y + _HEIGHT / 2, text, ha="center",
                size=7 if small else 8, color="white" if is_dark and not small else "#24292f",
            )


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "interlace"
    layer()
