"""``interlace bench`` and ``interlace tune`` of a few tokens' product and all-reduce."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from interlace.bench.gemv_all_reduce import OPERATOR
from interlace.cli import bench
from interlace.cli.bench_ranks import run_rank
from interlace.cli.options import Dtype, JsonFile, Ranks, TableFile
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
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NxK",
        help="Rows and columns of one rank's weight, say 8192x2048; several times. "
        "\\[default: seven]",
    ),
]


def add_commands(operator: Operator, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add the operator's commands."""
    bench_app.command(operator.name)(bench_operator)
    tune_app.command(operator.name)(tune_operator)


def bench_operator(
    tokens: Tokens = "1",
    shape: Shapes = None,
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
    outputs = Outputs(json=json_file)
    document = _measure("bench", tokens, shape, world_size, dtype, tune, outputs)
    bench.show(document, OPERATOR, outputs)


def tune_operator(
    table: TableFile,
    tokens: Tokens = "1,2,4,8,16,32,64",
    shape: Shapes = None,
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
) -> None:
    """GEMV + AllReduce: measure all configurations and write the best of each shape to the tuned
    table.
    """
    outputs = Outputs(json=json_file, table=table)
    old_table = bench.read_table(outputs, OPERATOR)
    document = _measure("tune", tokens, shape, world_size, dtype, True, outputs)
    bench.write_table(document, old_table, OPERATOR, outputs)


def _measure(
    command: str,
    tokens: str,
    shapes: list[str] | None,
    world_size: int | None,
    dtype: str,
    tune: bool,
    outputs: Outputs,
) -> dict[str, Any]:
    """Measure every shape at every number of tokens."""
    sizes = [parse_shape(shape) for shape in shapes or SHAPES]
    # Options are refused before a minute is spent on the first shape.
    counts = parse_tokens(tokens)
    bench.require_dtype(dtype)
    work = [(count, rows, columns) for rows, columns in sizes for count in counts]
    title = f"{'Tuning' if tune else 'Measuring'} {OPERATOR}"
    return bench.measure_on_gpus(command, title, work, run_rank, (dtype, tune), world_size, outputs)


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


def parse_shape(text: str) -> tuple[int, int]:
    """Parse ``"8192x2048"`` as ``(8192, 2048)``: N and K/R of one rank's weight."""
    rows, _, columns = text.lower().partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise ArgumentError(
            f"--shape must be NxK, the sizes of one rank's weight; got {text!r}. Say --shape "
            "8192x2048."
        )
    return int(rows), int(columns)
