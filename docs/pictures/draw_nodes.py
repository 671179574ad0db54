"""Draw the picture of docs/nodes.md: ``python docs/pictures/draw_nodes.py``.

Needs matplotlib. The picture explains; it shows no measurement.
"""

from __future__ import annotations

import matplotlib as mpl
from draw import COMPUTE, GREY, PALE, SEND, SHADES, SUM, arrow, block, box, canvas, label, save

_SLICES = 4
_LEFT, _WIDTH = 20.0, 11.0


def nodes() -> None:
    """Two nodes of two ranks, and one rank's call over time."""
    figure, axes = canvas(104, 62)
    label(axes, 2, 59.5, "Two nodes: what is mapped, and what leaves in slices", bold=True, size=10)
    for node in range(2):
        x = 2 + 56 * node
        box(axes, x, 41, 44, 16, fill=PALE)
        label(axes, x + 2, 55, f"node {node}", bold=True, size=9)
        for local in range(2):
            box(axes, x + 3 + 20 * local, 43.5, 18, 8.5, fill=SHADES[2 * node + local])
            label(axes, x + 12 + 20 * local, 50, f"rank {2 * node + local}", ha="center", size=8.5)
            label(
                axes, x + 12 + 20 * local, 46.3, "mapped by its node", ha="center", size=7.5, color=GREY
            )
    arrow(axes, (46.3, 50), (57.7, 50), color=SEND)
    arrow(axes, (57.7, 47.5), (46.3, 47.5), color=SEND)
    label(axes, 52, 52.3, "network", ha="center", size=8, color=GREY)
    label(axes, 52, 44.6, "not mapped", ha="center", size=7.5, color=GREY)

    label(axes, 2, 37, "A call on rank 0, over time", bold=True, size=10)
    for y, text in ((31.5, "kernel"), (24.5, "counters"), (17.5, "network stream"), (10.5, "landing")):
        label(axes, _LEFT - 1, y, text, ha="right", color=GREY)
    for k in range(_SLICES):
        x = _LEFT + _WIDTH * k
        block(axes, x, 29.2, _WIDTH - 0.3, 4.6, COMPUTE)
        label(axes, x + _WIDTH / 2, 31.5, f"slice {k}", ha="center", size=8, color="white")
        steps = 6
        xs = [x + _WIDTH * (i // 2) / steps for i in range(1, 2 * steps + 1)]
        ys = [22.4 + 4.0 * (i // 2) / steps for i in range(2 * steps)]
        axes.plot(xs, ys, color=COMPUTE, linewidth=1.2)
        end = x + _WIDTH
        axes.plot([end, end], [20.0, 29.0], color=GREY, linewidth=0.8, linestyle=":")
        block(axes, end, 15.2, _WIDTH - 0.3, 4.6, SEND)
        label(axes, end + _WIDTH / 2, 17.5, f"exchange {k}", ha="center", size=8, color="white")
        arrow(axes, (end + _WIDTH - 0.5, 15.0), (end + _WIDTH - 0.5, 12.8), color=GREY)
        block(axes, end + _WIDTH - 4, 8.6, 3.7, 4.0, SHADES[2])
    x = _LEFT + _WIDTH * _SLICES
    block(axes, x, 29.2, 2 * _WIDTH - 0.3, 4.6, SHADES[0])
    label(axes, x + _WIDTH, 31.5, "this node's rows", ha="center", size=8)
    block(axes, x + 2 * _WIDTH, 29.2, 13.0, 4.6, SUM)
    label(axes, x + 2 * _WIDTH + 6.5, 31.5, "collect or add", ha="center", size=8, color="white")
    label(axes, 2, 4.6, "The kernel counts each block that it has staged; a stream operation (a thread on the", size=8.5)
    label(axes, 2, 2.2, "CPU backend) waits for the count, then one exchange sends and receives a slice per peer.", size=8.5)
    save(figure, "nodes")


if __name__ == "__main__":
    mpl.rcParams.update({"svg.hashsalt": "interlace", "font.family": "sans-serif"})
    mpl.rcParams["font.sans-serif"] = ["DejaVu Sans"]
    nodes()
