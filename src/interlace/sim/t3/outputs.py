"""A sub-layer as a picture, DRAM and link by cause over time, and as a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from interlace.sim.figure import open_figure
from interlace.sim.t3.measured import Comparison
from interlace.sim.t3.reproduce import Figure
from interlace.sim.t3.run import SubLayer
from interlace.sim.trace import to_perfetto
from interlace.units import format_ns

STEPS = 300
_COLOURS = {
    "product read": "#56B4E9",
    "product write": "#0072B2",
    "product update": "#0072B2",
    "reduce-scatter read": "#E69F00",
    "reduce-scatter write": "#D55E00",
    "reduce-scatter update": "#D55E00",
    "all-gather read": "#009E73",
    "all-gather write": "#117755",
    "tracker read": "#CC79A7",
    "tracker write": "#CC79A7",
    "all-to-all read": "#E69F00",
    "all-to-all write": "#D55E00",
    "reduce_scatter": "#D55E00",
    "all_gather": "#009E73",
    "all_to_all": "#D55E00",
}


def draw(results: Sequence[SubLayer], file: Path) -> None:
    """One panel a configuration: GB/s of DRAM traffic by cause, and how busy the link is below it.

    Raises:
        ArgumentError: the file cannot be written.
    """
    longest = max(result.total_ns for result in results)
    with open_figure(file, 12, 0.8 + 2.2 * len(results)) as drawing:
        axes = drawing.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
        handles: dict[str, Any] = {}
        for axis, result in zip(axes, results, strict=True):
            _panel(axis, result, longest, handles)
        axes[-1].set_xlabel("microseconds")
        drawing.legend(
            handles=list(handles.values()),
            loc="outside lower center",
            ncols=5,
            frameon=False,
            fontsize=9,
        )


def _panel(axis: Any, result: SubLayer, longest: int, handles: dict[str, Any]) -> None:
    import numpy as np

    edges = np.linspace(0, longest, STEPS + 1)
    width = longest / STEPS
    for is_memory, sign in ((True, 1), (False, -1)):
        below = np.zeros(STEPS)
        uses = [use for use in result.result.link_uses if (use.link == "memory") == is_memory]
        for cause in sorted({use.traffic for use in uses}, key=list(_COLOURS).index):
            mine = [use for use in uses if use.traffic == cause]
            middles = [min(longest - 1, (use.start_ns + use.end_ns) / 2) for use in mine]
            rate = np.histogram(middles, bins=edges, weights=[use.size for use in mine])[0] / width
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


def draw_measured(found: Sequence[Comparison], file: Path) -> None:
    """Of each shape: unfused, our fastest implementation and T3, over the product alone.

    Raises:
        ArgumentError: the file cannot be written.
    """
    kinds: tuple[tuple[str, str, Callable[[Comparison], float]], ...] = (
        ("cuBLAS + NCCL, measured", "#B0B0B0", lambda one: one.measured_ns["unfused"]),
        ("our fastest implementation, measured", "#0072B2", lambda one: one.software_ns),
        ("T3, modelled", "#D55E00", lambda one: one.corrected_ns("t3-mca")),
    )
    with open_figure(file, 10, 1.2 + 0.7 * len(found)) as drawing:
        axis = drawing.subplots()
        for number, (label, colour, time_ns) in enumerate(kinds):
            places = [at + 0.27 * (number - 1) for at in range(len(found))]
            lengths = [time_ns(one) / one.measured_ns["product"] for one in found]
            axis.barh(places, lengths, 0.25, color=colour, label=label)
            for one, place, length in zip(found, places, lengths, strict=True):
                which = f" {one.software}" if number == 1 else ""
                axis.text(length + 0.01, place, f"{length:.2f}{which}", va="center", fontsize=8)
        names = [f"{one.operator}\n{one.product.name}, {one.ranks} GPUs" for one in found]
        axis.set_yticks(range(len(found)), names, fontsize=9)
        axis.invert_yaxis()
        axis.axvline(1, color="black", linewidth=1)
        axis.set_xlabel("time over that of the product alone (cuBLAS, measured)")
        axis.spines[["top", "right"]].set_visible(False)
        drawing.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def draw_figures(figures: Sequence[Figure], file: Path) -> None:
    """Of each published figure, how far ours lies from it, in tolerances.

    Raises:
        ArgumentError: the file cannot be written.
    """
    with open_figure(file, 11, 1 + 0.26 * len(figures)) as drawing:
        axis = drawing.subplots()
        axis.axvspan(-1, 1, color="#E8F2EC", linewidth=0)
        axis.axvline(0, color="black", linewidth=0.8)
        for place, one in enumerate(figures):
            far = one.difference / one.tolerance
            axis.plot([0, far], [place, place], color="#888888", linewidth=1)
            axis.plot(far, place, "o", color="#009E73" if one.met else "#D55E00")
        names = [
            f"{one.name}: {one.published:g} {one.unit}, ours {one.ours:.3g}" for one in figures
        ]
        axis.set_yticks(range(len(figures)), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel("ours against the published figure, in tolerances")
        axis.spines[["top", "right"]].set_visible(False)


def trace(results: Sequence[SubLayer]) -> dict[str, Any]:
    """As :func:`interlace.sim.trace.to_perfetto`, with flows: the stage that stored a block, its
    update, its trigger, the link.
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
        link = next(use.link for use in result.result.link_uses if use.link != "memory")
        triggers = max(rows.values()) + 1
        events.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": pid,
                "tid": triggers,
                "args": {"name": "triggers"},
            }
        )
        for flow in result.fused.flows:
            name = f"block {flow.block}"
            at = flow.triggered_ns / 1000
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": pid,
                    "tid": triggers,
                    "ts": at,
                    "dur": 0.001,
                    "args": {},
                }
            )
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
