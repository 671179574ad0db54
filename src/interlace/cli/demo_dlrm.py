"""The second half of ``interlace demo``: a recommendation model with sharded tables trains."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from interlace.cli import demo_dlrm_ranks
from interlace.cli.console import run_ranks
from interlace.units import ceil_div

TOLERANCE = 1e-4
"""The relative difference between losses of the fused and the unfused run that is allowed.

Both sum float32, in different orders, over some steps.
"""


def run(console: Console, world_size: int, backend: str) -> dict[str, Any]:
    """Train on all ranks; return a report for JSON, with ``"passed"``."""
    sizes = demo_dlrm_ranks.ON_CPU if backend == "cpu" else demo_dlrm_ranks.ON_CUDA
    sizes = dataclasses.replace(sizes, batch=ceil_div(sizes.batch, world_size) * world_size)
    ranks = run_ranks(
        console,
        f"training on {backend}",
        demo_dlrm_ranks.steps_of(sizes),
        demo_dlrm_ranks.run_rank,
        world_size,
        sizes,
        backend=backend,
    )
    first = ranks[0]
    difference = max(
        abs(fused - unfused) / abs(unfused)
        for fused, unfused in zip(first["fused_losses"], first["unfused_losses"], strict=True)
    )  # fmt: skip
    start, end = _mean(first["losses"][:3]), _mean(first["losses"][-3:])
    traffic = all(rank.get("counted") == rank.get("predicted") for rank in ranks)
    # Not `difference > TOLERANCE`: a NaN must not pass.
    passed = difference <= TOLERANCE and end < start and traffic
    report = {
        "sizes": {
            name: getattr(sizes, name)
            for name in ("tables", "rows", "width", "batch", "fused_steps", "steps")
        },
        "difference": difference,
        "tolerance": TOLERANCE,
        "loss": [start, end],
        "held_out": first["held_out"],
        "traffic_as_predicted": traffic,
        "passed": passed,
        "ranks": ranks,
    }
    _show(console, report)
    return report


def _show(console: Console, report: dict[str, Any]) -> None:
    sizes, ranks = report["sizes"], report["ranks"]
    console.print(
        f"\n[bold]A recommendation model (DLRM)[/bold]: {sizes['tables']} tables of "
        f"{sizes['rows']} rows and {sizes['width']} "
        f"columns, shared out over the ranks, are pooled for a batch of {sizes['batch']} and sent "
        "in one kernel; gradients go "
        f"back and update the tables in another."
    )
    console.print(
        f"Loss of {sizes['steps']} steps: {report['loss'][0]:.4f} -> {report['loss'][1]:.4f} "
        "(means of three)."
    )
    console.print(
        f"The first {sizes['fused_steps']} steps, fused and unfused: relative difference of the "
        f"losses {report['difference']:.1e}."
    )
    if "counted" in ranks[0]:
        counted, predicted = (sum(rank[key] for rank in ranks) for key in ("counted", "predicted"))
        console.print(
            f"Bytes that left all ranks in a fused step, counted: {counted}; interlace.costs "
            f"predicts {predicted}."
        )
    else:
        for impl, times in ranks[0]["times_ms"].items():
            console.print(
                f"{impl:>8}: a step takes {times['step']:.2f} ms, computing alone "
                f"{times['compute']:.2f} ms; "
                f"{times['exposed']:.2f} ms of communication are not hidden"
            )
    if report["passed"]:
        console.print("The loss falls, and fused and unfused learn the same.", style="green")
    else:
        console.print(
            f"WRONG: DLRM: {report['difference']=}, {report['loss']=}, "
            f"{report['traffic_as_predicted']=}",
            style="bold red",
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
