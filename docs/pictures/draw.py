"""Draw the pictures of the documentation: ``python docs/pictures/draw.py`` writes them beside this file.

Needs matplotlib. The pictures explain; none of them shows a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

FOLDER = Path(__file__).parent

INK = "#24292f"
GREY = "#6e7781"
PALE = "#eaeef2"
COMPUTE = "#4c8dd6"
SEND = "#e8833a"
SUM = "#3f9d6b"
SHADES = ("#cfe3f8", "#fbdfc6", "#cfead9", "#e6d9f5")
RANKS = ("#4c8dd6", "#e8833a", "#3f9d6b", "#8e6bbf")


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty page of ``width`` x ``height`` units, ten units to an inch."""
    figure, axes = plt.subplots(figsize=(width / 10, height / 10))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str = "",
    *,
    fill: str = PALE,
    size: float = 9,
    bold: bool = False,
) -> None:
    """A rounded box with centred text."""
    style = "round,pad=0,rounding_size=0.6"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=GREY, linewidth=0.8))
    weight = "bold" if bold else "normal"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=INK, fontsize=size, weight=weight)


def block(axes: Axes, x: float, y: float, width: float, height: float, fill: str) -> None:
    """A filled rectangle: something that takes time, or a piece of memory."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor="white", linewidth=0.7))


def label(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    ha: str = "left",
    size: float = 9,
    color: str = INK,
    bold: bool = False,
    mono: bool = False,
) -> None:
    """Text, centred vertically on ``y``."""
    family = "monospace" if mono else "sans-serif"
    weight = "bold" if bold else "normal"
    axes.text(x, y, text, ha=ha, va="center", fontsize=size, color=color, weight=weight, family=family)


def legend(axes: Axes, y: float, entries: Sequence[tuple[float, str, str]]) -> None:
    """What colours mean: entries of x, colour and text, their blocks on ``y``."""
    for x, fill, text in entries:
        block(axes, x, y, 2.2, 2.0, fill)
        label(axes, x + 3, y + 1, text, size=8.5)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], *, color: str = INK) -> None:
    """An arrow from ``start`` to ``end``."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            color=color,
            linewidth=1.2,
            shrinkA=0,
            shrinkB=0,
        )
    )


def save(figure: Figure, name: str) -> None:
    """Write SVG and PNG, the same bytes on every run with the same matplotlib."""
    figure.savefig(FOLDER / f"{name}.svg", facecolor="white", metadata={"Date": None})
    figure.savefig(FOLDER / f"{name}.png", facecolor="white", dpi=160, metadata={"Software": None})
    plt.close(figure)


# When each tile's product ends on each of four lanes, in units of the picture.
_TILES = (
    (11.0, 22.5, 33.0),
    (12.5, 23.0, 35.0),
    (10.5, 21.5, 32.0),
    (13.0, 24.5, 36.0),
)


def _tiles(axes: Axes, left: float, top: float) -> None:
    for lane, ends in enumerate(_TILES):
        begin = 0.0
        for end in ends:
            block(axes, left + begin, top - 2.6 * (lane + 1), end - begin, 2.2, COMPUTE)
            begin = end


def fused() -> None:
    """One rank's programs and links over time, for the unfused pair and for the fused kernel."""
    figure, axes = canvas(88, 45)
    left = 15.0
    top = 40.0
    label(axes, 2, 42.3, "Unfused: a GEMV kernel, then an all-reduce kernel", bold=True, size=10)
    _tiles(axes, left, top)
    label(axes, left - 1, top - 5.4, "programs", ha="right", color=GREY)
    for lane in range(4):
        block(axes, left + 41, top - 2.6 * (lane + 1), 22, 2.2, SHADES[2])
    label(axes, left + 52, top - 5.4, "all-reduce", ha="center")
    label(axes, left + 38.5, top - 5.4, "start", ha="center", size=7.5, color=GREY)
    label(axes, left - 1, top - 12.4, "links", ha="right", color=GREY)
    block(axes, left, top - 13.4, 43, 2.0, PALE)
    label(axes, left + 21, top - 12.4, "idle", ha="center", size=8, color=GREY)
    block(axes, left + 43, top - 13.4, 17, 2.0, SEND)
    block(axes, left + 60, top - 13.4, 3, 2.0, PALE)

    top = 20.0
    label(axes, 2, 22.3, "Fused: one kernel; a tile's sums leave as soon as they are computed", bold=True, size=10)
    _tiles(axes, left, top)
    label(axes, left - 1, top - 5.4, "programs", ha="right", color=GREY)
    label(axes, left - 1, top - 12.4, "links", ha="right", color=GREY)
    block(axes, left, top - 13.4, 41.5, 2.0, PALE)
    for lane, ends in enumerate(_TILES):
        y = top - 2.6 * (lane + 1)
        for end in ends:
            block(axes, left + end, top - 13.4, 1.0, 2.0, SEND)
            block(axes, left + end - 0.35, y, 0.7, 2.2, SEND)
        block(axes, left + ends[-1] + 0.35, y, 41.5 - ends[-1] - 0.35, 2.2, SUM)
    end = left + 41.5
    axes.plot([end, end], [top - 14, top], color=GREY, linewidth=0.9, linestyle=":")
    arrow(axes, (left + 63, top - 5.4), (end + 0.4, top - 5.4), color=GREY)
    label(axes, left + 52.4, top - 3.9, "saved", ha="center", color=GREY)
    axes.plot([left + 63, left + 63], [top - 14, 40], color=GREY, linewidth=0.9, linestyle=":")

    legend(axes, 2.0, ((15, COMPUTE, "multiply a tile"), (33, SEND, "put to the peers"), (51, SUM, "wait and sum")))
    label(axes, 86, 3.0, "one of four ranks; not to scale", ha="right", size=8, color=GREY)
    save(figure, "fused")


def architecture() -> None:
    """The layers, top to bottom: each imports only what is below it."""
    figure, axes = canvas(96, 100.4)
    axes.set_ylim(-25.9, 74.5)
    label(axes, 2, 72, "Layers: each imports only what is below it", bold=True, size=10)
    layers = (
        ((27, "cli\ndoctor explain trace bench tune ...", SHADES[3]), (16, "integrations\nother programs", SHADES[3])),
        ((22, "bench\nmeasures", SHADES[3]), (21, "testing\ncases, the soak", SHADES[3])),
        ((22, "nn\nmodules, plans", SHADES[3]), (21, "compile\nfuses a model", SHADES[3])),
        ((44, "operators\none declaration each", SHADES[0]),),
        ((44, "gemm\ncall, schema, dispatch, implementations, kernels", SHADES[0]),),
        ((26, "mapped\noutputs on peers, and copies to them", SHADES[0]), (17, "tracing\ntimelines of kernels", SHADES[0])),
        ((26, "language\nTriton primitives", SHADES[0]), (17, "tuning\nsizes → config", SHADES[0])),
        ((44, "comm\nlaunching, groups, host, replay, runtime, cpu", SHADES[2]),),
        ((21.5, "registry\noperators", SHADES[1]), (21.5, "costs\npure Python", SHADES[1])),
        ((14, "cache_folder", PALE), (14, "environment", PALE), (14, "figure, units", PALE)),
        ((44, "optim\nupdates applied in the backward pass", PALE),),
        ((44, "extras", PALE),),
        ((44, "errors", PALE),),
    )
    for row, parts in enumerate(layers):
        x = 2.0
        for width, text, fill in parts:
            bold = text.startswith("operators\none")
            box(axes, x, 64.5 - 6.2 * row, width, 5, text, fill=fill, bold=bold)
            x += width + 1
    meanings = (
        (SHADES[3], "what a program or a user calls"),
        (SHADES[0], "operators and their kernels"),
        (SHADES[2], "ranks and their memory"),
        (SHADES[1], "declarations and models, no torch"),
        (PALE, "used everywhere"),
    )
    for i, (fill, meaning) in enumerate(meanings):
        x, y = 2 + 21.5 * (i % 2), -19.1 - 2.6 * (i // 2)
        block(axes, x, y - 0.9, 2.2, 1.8, fill)
        label(axes, x + 3, y, meaning, size=8, color=GREY)

    label(axes, 52, 3.6, "Packages beside the library, which use it", bold=True, size=10)
    packages = (
        ("interlace_dlrm\nclick logs, DLRM, training", "uses public names of the", "library: nn and errors", SHADES[3]),
        ("interlace_explorer\nchecks protocols", "knows language and comm,", "and no operator", SHADES[3]),
        ("interlace_sim\nmany nodes; no torch", "knows operators by", "their costs", SHADES[1]),
        ("interlace_gin\nputs over a network", "knows language and comm,", "and no operator", SHADES[2]),
    )
    for i, (text, first, second, fill) in enumerate(packages):
        y = -3.7 - 6.2 * i
        box(axes, 52, y, 21.5, 5, text, fill=fill)
        label(axes, 75, y + 3.5, first, size=8, color=GREY)
        label(axes, 75, y + 1.5, second, size=8, color=GREY)

    label(axes, 52, 72, "A call, from the user to the peers", bold=True, size=10)
    steps = (
        ("function", "validates; never sends anything", SHADES[0]),
        ("schema", "shapes, gradient: torch.ops.interlace.*", SHADES[0]),
        ("dispatch", "agrees once, chooses an implementation", SHADES[0]),
        ("kernel", "compute, put, wait, sum", SHADES[0]),
        ("language", "a peer is an index: pointer + peer × stride", SHADES[0]),
    )
    for i, (name, text, fill) in enumerate(steps):
        y = 63 - 8.2 * i
        box(axes, 52, y, 10, 4.2, name, fill=fill, bold=True)
        label(axes, 63.5, y + 2.1, text, size=8.5)
        arrow(axes, (57, y), (57, y - 4.0 if name != "language" else 19.3), color=GREY)
    label(axes, 52, 17.7, "the group's memory", size=8.5, color=GREY)
    for r in range(4):
        box(axes, 52 + 9.6 * r, 11.2, 8.6, 5, f"peers[{r}]\nrank {r}", fill=SHADES[2], size=8)
    label(axes, 70.9, 9.4, "one address range in every process, one stride between ranks", ha="center", size=8, color=GREY)
    save(figure, "architecture")


def memory_model() -> None:
    """One address range, and the two ways in which a value reaches a peer."""
    figure, axes = canvas(92, 62)
    label(axes, 2, 59.5, "Rank 1's view of the group's memory", bold=True, size=10)
    for r in range(4):
        x = 4 + 21.5 * r
        box(axes, x, 48, 19.5, 7, fill="#ffffff")
        block(axes, x + 4, 48.6, 7, 5.8, SHADES[r])
        label(axes, x + 7.5, 51.5, f"peers[{r}]", ha="center", size=8.5)
        label(axes, x + 9.75, 56.6, f"rank {r}" + (" = local" if r == 1 else ""), ha="center", size=8.5, color=RANKS[r], bold=True)
    for r in range(3):
        arrow(axes, (8 + 21.5 * r, 46.4), (8 + 21.5 * (r + 1), 46.4), color=GREY)
        label(axes, 18.7 + 21.5 * r, 45.0, "stride", ha="center", size=8, color=GREY)
    label(axes, 8, 45.0, "ptr", ha="center", mono=True)
    label(axes, 84, 45.0, "ptr + peer * stride", ha="center", mono=True, size=8.5)

    label(axes, 2, 39.5, "Put, then signal: two stores, ordered by release and acquire", bold=True, size=10)
    box(axes, 2, 22.5, 31, 14.5, fill="#ffffff")
    label(axes, 4, 35.2, "rank 0", color=RANKS[0], bold=True)
    label(axes, 4, 31.8, "il.put(data, tile, peer=1)", mono=True, size=8.5)
    label(axes, 4, 28.4, "barrier of the program's threads", size=8.5, color=GREY)
    label(axes, 4, 25.0, "il.signal(flag, e, peer=1)", mono=True, size=8.5)
    box(axes, 39, 22.5, 19, 14.5, fill="#ffffff")
    label(axes, 41, 35.2, "rank 1's memory", color=RANKS[1], bold=True, size=8.5)
    block(axes, 41, 30.3, 15, 3, SHADES[0])
    label(axes, 48.5, 31.8, "data", ha="center", size=8.5)
    block(axes, 41, 23.5, 15, 3, SHADES[1])
    label(axes, 48.5, 25.0, "flag ← e", ha="center", size=8.5)
    box(axes, 64, 22.5, 26, 14.5, fill="#ffffff")
    label(axes, 66, 35.2, "rank 1", color=RANKS[1], bold=True)
    label(axes, 66, 25.0, "il.wait(flag, e)", mono=True, size=8.5)
    label(axes, 66, 31.8, "il.get(data)", mono=True, size=8.5)
    arrow(axes, (30.5, 31.8), (40.5, 31.8), color=RANKS[0])
    arrow(axes, (30.5, 25.0), (40.5, 25.0), color=RANKS[0])
    label(axes, 35.9, 33.2, "relaxed", ha="center", size=7.5, color=GREY)
    label(axes, 35.9, 26.4, "release", ha="center", size=7.5, color=GREY)
    arrow(axes, (65.5, 25.0), (56.5, 25.0), color=RANKS[1])
    arrow(axes, (65.5, 31.8), (56.5, 31.8), color=RANKS[1])
    label(axes, 61.1, 26.4, "acquire", ha="center", size=7.5, color=GREY)
    arrow(axes, (78, 26.2), (78, 30.6), color=GREY)
    label(axes, 79, 28.4, "then", size=8, color=GREY)

    label(axes, 2, 15.5, "Packed words: one 8-byte store that carries its own proof of arrival", bold=True, size=10)
    for i, fill in enumerate((SHADES[0], SHADES[1])):
        block(axes, 41 + 8.5 * i, 6.5, 8.5, 4, fill)
    label(axes, 45.25, 8.5, "float32", ha="center", size=8.5)
    label(axes, 53.75, 8.5, "epoch", ha="center", size=8.5)
    label(axes, 41, 12.0, "bit 63", size=7.5, color=GREY)
    label(axes, 58, 12.0, "bit 0", size=7.5, color=GREY, ha="right")
    label(axes, 2, 8.5, "il.put_packed(slot, part, e, peer=1)", mono=True, size=8.5)
    arrow(axes, (33, 8.5), (40.5, 8.5), color=RANKS[0])
    arrow(axes, (65.5, 8.5), (58.5, 8.5), color=RANKS[1])
    label(axes, 66, 8.5, "il.sum_packed(slots, ...)", mono=True, size=8.5)
    label(axes, 66, 5.3, "looks until every epoch is e", size=8, color=GREY)
    label(axes, 2, 5.3, "no flag, no fence, any order", size=8, color=GREY)
    save(figure, "memory-model")


def _rows(axes: Axes, x: float, top: float, rows: Sequence[tuple[str, str]]) -> None:
    """Rows of memory from ``top`` down, a fill and a text each."""
    for i, (fill, text) in enumerate(rows):
        block(axes, x, top - 2.2 * (i + 1), 13, 2.0, fill)
        label(axes, x + 6.5, top - 2.2 * (i + 1) + 0.95, text, ha="center", size=7.5)


def mixture_of_experts() -> None:
    """Two ranks, two experts each: where a rank's rows are, from the tokens to their sum."""
    figure, axes = canvas(104, 62)
    label(axes, 2, 60, "Mixture of experts: rows of two ranks (blue, orange), four experts, two a token", bold=True, size=10)
    columns = ((4, "tokens"), (29, "arrivals, by expert"), (58, "results, by expert"), (86, "y"))
    for x, text in columns:
        label(axes, x + 6.5, 56.5, text, ha="center", size=9, bold=True)
    mine, other = SHADES[0], SHADES[1]
    tokens = (("t0: 0, 2", "t1: 0, 3", "t2: 2, 1"), ("t0: 2, 0", "t1: 3, 2", "t2: 0, 3"))
    # Of each rank's experts: whose rows they are, rank 0's first.
    arrivals = (
        ((mine, "E0: t0"), (mine, "E0: t1"), (other, "E0: t0"), (other, "E0: t2"), (PALE, "to 128"), (mine, "E1: t2"), (PALE, "to 128")),
        ((mine, "E2: t0"), (mine, "E2: t2"), (other, "E2: t0"), (other, "E2: t1"), (PALE, "to 128"), (mine, "E3: t1"),
         (other, "E3: t1"), (other, "E3: t2"), (PALE, "to 128")),
    )  # fmt: skip
    results = (
        ("E0: t0", "E0: t1", "", "E1: t2", "", "E2: t0", "E2: t2", "", "E3: t1"),
        ("E0: t0", "E0: t2", "", "E2: t0", "E2: t1", "", "E3: t1", "E3: t2"),
    )
    for rank, top in ((0, 53.0), (1, 26.0)):
        shade = SHADES[rank]
        label(axes, 2, top + 1, f"rank {rank}", color=RANKS[rank], bold=True)
        _rows(axes, 4, top - 2, [(shade, text) for text in tokens[rank]])
        _rows(axes, 29, top, arrivals[rank])
        _rows(axes, 58, top, [(shade, text) if text else (PALE, "to spare") for text in results[rank]])
        _rows(axes, 86, top - 2, [(shade, f"y{i}") for i in range(3)])
        arrow(axes, (71.5, top - 6), (85.5, top - 6), color=SUM)
        label(axes, 78.5, top - 4.6, "weighted sum", ha="center", size=7.5, color=GREY)
    for start, end in (
        ((17.5, 47.6), (28.5, 50.0)),
        ((17.5, 46.4), (28.5, 24.0)),
        ((17.5, 20.4), (28.5, 47.0)),
        ((17.5, 19.6), (28.5, 19.5)),
    ):
        arrow(axes, start, end, color=SEND)
    # One tile of expert 2's rows, from both ranks.
    axes.add_patch(Rectangle((28.6, 17.3), 13.8, 8.8, fill=False, edgecolor=INK, linewidth=1.3))
    label(axes, 28.6, 27.4, "one tile, to both", size=8, color=GREY)
    arrow(axes, (43, 21.8), (57.5, 40.5), color=SEND)
    arrow(axes, (43, 20.4), (57.5, 18.5), color=SEND)
    arrow(axes, (42.5, 48.5), (57.5, 50.0), color=SEND)
    arrow(axes, (42.5, 46.5), (57.5, 24.0), color=SEND)
    legend(axes, 1.0, ((4, SEND, "puts"), (17, SUM, "after all results are here"), (44, PALE, "rows that a tile may run into")))
    label(axes, 102, 2.0, "first product between arrivals and results", ha="right", size=8, color=GREY)
    save(figure, "mixture-of-experts")


def mapped_output() -> None:
    """The address range that rank 1's producer writes, and whose memory it is."""
    figure, axes = canvas(104, 54)
    label(axes, 2, 51.5, "A mapped output of rank 1: one range of addresses, memory of four ranks", bold=True, size=10)
    label(axes, 12, 47.5, "what rank 1's kernel writes", ha="center", size=9, bold=True)
    label(axes, 12, 45.2, "[M, N], rotated order", ha="center", size=8, color=GREY)
    label(axes, 67, 47.5, "each rank's memory: a slot for every source", ha="center", size=9, bold=True)
    for i, rank in enumerate((2, 3, 0, 1)):
        y = 35.0 - 8.6 * i
        block(axes, 3, y, 18, 7.6, SHADES[rank])
        label(axes, 12, y + 4.9, f"rows for rank {rank}", ha="center", size=8.5)
        label(axes, 12, y + 2.4, "first" if i == 0 else "last: its own" if i == 3 else "", ha="center", size=7.5, color=GREY)
    for rank in range(4):
        y = 35.0 - 8.6 * rank
        label(axes, 95, y + 3.8, f"rank {rank}", color=RANKS[rank], bold=True)
        for source in range(4):
            block(axes, 42 + 13 * source, y, 12, 7.6, SHADES[rank] if source == 1 else PALE)
            label(axes, 48 + 13 * source, y + 3.8, f"from rank {source}", ha="center", size=8)
        place = 35.0 - 8.6 * ((2, 3, 0, 1).index(rank))
        arrow(axes, (21.5, place + 3.8), (41.3, y + 3.8), color=RANKS[rank])
    label(
        axes,
        2,
        5.2,
        "Ordinary stores. The kernel knows nothing of it: page tables say whose memory a page of its output is (2 MiB pages on a GPU,",
        size=8.5,
    )
    label(
        axes,
        2,
        2.8,
        "4 KiB on the CPU). exchange() then waits until all ranks have written; a second set of slots takes the next epoch's stores.",
        size=8.5,
    )
    save(figure, "mapped-output")


def triggered_transfers() -> None:
    """One rank of four over time: parts of its product, their counters, the copies that follow, and what is left at the end."""
    figure, axes = canvas(104, 44)
    label(
        axes, 2, 41.5, "Triggered transfers on rank 0: each part leaves when it is complete, by a copy engine", bold=True, size=10
    )
    left, width, copied = 16.0, 17.0, 14.5
    for x, y, text in ((15, 34.6, "processors"), (15, 25.0, "counters"), (15, 15.4, "copy engine")):
        label(axes, x, y, text, ha="right", color=GREY)
    for i, rank in enumerate((1, 2, 3, 0)):
        x = left + i * width
        block(axes, x, 32.0, width - 0.4, 5.2, SHADES[rank])
        label(axes, x + width / 2, 35.5, f"product: rows for rank {rank}" if rank else "product: its own rows", ha="center", size=8)
        label(axes, x + width / 2, 33.5, "stored here", ha="center", size=7.5, color=GREY)
        steps = 8
        xs = [x + width * (k // 2) / steps for k in range(1, 2 * steps + 1)]
        ys = [21.6 + 6.0 * (k // 2) / steps for k in range(2 * steps)]
        axes.plot(xs, ys, color=RANKS[rank], linewidth=1.2)
        axes.plot([x, x + width - 1], [27.0, 27.0], color=GREY, linewidth=0.7, linestyle=":")
        label(axes, x + 0.5, 28.2, "all its tiles", size=7.5, color=GREY)
        if rank:
            axes.plot([x + width, x + width], [18.2, 32.0], color=GREY, linewidth=0.9, linestyle=":")
            block(axes, x + width, 12.8, copied, 5.2, SHADES[rank])
            label(axes, x + width + copied / 2, 15.4, f"to rank {rank}", ha="center", size=8)
    end = left + 4 * width
    block(axes, end + 0.4, 32.0, 2.4, 5.2, GREY)
    block(axes, end + 2.9, 32.0, 7.0, 5.2, SUM)
    label(axes, end + 1.6, 30.4, "barrier", ha="center", size=7.5, color=GREY)
    label(axes, end + 6.4, 34.6, "sum", ha="center", size=8, color="white")
    label(axes, 2, 8.0, "Who says that a part is complete:", size=8.5, bold=True)
    label(axes, 30, 8.0, "the program, with send(part) after each of several kernels: plain cuBLAS, say;", size=8.5)
    label(axes, 30, 5.4, "or one kernel, which adds 1 to a counter per tile: a stream operation waits for it.", size=8.5)
    label(axes, 102, 2.0, "not to scale; the sum is a reduce-scatter's", ha="right", size=8, color=GREY)
    save(figure, "triggered-transfers")


def main() -> None:
    """Draw them all."""
    mpl.rcParams.update({"svg.hashsalt": "interlace", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]})
    fused()
    architecture()
    memory_model()
    mixture_of_experts()
    mapped_output()
    triggered_transfers()


if __name__ == "__main__":
    main()
