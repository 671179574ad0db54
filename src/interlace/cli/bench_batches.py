"""``interlace bench`` and ``interlace tune`` of batches of products with an all-to-all."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from interlace.bench.batches import CASES
from interlace.cli import bench
from interlace.cli.bench_products import parse_work
from interlace.cli.bench_ranks import run_batch_rank
from interlace.cli.operator_commands import title_of
from interlace.cli.options import HalfDtype, JsonFile, Ranks, TableFile
from interlace.cli.outputs import Outputs
from interlace.registry import Operator

Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="BxMxNxK",
        help="One rank's products, say 2x512x4096x1408; several times. \\[default: three]",
    ),
]


def add_commands(operator: Operator, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add an operator's commands, if the benchmark knows its pattern."""
    if operator.pattern not in CASES:
        return
    title = title_of(operator)

    @bench_app.command(
        operator.name,
        help=f"{title}, as of experts: fused, the unfused pair, each alone, and the floor.",
    )
    def bench_operator(
        shape: Shapes = None,
        world_size: Ranks = None,
        dtype: HalfDtype = "bfloat16",
        json_file: JsonFile = None,
    ) -> None:
        outputs = Outputs(json=json_file)
        document = _measure("bench", operator, shape, world_size, dtype, outputs)
        bench.show(document, operator.name, outputs)

    @tune_app.command(
        operator.name,
        help=f"{title}: measure each shape and write to the tuned table which way is the fastest.",
    )
    def tune_operator(
        table: TableFile,
        shape: Shapes = None,
        world_size: Ranks = None,
        dtype: HalfDtype = "bfloat16",
        json_file: JsonFile = None,
    ) -> None:
        outputs = Outputs(json=json_file, table=table)
        old_table = bench.read_table(outputs, operator.name)
        document = _measure("tune", operator, shape, world_size, dtype, outputs)
        bench.write_table(document, old_table, operator.name, outputs)


def _measure(
    command: str,
    operator: Operator,
    shapes: list[str] | None,
    world_size: int | None,
    dtype: str,
    outputs: Outputs,
) -> dict[str, Any]:
    """Measure every shape."""
    shapes = shapes or list(CASES[operator.pattern].default_shapes)
    work = parse_work(operator.name, shapes, dtype, "BxMxNxK", "products")
    return bench.measure_on_gpus(
        command,
        f"Measuring {operator.name}",
        work,
        run_batch_rank,
        (dtype,),
        world_size,
        outputs,
    )
