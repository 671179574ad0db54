"""Pictures of the down projection: who sent what in which order (CPU), how long it took (CUDA); as
PNG and as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo_script import count

from interlace.figure import open_figure

# Okabe and Ito's colours, one per rank: colour-blind readers can tell them apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C6D31", "#000000")
_COMPUTE, _WAIT = "#9AA5B1", "#E4E8EC"
_CAVEAT = (
    "Steps in their order, recorded in Triton's interpreter on the CPU, whose times say nothing "
    "about speed."
)
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
    from matplotlib.patches import Patch

    model = document["models"][-1]
    ranks = model["ranks"]
    above, below = figure.subplots(2, 1, sharex=True)
    figure.suptitle(
        f"gemv_all_reduce: who sends what in which order\n{model['name']} down projection at "
        f"1/{model['scale']}, "
        f"{count(len(ranks), 'rank')}, {count(document['tokens'], 'token')}, "
        f"w [{model['rows_run']}, {model['columns_run_per_rank']}] per rank",
        fontsize=12,
    )
    for axes, kind in ((above, "fused"), (below, "unfused")):
        for rank in ranks:
            _draw_steps(axes, rank["rank"], rank["steps"][kind])
        axes.set_title(_finding(ranks, kind), loc="left", fontsize=10)
        _lanes(axes, len(ranks))
    axes.set_xlim(0, max(len(rank["steps"][kind]) for rank in ranks for kind in rank["steps"]))
    axes.set_xlabel(f"number of the rank's step\n{_CAVEAT}", fontsize=9)
    used = {activity for rank in ranks for activity, _ in rank["steps"]["fused"]}
    handles: list[Any] = [Patch(color=_COMPUTE, label="multiplies a tile")]
    if "put" in used:
        handles += [
            Patch(color=_COLOURS[rank["rank"]], label=f"puts a tile to rank {rank['rank']}")
            for rank in ranks
        ]
    if "wait" in used:
        handles.append(
            Patch(facecolor=_WAIT, edgecolor=_COMPUTE, linewidth=0.5, label="waits, and adds up")
        )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 4 if len(ranks) == 3 else 6),
        fontsize=9,
        frameon=False,
    )


def _finding(ranks: list[dict[str, Any]], kind: str) -> str:
    """Say how many puts leave before their rank multiplies its last tile."""
    early = total = 0
    for rank in ranks:
        activities = [activity for activity, _ in rank["steps"][kind]]
        last = max(place for place, activity in enumerate(activities) if activity == "compute")
        early += activities[:last].count("put")
        total += activities.count("put")
    what = {"fused": "Fused, one kernel", "unfused": "Unfused, the same work in two steps"}[kind]
    if not total:
        return f"{what}: one rank has nothing to send."
    return f"{what}: {early} of {total} puts leave before the last tile is multiplied."


def _draw_steps(axes: Any, lane: int, steps: list[tuple[str, int]]) -> None:
    """Draw a cell per step; puts are higher than tiles, so that they can be told apart."""
    for place, (activity, peer) in enumerate(steps):
        colour = {"compute": _COMPUTE, "wait": _WAIT}.get(activity, _COLOURS[peer])
        height = 0.86 if activity == "put" else 0.5
        axes.barh(lane, 1, left=place, height=height, align="center", color=colour,
                  edgecolor="white", linewidth=0.6)  # fmt: skip


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

    The height of a cell says how many of its steps are puts.
    """
    ranks = model["ranks"]
    if len(ranks) == 1:
        return [f"{model['name']}: one rank, nothing to send."]
    lines = [f"Puts among the steps of each rank, {model['name']}."]
    for kind in ("fused", "unfused"):
        lines.append(f"  {_finding(ranks, kind)}")
        longest = max(len(rank["steps"][kind]) for rank in ranks)
        for rank in ranks:
            steps = rank["steps"][kind]
            cells = [0] * width
            for place, (activity, _) in enumerate(steps):
                cells[place * width // longest] += activity == "put"
            end = len(steps) * width / longest
            lines.append(
                f"  {kind:<8} rank {rank['rank']}  {_cells(cells, end, blocks)}  {sum(cells)} puts"
            )
    lines.append(f"  {_CAVEAT}")
    return lines


def _cells(counts: list[int], end: float, blocks: bool) -> str:
    """Write ``[0, 1, 8]`` as ``"·▁█"``: a dot where nothing leaves."""
    marks, idle = (_BLOCKS, "·") if blocks else (_ASCII, "_")
    top = max(*counts, 1)
    return "".join(
        marks[1 + (len(marks) - 2) * count // top] if count else idle if i < end else " "
        for i, count in enumerate(counts)
    )
