"""``interlace bench`` and ``interlace tune`` of a product and an all-reduce."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated

import typer

from interlace.bench.gemv_all_reduce import OPERATOR
from interlace.bench.measures import measure_gemv
from interlace.cli import bench, bench_products
from interlace.cli.options import Run, shape_option, takes_run
from interlace.errors import ArgumentError
from interlace.registry import Operator

SHAPES = (
    "8192x2048",
    "8192x7168",
    "8192x8192",
    "16384x4096",
    "12288x12288",
    "4096x4096",
    "5120x3456",
)

Tokens = Annotated[str, typer.Option(help="Tokens to measure at, separated by commas.")]
_SHAPES = shape_option(
    "NxK",
    "Rows and columns of one rank's weight, say 8192x2048; several times. \\[default: seven]",
)


def add_commands(operator: Operator, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add the operator's commands, and those for a few tokens by the name of their function."""
    bench_products.add_commands(operator, bench_app, tune_app)
    bench_app.command(operator.vector_name)(bench_operator)
    tune_app.command(operator.vector_name)(tune_operator)


@takes_run()
def bench_operator(
    run: Run,
    tokens: Tokens = "1",
    shape: list[str] | None = _SHAPES,
    tune: Annotated[
        bool, typer.Option("--tune", help="First find the best configuration of each shape.")
    ] = False,
) -> None:
    """GEMV + AllReduce: the kernel for few tokens, every unfused pair, compute alone, communication
    alone, and the physical floor.
    """
    work = parse_work(tokens, shape, run.dtype)
    measure = functools.partial(measure_gemv, tunes=tune)
    bench.run_bench(OPERATOR, work, measure, run, verb="Tuning" if tune else "Measuring")


@takes_run(makes_table=True)
def tune_operator(
    run: Run, tokens: Tokens = "1,2,4,8,16,32,64", shape: list[str] | None = _SHAPES
) -> None:
    """GEMV + AllReduce: measure all configurations and write the best of each shape to the tuned
    table.
    """
    work = parse_work(tokens, shape, run.dtype)
    bench.run_tune(OPERATOR, work, functools.partial(measure_gemv, tunes=True), run)


def parse_work(tokens: str, shapes: Sequence[str] | None, dtype: str) -> list[tuple[int, int, int]]:
    """Return the M, N and K of every shape at every number of tokens."""
    sizes = [
        bench.parse_sizes(shape, "NxK, the sizes of one rank's weight", "8192x2048")
        for shape in shapes or SHAPES
    ]
    # All options are refused before a minute is spent on the first shape.
    counts = parse_tokens(tokens)
    bench.require_dtype(dtype)
    return [(count, columns, inner) for columns, inner in sizes for count in counts]


def parse_tokens(text: str) -> list[int]:
    """Parse ``"1,2,4"`` as ``[1, 2, 4]``."""
    try:
        tokens = [int(part) for part in text.split(",")]
    except ValueError:
        tokens = [0]
    if min(tokens) < 1:
        raise ArgumentError(
            f"--tokens must be positive numbers separated by commas; got {text!r}. Say --tokens "
            "1,2,4."
        )
    return tokens
