"""Pictures of the down projection: who sent what when (CPU), how long it took (CUDA); as PNG and as
text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo_script import count

from interlace.figure import open_figure

# Okabe and Ito's colours, one per rank: colour-blind readers can tell them apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C6D31", "#000000")
_COMPUTE, _EXCHANGE = "#9AA5B1", "#E4E8EC"
_CAVEAT = (
    "Recorded in Triton's interpreter on the CPU: the order of events is real, the durations say "
    "nothing about speed."
)
_TITLES = (
    "Fused: one kernel. A tile's sums leave while other tiles are still being multiplied.",
    "Unfused: the same work in two steps. Nothing leaves before everything is multiplied.",
)
_TITLES_ALONE = ("Fused: one rank has nothing to send.", "Unfused: one rank has nothing to send.")
_BLOCKS, _ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


def draw(document: dict[str, Any], file: Path) -> None:
    """Draw the demo's document.

    Raises:
        ArgumentError: the file cannot be written.
    """
    if document["backend"] == "cpu":
        ranks = len(document["models"][-1]["ranks"])
        with open_figure(file, 11, 2.6 + 1.1 * max(2, ranks) * 0.85) as figure:
            _timeline(document, figure)
    else:
        with open_figure(file, 9, 4.8) as figure:
            _bars(document, figure)


def _timeline(document: dict[str, Any], figure: Any) -> None:
    """Draw two panels, one lane per rank: the fused kernel, and the kernel taken apart."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    model = document["models"][-1]
    ranks = model["ranks"]
    above, below = figure.subplots(2, 1, sharex=True)
    figure.suptitle(
        f"gemv_all_reduce: who sent what when\n{model['name']} down projection at "
        f"1/{model['scale']}, "
        f"{count(len(ranks), 'rank')}, {count(document['tokens'], 'token')}, "
        f"w [{model['rows_run']}, {model['columns_run_per_rank']}] a rank",
        fontsize=12,
    )
    for axes, kind in ((above, "fused"), (below, "unfused")):
        start = min(rank[kind]["start"] for rank in ranks)
        for rank in ranks:
            span, lane = rank[kind], rank["rank"]
            # A fused kernel computes to its end; it sends meanwhile if there is anybody to send to.
            computed = span.get("computed", span["end"])
            is_fused = kind == "fused" and len(ranks) > 1
            _span(axes, lane, span["start"] - start, computed - start, _COMPUTE, hatched=is_fused)
            if span["end"] > computed and len(ranks) > 1:
                _span(axes, lane, computed - start, span["end"] - start, _EXCHANGE)
            _puts(axes, lane, span["puts"], start, len(ranks))
    for axes, text in zip(
        (above, below), _TITLES if len(ranks) > 1 else _TITLES_ALONE, strict=True
    ):
        axes.set_title(text, loc="left", fontsize=10)
    below.set_xlabel(f"milliseconds\n{_CAVEAT}", fontsize=9)
    for axes in (above, below):
        _lanes(axes, len(ranks))
    handles: list[Any] = [Patch(facecolor=_COMPUTE, label="multiplies only")]
    if len(ranks) > 1:
        handles = [
            Patch(
                facecolor=_EXCHANGE, edgecolor=_COMPUTE, hatch="////", label="multiplies and sends"
            ),
            *handles,
            Patch(facecolor=_EXCHANGE, label="sends and waits"),
        ]
        handles += [
            Line2D(
                [],
                [],
                color=_COLOURS[rank["rank"]],
                linestyle="",
                marker="|",
                markersize=11,
                markeredgewidth=2.5,
                label=f"put to rank {rank['rank']}",
            )
            for rank in ranks
        ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 7 if len(ranks) <= 4 else 6),
        fontsize=9,
        frameon=False,
    )


def _span(
    axes: Any, lane: int, start: float, end: float, colour: str, hatched: bool = False
) -> None:
    hatch = {"facecolor": _EXCHANGE, "edgecolor": colour, "hatch": "////", "linewidth": 0}
    style = hatch if hatched else {"color": colour}
    axes.barh(lane, 1e3 * (end - start), left=1e3 * start, height=0.86, zorder=1, **style)


def _puts(
    axes: Any, lane: int, puts: list[tuple[float, int, int]], start: float, world_size: int
) -> None:
    """Draw a mark per put, and a row per destination within the sender's lane."""
    rows = [peer for peer in range(world_size) if peer != lane]
    room = 0.8 / max(1, len(rows))
    for row, peer in enumerate(rows):
        times = [1e3 * (put[0] - start) for put in puts if put[1] == peer]
        low = lane - 0.4 + row * room
        axes.vlines(
            times,
            low + 0.08 * room,
            low + 0.92 * room,
            color=_COLOURS[peer],
            linewidth=2.2,
            zorder=2,
        )


def _lanes(axes: Any, world_size: int) -> None:
    axes.set_yticks(range(world_size), [f"rank {rank}" for rank in range(world_size)])
    for rank, label in enumerate(axes.get_yticklabels()):
        label.set_color(_COLOURS[rank])
        label.set_fontweight("bold")
    axes.set_ylim(world_size - 0.45, -0.55)
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _bars(document: dict[str, Any], figure: Any) -> None:
    """Draw fused, unfused and compute alone, side by side for every model."""
    models = document["models"]
    axes = figure.subplots()
    kinds = (
        ("unfused", "#D55E00", "unfused: F.linear, then NCCL"),
        ("fused", "#0072B2", "fused: one kernel"),
        ("compute alone", _COMPUTE, "F.linear alone"),
    )
    for offset, (kind, colour, label) in zip((-0.27, 0.0, 0.27), kinds, strict=True):
        values = [model["ranks"][0]["times_us"][kind] for model in models]
        bars = axes.bar(
            [i + offset for i in range(len(models))], values, width=0.25, color=colour, label=label
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=9, padding=2)
    axes.set_xticks(
        range(len(models)),
        [f"{model['name']}\n{model['rows']} x {model['columns']}" for model in models],
    )
    axes.set_ylabel("microseconds, slowest rank's median")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        "gemv_all_reduce: down projection of one decoding "
        f"step\n{count(document['tokens'], 'token')}, bfloat16, "
        f"{count(len(models[0]['ranks']), 'rank')} on {document['machine']['gpus'][0]}",
        fontsize=12,
    )
    axes.legend(frameon=False, fontsize=9)


def timeline_text(model: dict[str, Any], *, width: int = 48, blocks: bool = True) -> list[str]:
    """Return the picture as text for a terminal: a line per rank.

    The height of a cell says how many puts left in that time.
    """
    ranks = model["ranks"]
    if len(ranks) == 1:
        return [f"{model['name']}: one rank, nothing to send."]
    lines = [
        f"Puts over time, {model['name']}: fused, they leave while the kernel multiplies; "
        "unfused, only after."
    ]
    for kind in ("fused", "unfused"):
        start = min(rank[kind]["start"] for rank in ranks)
        length = max(rank[kind]["end"] for rank in ranks) - start
        for rank in ranks:
            span = rank[kind]
            # Each cell counts the puts of its part of the time.
            cells = [0] * width
            for time, _, _ in span["puts"]:
                cells[min(width - 1, int((time - start) / length * width))] += 1
            end = (span["end"] - start) / length * width
            lines.append(
                f"  {kind:<8} rank {rank['rank']}  {_cells(cells, end, blocks)}  "
                f"{len(span['puts'])} puts"
            )
    lines.append(f"  {_CAVEAT}")
    return lines


def _cells(counts: list[int], end: float, blocks: bool) -> str:
    """Write ``[0, 1, 8]`` as ``"·▁█"``: a dot where the kernel runs and nothing leaves."""
    marks, idle = (_BLOCKS, "·") if blocks else (_ASCII, "_")
    top = max(*counts, 1)
    return "".join(
        marks[1 + (len(marks) - 2) * count // top] if count else idle if i <= end else " "
        for i, count in enumerate(counts)
    )
