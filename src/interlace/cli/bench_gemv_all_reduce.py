"""``interlace bench`` and ``interlace tune`` of a few tokens' product and all-reduce."""

from __future__ import annotations

import functools
from typing import Annotated

import typer

from interlace.bench.gemv_all_reduce import OPERATOR
from interlace.cli import bench
from interlace.cli.bench_ranks import measure_gemv
from interlace.cli.options import Dtype, JsonFile, Ranks, TableFile, shape_option
from interlace.cli.outputs import Outputs
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
    """Add the operator's commands."""
    bench_app.command(operator.name)(bench_operator)
    tune_app.command(operator.name)(tune_operator)


def bench_operator(
    tokens: Tokens = "1",
    shape: list[str] | None = _SHAPES,
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="First find the best configuration of each shape.")
    ] = False,
) -> None:
    """GEMV + AllReduce: fused, every unfused pair, compute alone, communication alone, and the
    physical floor.
    """
    outputs, work = Outputs(json=json_file), parse_work(tokens, shape, dtype)
    measure = functools.partial(measure_gemv, dtype=dtype, tunes=tune)
    verb = "Tuning" if tune else "Measuring"
    bench.run_bench(OPERATOR, work, measure, world_size, outputs, verb=verb)


def tune_operator(
    table: TableFile,
    tokens: Tokens = "1,2,4,8,16,32,64",
    shape: list[str] | None = _SHAPES,
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
) -> None:
    """GEMV + AllReduce: measure all configurations and write the best of each shape to the tuned
    table.
    """
    outputs, work = Outputs(json=json_file, table=table), parse_work(tokens, shape, dtype)
    measure = functools.partial(measure_gemv, dtype=dtype, tunes=True)
    bench.run_tune(OPERATOR, work, measure, world_size, outputs)


def parse_work(tokens: str, shapes: list[str] | None, dtype: str) -> list[tuple[int, int, int]]:
    """Return the tokens, rows and columns of every shape at every number of tokens."""
    sizes = [
        bench.parse_sizes(shape, "NxK, the sizes of one rank's weight", "8192x2048")
        for shape in shapes or SHAPES
    ]
    # All options are refused before a minute is spent on the first shape.
    counts = parse_tokens(tokens)
    bench.require_dtype(dtype)
    return [(count, rows, columns) for rows, columns in sizes for count in counts]


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
