"""Pictures of sub-layers, DRAM and link traffic by cause over time, and traces for Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from interlace.figure import open_figure
from interlace.units import format_ns, format_number
from interlace_sim.t3.measured import Comparison
from interlace_sim.t3.memory import QUEUE_STEP_NS
from interlace_sim.t3.reproduce import Figure
from interlace_sim.t3.sublayer import SubLayer
from interlace_sim.trace import named, slice_event, to_perfetto

STEPS = 300
_COLOURS = {
    "product read": "#56B4E9",
    "product write": "#0072B2",
    "product update": "#0072B2",
    "reduce_scatter read": "#E69F00",
    "reduce_scatter write": "#D55E00",
    "reduce_scatter update": "#D55E00",
    "all_gather read": "#009E73",
    "all_gather write": "#117755",
    "tracker read": "#CC79A7",
    "tracker write": "#CC79A7",
    "all_to_all read": "#E69F00",
    "all_to_all write": "#D55E00",
    "reduce_scatter": "#D55E00",
    "all_gather": "#009E73",
    "all_to_all": "#D55E00",
}


SPENT = {
    "computing": ("computing", "#0072B2"),
    "inputs": ("waiting for inputs", "#56B4E9"),
    "memory": ("waiting for its stores into memory", "#E69F00"),
    "link": ("waiting for its stores to the next GPU", "#D55E00"),
    "stage": ("waiting for the other tiles of its stage", "#CC79A7"),
    "idle": ("no tile left", "#BBBBBB"),
    "product": ("the product's last writes", "#999999"),
    "reduce_scatter": ("reduce-scatter, exposed", "#F0E442"),
    "all_to_all": ("all-to-all, exposed", "#F0E442"),
    "all_gather": ("all-gather, exposed", "#009E73"),
}
"""What the time of a sub-layer is spent on, in the order of tables and bars: meaning and colour."""
_DARK = {"#0072B2", "#009E73", "#D55E00"}


def draw(results: Sequence[SubLayer], bounds: Sequence[SubLayer], file: Path) -> None:
    """Draw where the time of each configuration goes, and their traffic below it.

    Bars on top divide the time by cause. Below them is a panel per configuration: GB/s of DRAM
    traffic by cause, the link's under the line, and the entries of a DRAM channel's queue.

    Args:
        results: Configurations that take place.
        bounds: Configurations that get a bar only.
        file: Picture to write.

    Raises:
        ArgumentError: the file cannot be written.
    """
    longest = max(result.total_ns for result in results)
    bars = [*results, *bounds]
    heights = [0.35 + 0.32 * len(bars), *[2.1] * len(results)]
    with open_figure(file, 12, 1.2 + sum(heights)) as drawing:
        axes = drawing.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        _bars(axes[0], bars)
        handles: dict[str, Any] = {}
        # The fullest queue of all, so that panels have one scale.
        entries = max(part.queue_entries for result in results for part in result.parts)
        for axis, result in zip(axes[1:], results, strict=True):
            _panel(axis, result, longest, handles)
            _queue(axis, result, entries, handles)
        axes[-1].set_xlabel("microseconds")
        drawing.legend(
            handles=list(handles.values()),
            loc="outside lower center",
            ncols=5,
            frameon=False,
            fontsize=9,
        )


def _bars(axis: Any, results: Sequence[SubLayer]) -> None:
    """Draw a bar per configuration, divided by what the time is spent on."""
    left = [0.0] * len(results)
    longest = max(result.total_ns for result in results)
    for cause, (meaning, colour) in SPENT.items():
        widths = [result.spent_ns.get(cause, 0.0) for result in results]
        if max(widths) < 1:
            continue
        bars = axis.barh(
            range(len(results)), [width / 1000 for width in widths], 0.72,
            [at / 1000 for at in left], color=colour, label=meaning,
        )  # fmt: skip
        # Narrow parts have no room for a number; the command prints all of them.
        numbers = [f"{width / 1000:.0f}" if width > 0.02 * longest else "" for width in widths]
        shade = "white" if colour in _DARK else "black"
        axis.bar_label(bars, numbers, label_type="center", fontsize=8, color=shade)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(results)), [result.configuration for result in results], fontsize=9)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(
        "Where the time goes: the mean compute unit's, then what the collectives add",
        loc="left",
        fontsize=10,
    )
    axis.legend(ncols=4, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.12))


def _panel(axis: Any, result: SubLayer, longest: int, handles: dict[str, Any]) -> None:
    import numpy as np

    edges = np.linspace(0, longest, STEPS + 1)
    width = longest / STEPS
    # DRAM traffic is drawn upwards, the link's downwards.
    for is_memory, sign in ((True, 1), (False, -1)):
        below = np.zeros(STEPS)
        uses = [use for use in result.result.link_uses if (use.link == "memory") == is_memory]
        for cause in sorted({use.traffic for use in uses}, key=list(_COLOURS).index):
            selected = [use for use in uses if use.traffic == cause]
            # A use counts in the step of its middle: uses are shorter than steps.
            middles = [min(longest - 1, (use.start_ns + use.end_ns) / 2) for use in selected]
            rate = (
                np.histogram(middles, bins=edges, weights=[use.size for use in selected])[0] / width
            )
            area = axis.fill_between(
                edges[:-1] / 1000, sign * below, sign * (below + rate), step="post",
                color=_COLOURS[cause], linewidth=0, label=cause if is_memory else f"link: {cause}",
            )  # fmt: skip
            handles.setdefault(area.get_label().replace("update", "write"), area)
            below = below + rate
    axis.axhline(0, color="black", linewidth=0.6)
    axis.axvline(result.total_ns / 1000, color="black", linewidth=1)
    axis.axvline(
        max(part.product_ns for part in result.parts) / 1000,
        color="black",
        linestyle=":",
        linewidth=1,
    )
    axis.set_ylabel("GB/s: DRAM up,\nlink down", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(
        f"{result.result.name}: {format_ns(result.total_ns)}; dotted: the product's last stage",
        loc="left",
        fontsize=10,
    )


def _queue(axis: Any, result: SubLayer, entries: float, handles: dict[str, Any]) -> None:
    """Draw the entries of a DRAM channel's queue over a panel, on a scale up to ``entries``."""
    scale = axis.twinx()
    label = "entries in a DRAM channel's queue"
    for start, part in zip(result.starts_ns, result.parts, strict=True):
        times = [(start + QUEUE_STEP_NS * step) / 1000 for step in range(len(part.queue))]
        (line,) = scale.step(times, part.queue, where="post", color="black", linewidth=0.7)
        handles.setdefault(label, line).set_label(label)
    # Both scales have their zero on one line.
    low, high = axis.get_ylim()
    scale.set_ylim(entries * low / high, entries)
    scale.set_yticks([0, round(entries / 2), round(entries)])
    scale.set_ylabel("entries", fontsize=9)
    scale.spines[["top", "left"]].set_visible(False)


def draw_measured(comparisons: Sequence[Comparison], file: Path) -> None:
    """Draw three bars per shape: unfused, our fastest implementation and T3, over the product.

    Raises:
        ArgumentError: the file cannot be written.
    """
    kinds: tuple[tuple[str, str, Callable[[Comparison], float]], ...] = (
        ("cuBLAS + NCCL, measured", "#B0B0B0", lambda item: item.measured_ns["unfused"]),
        ("our fastest implementation, measured", "#0072B2", lambda item: item.software_ns),
        ("T3, modelled", "#D55E00", lambda item: item.corrected_ns("t3-mca")),
    )
    with open_figure(file, 10, 1.2 + 0.7 * len(comparisons)) as drawing:
        axis = drawing.subplots()
        for number, (label, colour, time_ns) in enumerate(kinds):
            positions = [at + 0.27 * (number - 1) for at in range(len(comparisons))]
            lengths = [time_ns(item) / item.measured_ns["product"] for item in comparisons]
            axis.barh(positions, lengths, 0.25, color=colour, label=label)
            for item, position, length in zip(comparisons, positions, lengths, strict=True):
                name = f" {item.software}" if number == 1 else ""
                axis.text(length + 0.01, position, f"{length:.2f}{name}", va="center", fontsize=8)
        names = [f"{item.operator}\n{item.product.name}, {item.ranks} GPUs" for item in comparisons]
        axis.set_yticks(range(len(comparisons)), names, fontsize=9)
        axis.invert_yaxis()
        axis.axvline(1, color="black", linewidth=1)
        axis.set_xlabel("time over that of the product alone (cuBLAS, measured)")
        axis.spines[["top", "right"]].set_visible(False)
        drawing.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def draw_figures(figures: Sequence[Figure], file: Path) -> None:
    """Draw the distance of our figures from the published ones, in tolerances.

    Raises:
        ArgumentError: the file cannot be written.
    """
    with open_figure(file, 11, 1 + 0.26 * len(figures)) as drawing:
        axis = drawing.subplots()
        axis.axvspan(-1, 1, color="#E8F2EC", linewidth=0)
        axis.axvline(0, color="black", linewidth=0.8)
        for row, figure in enumerate(figures):
            distance = figure.difference / figure.tolerance
            axis.plot([0, distance], [row, row], color="#888888", linewidth=1)
            axis.plot(distance, row, "o", color="#009E73" if figure.met else "#D55E00")
        names = [
            f"{figure.name}: {figure.published:g} {figure.unit}, ours {format_number(figure.ours)}"
            for figure in figures
        ]
        axis.set_yticks(range(len(figures)), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel("ours against the published figure, in tolerances")
        axis.spines[["top", "right"]].set_visible(False)


def trace(results: Sequence[SubLayer]) -> dict[str, Any]:
    """Return a trace like :func:`interlace_sim.trace.to_perfetto`'s with flows of blocks.

    A flow leads from the stage that stored a block to its update, its trigger and the link.
    """
    document = to_perfetto([result.result for result in results])
    events = document["traceEvents"]
    for pid, result in enumerate(results):
        if not result.fused.flows:
            continue
        rows = {
            e["args"]["name"]: e["tid"]
            for e in events
            if e["name"] == "thread_name" and e["pid"] == pid
        }
        # Flows end at one link; on a mesh all links carry equal traffic.
        link = next(use.link for use in result.result.link_uses if use.link != "memory")
        triggers = max(rows.values()) + 1
        events.append(named("thread", pid, "triggers", triggers))
        for flow in result.fused.flows:
            name = f"block {flow.block}"
            at = flow.triggered_ns / 1000
            # A nanosecond long, as viewers do not show events of no length.
            end = flow.triggered_ns + 1
            events.append(slice_event(pid, triggers, name, flow.triggered_ns, end, {}))
            arrow = {"cat": "block", "name": name, "id": f"{pid}.{flow.block}", "pid": pid}
            events += [
                {**arrow, "ph": "s", "tid": rows["compute"], "ts": (flow.stored_ns - 1) / 1000},
                {
                    **arrow,
                    "ph": "t",
                    "tid": rows["link memory"],
                    "ts": (flow.updated_ns - 1) / 1000,
                },
                {**arrow, "ph": "t", "tid": triggers, "ts": at},
                {
                    **arrow,
                    "ph": "f",
                    "bp": "e",
                    "tid": rows[f"link {link}"],
                    "ts": flow.sent_ns / 1000,
                },
            ]
    return document
