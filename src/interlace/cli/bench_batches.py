"""``interlace bench`` and ``interlace tune`` of batches of products with an all-to-all."""

from __future__ import annotations

import functools

import typer

from interlace.bench.batches import CASES
from interlace.bench.measures import measure_batch
from interlace.cli import bench
from interlace.cli.bench_products import add_tune_command, parse_work
from interlace.cli.operator_commands import title_of
from interlace.cli.options import HalfDtype, Run, shape_option, takes_run
from interlace.registry import Operator

_SHAPES = shape_option(
    "BxMxNxK", "One rank's products, say 2x512x4096x1408; several times. \\[default: three]"
)


def add_commands(operator: Operator, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add an operator's commands, if the benchmark knows its pattern."""
    if operator.pattern not in CASES:
        return
    title = title_of(operator)
    parse = functools.partial(
        parse_work,
        operator.name,
        default=CASES[operator.pattern].default_shapes,
        meaning="BxMxNxK, the sizes of one rank's products",
        example="2x4096x4096x4096",
    )

    @bench_app.command(
        operator.name,
        help=f"{title}, as of experts: fused, the unfused pair, each alone, and the floor.",
    )
    @takes_run(dtypes=HalfDtype)
    def bench_operator(run: Run, shape: list[str] | None = _SHAPES) -> None:
        bench.run_bench(operator.name, parse(shape, run.dtype), measure_batch, run)

    # These operators have no configurations to search, so the table says which way is the fastest.
    add_tune_command(
        tune_app,
        operator.name,
        f"{title}: measure each shape and write to the tuned table which way is the fastest.",
        _SHAPES,
        parse,
        measure_batch,
        verb="Measuring",
    )
