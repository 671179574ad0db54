"""A recommendation model (DLRM) with tables sharded over the ranks trains for some steps, with
fused kernels and without.

    python examples/demos/train_small_dlrm.py --world-size 4

Its loss must fall, the same in both ways. For a model of real size see ``examples/train_dlrm.py``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import demo_script
import torch

from interlace.cli.ranks import advance
from interlace.comm import Group, group_of
from interlace.costs.embedding_all_to_all import (
    GRANT_BYTES,
    backward_floor_link_bytes,
    floor_link_bytes,
)
from interlace.nn import EmbeddingTable
from interlace.units import ceil_div
from interlace_dlrm import DLRM, Batch, BatchStream, SyntheticClicks, Trainer, measure_step

if TYPE_CHECKING:
    from rich.console import Console

TOLERANCE = 1e-4
"""The relative difference between losses of the fused and the unfused run that is allowed.

Both sum float32, in different orders, over some steps.
"""


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Sizes of the demo's model and data, for all ranks together."""

    tables: int
    rows: int
    width: int
    batch: int
    fused_steps: int
    steps: int
    cardinality: int
    layers: tuple[int, ...]


ON_CPU = ModelSizes(
    tables=4, rows=16, width=8, batch=32, fused_steps=2, steps=16, cardinality=6, layers=(16,)
)
ON_CUDA = ModelSizes(
    tables=26, rows=100_000, width=128, batch=8192, fused_steps=20, steps=100, cardinality=1000,
    layers=(512, 256),
)  # fmt: skip


def run(console: Console, world_size: int, backend: str) -> dict[str, Any]:
    """Train on all ranks; return a report for JSON, with ``"passed"``."""
    from interlace.cli.console import run_ranks

    sizes = ON_CPU if backend == "cpu" else ON_CUDA
    sizes = dataclasses.replace(sizes, batch=ceil_div(sizes.batch, world_size) * world_size)
    ranks = run_ranks(
        console,
        f"training on {backend}",
        steps_of(sizes),
        run_rank,
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
        f"back and update the tables in another.",
        markup=True,
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


# What each rank does


def run_rank(folder: str, sizes: ModelSizes) -> dict[str, Any]:
    """Train some steps unfused, repeat them fused, and go on; return a report for JSON.

    The progress bar advances once per step.
    """
    group = group_of()
    stream = BatchStream(
        SyntheticClicks(None, cardinality=sizes.cardinality),
        sizes.batch,
        rows=[sizes.rows] * sizes.tables,
        rank=group.rank,
        world_size=group.world_size,
    )
    batches = [
        batch.to(group.device) for batch, _ in zip(stream, range(sizes.steps + 1), strict=False)
    ]
    first = {
        impl: _losses(folder, _trainer(sizes, impl), batches[: sizes.fused_steps])
        for impl in ("unfused", "fused")
    }
    # The interpreter is slow, so on the CPU the remaining steps are unfused.
    trainer = _trainer(sizes, "fused" if group.backend == "cuda" else "unfused")
    losses = _losses(folder, trainer, batches[: sizes.steps])
    judged = trainer.evaluate(batches[sizes.steps :])
    report: dict[str, Any] = {
        "rank": group.rank,
        "fused_losses": first["fused"],
        "unfused_losses": first["unfused"],
        "losses": losses,
        "held_out": dataclasses.asdict(judged),
    }
    if group.backend == "cpu":
        report |= {
            "counted": _counted_bytes(group, trainer, batches[0]),
            "predicted": _predicted_bytes(group, trainer, sizes.batch),
        }
    else:
        report["times_ms"] = {
            impl: _times(trainer, batches[0], impl) for impl in ("fused", "unfused")
        }
    advance(folder)
    return report


def steps_of(sizes: ModelSizes) -> int:
    """Return how often a rank advances."""
    return 2 * sizes.fused_steps + sizes.steps + 1


def _trainer(sizes: ModelSizes, impl: str) -> Trainer:
    tables = [
        EmbeddingTable(f"C{t + 1}", sizes.rows, sizes.width, bag_length=1)
        for t in range(sizes.tables)
    ]
    model = DLRM(
        tables, bottom=sizes.layers, top=sizes.layers, gradient="rowwise_adagrad",
        learning_rate=0.1, batch=sizes.batch
    )  # fmt: skip
    model.embeddings.impl = impl
    return Trainer(model, torch.optim.Adagrad(model.dense.parameters(), 0.05))


def _losses(folder: str, trainer: Trainer, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        losses.append(trainer.step(batch))
        advance(folder)
    return trainer.mean_over_ranks(losses)


def _counted_bytes(group: Group, trainer: Trainer, batch: Batch) -> int:
    """Bytes of puts that leave this rank in one fused step."""
    trainer.model.embeddings.impl = "fused"
    group.traffic.reset()
    trainer.step(batch)
    return group.traffic.message_bytes


def _predicted_bytes(group: Group, trainer: Trainer, batch: int) -> int:
    plan = trainer.model.embeddings.plan
    widths = [[shard.width for shard in plan.of_rank(rank)] for rank in range(plan.world_size)]
    sizes: dict[str, Any] = {"widths": widths, "batch": batch, "rank": group.rank, "itemsize": 4}
    return (
        floor_link_bytes(**sizes)
        + backward_floor_link_bytes(**sizes)
        + GRANT_BYTES * (group.world_size - 1)
    )


def _times(trainer: Trainer, batch: Batch, impl: str) -> dict[str, float]:
    trainer.model.embeddings.impl = impl
    times = measure_step(trainer, batch)
    return {"step": times.step_ms, "compute": times.compute_ms, "exposed": times.exposed_ms}


def main() -> None:
    """Run the demo with the options of the command line."""
    demo_script.run_script(demo_script.parse_options(__doc__), run)


if __name__ == "__main__":
    main()
