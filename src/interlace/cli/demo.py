"""``interlace demo``: a Transformer's down projection, checked and drawn; a mapped output; a
recommendation model that trains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table

from interlace.cli import demo_dlrm, demo_mapped, demo_ranks, machine, picture
from interlace.cli.console import command_line, make_console, now, run_ranks
from interlace.cli.outputs import Outputs
from interlace.errors import ArgumentError
from interlace.units import ceil_div, format_bytes


@dataclasses.dataclass(frozen=True)
class DownProjection:
    """A published model's down projection.

    ``[rows, columns]`` = [N, K] are of the unsharded weight, as in the model's configuration.
    """

    name: str
    rows: int
    columns: int


MODELS = (
    DownProjection("Llama-3-8B", 4096, 14336),
    DownProjection("Qwen2.5-32B", 5120, 27648),
    DownProjection("Llama-3-70B", 8192, 28672),
)

CPU_SCALE = 32
"""On the CPU both sides of every weight are divided by this: the interpreter is a thousand times
slower than a GPU.
"""


def run(world_size: int, backend: str, tokens: int, outputs: Outputs) -> int:
    """Run the demo and return the exit code: 0 if every rank computed and sent what it should."""
    console = make_console()
    if backend not in ("auto", "cpu", "cuda"):
        raise ArgumentError(f"demo: --backend must be auto, cpu or cuda; got {backend!r}.")
    if backend == "auto":
        backend = "cuda" if torch.cuda.device_count() >= world_size else "cpu"
    scale = CPU_SCALE if backend == "cpu" else 1
    shapes = [
        (model.rows // scale, ceil_div(model.columns // scale, world_size)) for model in MODELS
    ]
    console.print(
        "[bold]The down projection of one decoding step[/bold], its weight cut along K over "
        f"{_ranks(world_size)}:\n"
        f"y \\[{tokens}, N] = sum over ranks of x \\[{tokens}, K/R] @ w \\[N, K/R].T, bfloat16, "
        "in one kernel "
        f"({'Triton interpreter on the CPU' if backend == 'cpu' else 'CUDA'})."
    )
    reports = run_ranks(
        console,
        f"{_ranks(world_size)} on {backend}",
        len(MODELS),
        demo_ranks.run_rank,
        world_size,
        shapes,
        tokens,
        backend=backend,
    )
    models = [
        _judge(model, scale, shape, tokens, [rank[i] for rank in reports])
        for i, (model, shape) in enumerate(zip(MODELS, shapes, strict=True))
    ]
    document: dict[str, Any] = {
        "machine": machine.describe(),
        "command": command_line(),
        "date": now(),
        "backend": backend,
        "world_size": world_size,
        "tokens": tokens,
        "passed": all(model["passed"] for model in models),
        "models": models,
    }
    # The picture is of these models only, so it is drawn before the other two parts run.
    _show(console, document, outputs)
    document["mapped"] = demo_mapped.run(console, world_size, backend)
    document["dlrm"] = demo_dlrm.run(console, world_size, backend)
    document["passed"] = all(
        part["passed"] for part in (document, document["mapped"], document["dlrm"])
    )
    # Everything has been shown by now; the document holds each rank's numbers, too.
    outputs.write_json(lambda: document)
    if outputs.json is not None:
        console.print(f"All numbers: {outputs.json}")
    return 0 if document["passed"] else 1


def _judge(
    model: DownProjection,
    scale: int,
    shape: tuple[int, int],
    tokens: int,
    ranks: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return one model's outcome over all ranks.

    It passes if every rank is right, all are bitwise alike, and ``interlace.costs`` predicts the
    traffic.
    """
    from interlace.bench.gemv_all_reduce import GemvShape

    rows, columns = shape
    error, allowed = (
        max(rank["error"] for rank in ranks),
        GemvShape(tokens, rows, columns).tolerance,
    )
    # Not `error > allowed`: a NaN must not pass.
    right = all(rank["error"] <= allowed for rank in ranks)
    is_equal = len({rank["digest"] for rank in ranks}) == 1
    traffic = all(rank.get("counted", rank["predicted"]) == rank["predicted"] for rank in ranks)
    return {
        "name": model.name,
        "rows": model.rows,
        "columns": model.columns,
        "scale": scale,
        "rows_run": rows,
        "columns_run_per_rank": columns,
        "error": error,
        "tolerance": allowed,
        "same_on_every_rank": is_equal,
        "traffic_as_predicted": traffic,
        "passed": right and is_equal and traffic,
        "ranks": ranks,
    }


def _show(console: Console, document: dict[str, Any], outputs: Outputs) -> None:
    console.print(_cpu_table(document) if document["backend"] == "cpu" else _cuda_table(document))
    for model in document["models"]:
        for problem in _problems(model):
            console.print(f"{model['name']}: {problem}", style="bold red")
    if document["passed"]:
        console.print("Right on every rank, and bit by bit the same on all of them.", style="green")
    if document["backend"] == "cpu":
        console.print()
        for line in picture.timeline_text(document["models"][-1], blocks=_can_draw_blocks(console)):
            console.print(line, markup=False)
    if outputs.plot is not None:
        with console.status("Drawing"):
            outputs.write_plot(lambda file: picture.draw(document, file))
        title = "Who sent what when" if document["backend"] == "cpu" else "Picture"
        console.print(f"\n{title}: {outputs.plot}")


def _cpu_table(document: dict[str, Any]) -> Table:
    first = document["models"][0]
    table = _table(
        ("model", "w [N, K]", f"of a rank,\nscaled 1/{first['scale']}"),
        ("error", "puts", "bytes sent"),
        "Puts and bytes that left all ranks together, counted; in brackets, what interlace.costs "
        "predicts.",
    )
    for model in document["models"]:
        counted, predicted = (_total(model, key) for key in ("counted", "predicted"))
        table.add_row(
            *_shape_cells(model),
            f"{model['error']:.1e}",
            f"{counted['puts']} ({predicted['puts']})",
            f"{counted['bytes']} ({predicted['bytes']})",
            style=None if model["passed"] else "red",
        )
    return table


def _cuda_table(document: dict[str, Any]) -> Table:
    table = _table(
        ("model", "w [N, K]"),
        ("error", "sent", "fused", "unfused", "compute", "fused is"),
        "Sent: bytes of all ranks together, as interlace.costs predicts. Times: the slowest "
        "rank's median in microseconds, in CUDA "
        "graphs, weights not in the cache. Unfused: F.linear, then NCCL. Compute: F.linear alone.",
    )
    for model in document["models"]:
        times = model["ranks"][0]["times_us"]
        table.add_row(
            *_shape_cells(model)[:2],
            f"{model['error']:.1e}",
            format_bytes(_total(model, "predicted")["bytes"]),
            *(f"{times[name]:.1f}" for name in ("fused", "unfused", "compute alone")),
            f"{100 * (times['fused'] / times['unfused'] - 1):+.0f} %",
            style=None if model["passed"] else "red",
        )
    return table


def _table(words: Sequence[str], numbers: Sequence[str], caption: str) -> Table:
    """Return an empty table: columns of words, and then columns of numbers."""
    return Table(
        *(Column(heading, no_wrap=True) for heading in words),
        *(Column(heading, justify="right", no_wrap=True) for heading in numbers),
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
    )


def _shape_cells(model: dict[str, Any]) -> tuple[str, str, str]:
    return (
        model["name"],
        f"{model['rows']} x {model['columns']}",
        f"{model['rows_run']} x {model['columns_run_per_rank']}",
    )


def _problems(model: dict[str, Any]) -> list[str]:
    problems = []
    if not model["error"] <= model["tolerance"]:
        problems.append(
            f"WRONG: relative error {model['error']:.1e}, at most {model['tolerance']:.1e} is "
            "rounding."
        )
    if not model["same_on_every_rank"]:
        problems.append("WRONG: ranks differ in their results.")
    if not model["traffic_as_predicted"]:
        for rank in model["ranks"]:
            problems.append(
                f"WRONG: rank {rank['rank']} sent {rank['counted']}, predicted {rank['predicted']}."
            )
    return problems


def _total(model: dict[str, Any], key: str) -> dict[str, int]:
    return {
        unit: sum(rank[key][unit] for rank in model["ranks"])
        for unit in ("puts", "bytes", "signals")
    }


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def _can_draw_blocks(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
