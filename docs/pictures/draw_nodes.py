"""Draw the picture of docs/nodes.md: ``python docs/pictures/draw_nodes.py``.

Needs matplotlib. The picture explains; it shows no measurement.
"""

from __future__ import annotations

import matplotlib as mpl
from draw import COMPUTE, GREY, PALE, SEND, SHADES, SUM, arrow, block, box, canvas, label, save

_SLICES = 4
_LEFT, _WIDTH = 20.0, 11.0
_EXCHANGE = 17.0


def nodes() -> None:
    """Two nodes of two ranks, and one rank's call over time."""
    figure, axes = canvas(104, 68)
    label(axes, 2, 65.5, "Two nodes: what is mapped, and what leaves in slices", bold=True, size=10)
    for node in range(2):
        x = 2 + 56 * node
        box(axes, x, 47, 44, 16, fill=PALE)
        label(axes, x + 2, 61, f"node {node}", bold=True, size=9)
        for local in range(2):
            box(axes, x + 3 + 20 * local, 49.5, 18, 8.5, fill=SHADES[2 * node + local])
            label(axes, x + 12 + 20 * local, 56, f"rank {2 * node + local}", ha="center", size=8.5)
            label(
                axes, x + 12 + 20 * local, 52.3, "mapped by its node", ha="center", size=7.5, color=GREY
            )
    arrow(axes, (46.3, 56), (57.7, 56), color=SEND)
    arrow(axes, (57.7, 53.5), (46.3, 53.5), color=SEND)
    label(axes, 52, 58.3, "network", ha="center", size=8, color=GREY)
    label(axes, 52, 50.6, "not mapped", ha="center", size=7.5, color=GREY)

    label(axes, 2, 43, "A call on rank 0, over time", bold=True, size=10)
    rows = ("kernel", 37.5), ("counters", 30.5), ("lane 0", 23.5), ("lane 1", 17.0), ("landing", 10.5)
    for text, y in rows:
        label(axes, _LEFT - 1, y, text, ha="right", color=GREY)
    for k in range(_SLICES):
        x = _LEFT + _WIDTH * k
        block(axes, x, 35.2, _WIDTH - 0.3, 4.6, COMPUTE)
        label(axes, x + _WIDTH / 2, 37.5, f"slice {k}", ha="center", size=8, color="white")
        steps = 6
        xs = [x + _WIDTH * (i // 2) / steps for i in range(1, 2 * steps + 1)]
        ys = [28.4 + 4.0 * (i // 2) / steps for i in range(2 * steps)]
        axes.plot(xs, ys, color=COMPUTE, linewidth=1.2)
        end, lane = x + _WIDTH, 21.2 - 6.5 * (k % 2)
        axes.plot([end, end], [lane + 4.8, 35.0], color=GREY, linewidth=0.8, linestyle=":")
        block(axes, end, lane, _EXCHANGE - 0.3, 4.6, SEND)
        label(axes, end + _EXCHANGE / 2, lane + 2.3, f"exchange {k}", ha="center", size=8, color="white")
        arrow(axes, (end + _EXCHANGE - 0.5, lane - 0.2), (end + _EXCHANGE - 0.5, 12.8), color=GREY)
        block(axes, end + _EXCHANGE - 4, 8.6, 3.7, 4.0, SHADES[2])
    x = _LEFT + _WIDTH * _SLICES
    block(axes, x, 35.2, 2 * _WIDTH - 0.3, 4.6, SHADES[0])
    label(axes, x + _WIDTH, 37.5, "this node's rows", ha="center", size=8)
    block(axes, x + 2 * _WIDTH, 35.2, 13.0, 4.6, SUM)
    label(axes, x + 2 * _WIDTH + 6.5, 37.5, "collect or add", ha="center", size=8, color="white")
    label(axes, 2, 4.6, "The kernel counts each block that it has staged; a stream operation (a thread on the CPU", size=8.5)
    label(axes, 2, 2.2, "backend, which has one lane) waits for the count, then one exchange sends and receives a slice per peer.", size=8.5)
    save(figure, "nodes")


if __name__ == "__main__":
    mpl.rcParams.update({"svg.hashsalt": "interlace", "font.family": "sans-serif"})
    mpl.rcParams["font.sans-serif"] = ["DejaVu Sans"]
    nodes()
