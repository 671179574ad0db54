"""A Transformer's down projection on several ranks: product and all-reduce in one kernel, checked,
with a picture of who sends what in which order.

    python examples/demos/down_projection.py --world-size 4

Three models' layers decode one step, their weights cut along K; on the CPU they are scaled down.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import demo_script
import down_projection_picture as picture
import torch
import torch.distributed as dist

import interlace
from interlace.cli.ranks import advance
from interlace.comm import Group, group_of
from interlace.costs.gemv_all_reduce import fused
from interlace.operators.gemm_all_reduce import gemv_all_reduce
from interlace.operators.gemm_all_reduce.config import GemvAllReduceConfig, block_tokens
from interlace.operators.gemm_all_reduce.gemv import tuned
from interlace.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from interlace.cli.outputs import Outputs
    from interlace.tracing import Trace


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


def run(
    console: Console, world_size: int, backend: str, *, tokens: int, plot: Path | None
) -> dict[str, Any]:
    """Run the demo; return a report for JSON, with ``"passed"``: whether every rank computed and
    sent what it should.
    """
    from interlace.cli import machine
    from interlace.cli.console import run_ranks
    from interlace.cli.outputs import Outputs

    outputs = Outputs(plot=plot)
    scale = CPU_SCALE if backend == "cpu" else 1
    shapes = [
        (model.rows // scale, ceil_div(model.columns // scale, world_size)) for model in MODELS
    ]
    console.print(
        "[bold]The down projection of one decoding step[/bold], its weight cut along K over "
        f"{demo_script.count(world_size, 'rank')}:\n"
        f"y \\[{tokens}, N] = sum over ranks of x \\[{tokens}, K/R] @ w \\[N, K/R].T, bfloat16, "
        "in one kernel "
        f"({'Triton interpreter on the CPU' if backend == 'cpu' else 'CUDA'}).",
        markup=True,
    )
    reports = run_ranks(
        console,
        f"{demo_script.count(world_size, 'rank')} on {backend}",
        len(MODELS),
        run_rank,
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
        "backend": backend,
        "world_size": world_size,
        "tokens": tokens,
        "passed": all(model["passed"] for model in models),
        "models": models,
    }
    _show(console, document, outputs)
    return document


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
    from interlace.bench.products import rounding_error

    rows, columns = shape
    error, allowed = (
        max(rank["error"] for rank in ranks),
        rounding_error(torch.bfloat16, columns, 1.5),
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
        title = "Who sends what in which order" if document["backend"] == "cpu" else "Picture"
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
    from rich import box
    from rich.table import Column, Table

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


def _can_draw_blocks(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


# What each rank does


def run_rank(folder: str, shapes: list[tuple[int, int]], tokens: int) -> list[dict[str, Any]]:
    """Run every ``(rows, columns per rank)``; return a report of each for JSON.

    The progress bar advances once per shape. On the CPU the steps of the last shape are recorded,
    fused and unfused, in their order.
    """
    group = group_of()
    # Imports and compiles what must be, before anything is recorded
    _run(group, *_inputs(group, 16, 16, 1))
    last = len(shapes) - 1
    return [
        _one_shape(folder, group, *shape, tokens, record=i == last)
        for i, shape in enumerate(shapes)
    ]


def _one_shape(
    folder: str, group: Group, rows: int, columns: int, tokens: int, *, record: bool
) -> dict[str, Any]:
    x, w = _inputs(group, rows, columns, tokens)
    config = tuned(
        rows=tokens,
        columns=rows,
        inner=columns,
        dtype=x.dtype,
        world_size=group.world_size,
        device=x.device,
    ).config
    group.traffic.reset()
    y = _run(group, x, w, config)
    # The sum in float64, of the same bfloat16 operands.
    expected = x.double() @ w.double().T
    dist.all_reduce(expected)
    cost = fused(
        protocol=config.protocol,
        rank=group.rank,
        world_size=group.world_size,
        tokens=tokens,
        rows=rows,
        columns=columns,
        itemsize=x.element_size(),
        block_n=config.block_n,
        block_tokens=block_tokens(tokens),
    )
    report: dict[str, Any] = {
        "rank": group.rank,
        "error": float((y.double() - expected).norm() / expected.norm()),
        "digest": hashlib.sha256(y.cpu().view(torch.uint8).numpy().tobytes()).hexdigest(),
        "config": str(config),
        "predicted": {"puts": cost.messages, "bytes": cost.link_bytes, "signals": cost.signals},
    }
    if group.backend == "cpu":
        traffic = group.traffic
        report["counted"] = {
            "puts": traffic.messages,
            "bytes": traffic.message_bytes,
            "signals": traffic.signals,
        }
        if record:
            report["steps"] = _record(group, x, w, config)
    else:
        report["times_us"] = _time(x, w, config)
    advance(folder)
    return report


def _inputs(
    group: Group, rows: int, columns: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x ``[tokens, columns]`` and w ``[rows, columns]``, bfloat16 as models have them."""
    generator = torch.Generator(group.device).manual_seed(1 + group.rank)
    x = torch.randn(tokens, columns, generator=generator, device=group.device)
    w = torch.randn(rows, columns, generator=generator, device=group.device)
    return x.bfloat16(), w.bfloat16()


def _run(
    group: Group, x: torch.Tensor, w: torch.Tensor, config: GemvAllReduceConfig | None = None
) -> torch.Tensor:
    y = gemv_all_reduce(x, w, impl="gemv", config=config)
    group.synchronize()
    return y


def _record(
    group: Group, x: torch.Tensor, w: torch.Tensor, config: GemvAllReduceConfig
) -> dict[str, list[tuple[str, int]]]:
    """Record the steps of this rank in their order: ``"compute"``, ``"put"`` and ``"wait"``, each
    with the rank that a put goes to, else -1.

    The unfused steps are those of the kernel taken apart: all of its tiles, and then, in a call
    without columns, all of its communication.
    """
    with interlace.trace() as fused_trace:
        _run(group, x, w, config)
    fused_steps = _steps(fused_trace, group.rank)
    with interlace.trace() as exchange_trace:
        _run(group, x[:, :0], w[:, :0], config)
    exchange = [step for step in _steps(exchange_trace, group.rank) if step[0] != "compute"]
    tiles = [step for step in fused_steps if step[0] == "compute"]
    return {"fused": fused_steps, "unfused": [*tiles, *exchange]}


def _steps(trace: Trace, rank: int) -> list[tuple[str, int]]:
    """Return the steps of a rank in a trace."""
    puts = iter(
        sorted((put.time_ns, put.peer) for put in trace.work.puts if put.place.rank == rank)
    )
    spans = sorted(
        (span.start_ns, span.end_ns, span.activity)
        for span in trace.work.spans
        if span.place.rank == rank and span.activity != "other"
    )
    return [(activity, next(puts)[1] if activity == "put" else -1) for *_, activity in spans]


def _time(x: torch.Tensor, w: torch.Tensor, config: GemvAllReduceConfig) -> dict[str, float]:
    """Return the slowest rank's medians in microseconds.

    Calls take weights in turn, so that none is in the cache.
    """
    from torch.nn.functional import linear

    from interlace.bench.timing import measure

    cache = torch.cuda.get_device_properties(x.device).L2_cache_size
    copies = max(2, min(8, 2 * cache // max(1, w.nbytes) + 2))
    weights = [w, *(w.clone() for _ in range(copies - 1))]
    calls = {
        "fused": lambda i: gemv_all_reduce(x, weights[i % copies], impl="gemv", config=config),
        "unfused": lambda i: gemv_all_reduce(x, weights[i % copies], impl="unfused"),
        "compute alone": lambda i: linear(x, weights[i % copies]),
    }
    return {name: measure(call, period=copies, samples=7).median_us for name, call in calls.items()}


def main() -> None:
    """Run the demo with the options of the command line."""
    options = demo_script.parse_options(
        __doc__,
        ("--tokens", {"type": int, "default": 1, "help": "tokens decoded at once (default: 1)"}),
        (
            "--plot",
            {
                "metavar": "FILE",
                "default": "demo-gemv_all_reduce.png",
                "help": "where to draw the picture (default: %(default)s), or none",
            },
        ),
    )
    plot = None if options.plot == "none" else Path(options.plot)
    demo_script.run_script(options, run, tokens=options.tokens, plot=plot)


if __name__ == "__main__":
    main()
