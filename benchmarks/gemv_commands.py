"""``interlace bench gemv_all_reduce`` and ``interlace tune gemv_all_reduce``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated

import typer

from benchmarks import gemv_all_reduce
from interlace.cli import bench
from interlace.cli.options import Dtype, JsonFile, Ranks, Run, TableFile, shape_option
from interlace.cli.outputs import Outputs
from interlace.errors import ArgumentError

WEIGHTS = (
    "8192x2048", "8192x7168", "8192x8192", "16384x4096", "12288x12288", "4096x4096", "5120x3456",
)  # fmt: skip

_WEIGHTS = shape_option(
    "NxK",
    "Rows and columns of one rank's weight, say 8192x2048; several times. \\[default: seven]",
)
Tokens = Annotated[str, typer.Option(help="Tokens to measure at, separated by commas.")]


def add_commands(bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add the commands for few rows."""
    bench_app.command(gemv_all_reduce.OPERATOR)(bench_operator)
    tune_app.command(gemv_all_reduce.OPERATOR)(tune_operator)


def bench_operator(
    tokens: Tokens = "1",
    shape: list[str] | None = _WEIGHTS,
    tune: Annotated[
        bool, typer.Option("--tune", help="First find the best configuration of each shape.")
    ] = False,
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
) -> None:
    """GEMV + AllReduce: the kernel for few tokens, every unfused pair, compute alone, communication
    alone, and the physical floor. From a source tree.
    """
    run_bench(shape, tokens, tune, Run(world_size, dtype, Outputs(json=json_file)))


def tune_operator(
    tokens: Tokens = "1,2,4,8,16,32,64",
    shape: list[str] | None = _WEIGHTS,
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
    *,
    table: TableFile,
) -> None:
    """GEMV + AllReduce: measure all configurations and write the best of each shape to the tuned
    table. From a source tree.
    """
    run_tune(shape, tokens, Run(world_size, dtype, Outputs(json=json_file, table=table)))


def run_bench(shapes: Sequence[str] | None, tokens: str, tunes: bool, run: Run) -> None:
    """Measure every weight at every number of tokens, and print a table of each.

    Args:
        shapes: Sizes ``NxK`` of one rank's weight; None for :data:`WEIGHTS`.
        tokens: Numbers of tokens, separated by commas.
        tunes: Whether the best configuration of each shape is found first.
        run: The ranks, the dtype and the files of the command.

    Raises:
        ArgumentError: An option has another value.
    """
    work = parse_weights(tokens, shapes or WEIGHTS, run.dtype)
    measure = functools.partial(gemv_all_reduce.measure, tunes=tunes)
    bench.run_bench(gemv_all_reduce.OPERATOR, work, measure, run)


def run_tune(shapes: Sequence[str] | None, tokens: str, run: Run) -> None:
    """Measure all configurations, and write the best of each shape into the tuned table.

    Args:
        shapes, tokens, run: See :func:`run_bench`.
    """
    work = parse_weights(tokens, shapes or WEIGHTS, run.dtype)
    measure = functools.partial(gemv_all_reduce.measure, tunes=True)
    bench.run_tune(gemv_all_reduce.OPERATOR, work, measure, run)


def parse_weights(tokens: str, shapes: Sequence[str], dtype: str) -> list[tuple[int, int, int]]:
    """Return the M, N and K of every weight ``NxK`` at every number of tokens, such as ``"1,2,4"``.

    Raises:
        ArgumentError: A shape, a number of tokens or the dtype is none.
    """
    meaning, example = "NxK, the sizes of one rank's weight", "8192x2048"
    sizes = [bench.parse_sizes(shape, meaning, example) for shape in shapes]
    # All options are refused before a minute is spent on the first shape.
    counts = tokens.split(",")
    if not all(count.strip().isdecimal() and int(count) for count in counts):
        raise ArgumentError(
            f"--tokens must be positive numbers separated by commas; got {tokens!r}. Say --tokens "
            "1,2,4."
        )
    bench.require_dtype(dtype)
    return [(int(count), columns, inner) for columns, inner in sizes for count in counts]
