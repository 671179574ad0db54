"""``interlace bench embedding_all_to_all`` and ``interlace tune embedding_all_to_all``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from benchmarks.embedding_all_to_all import OPERATOR, measure
from interlace.cli import bench
from interlace.cli.options import Dtype, JsonFile, Ranks, Run, TableFile, shape_option
from interlace.cli.outputs import Outputs
from interlace.errors import ArgumentError

_DEFAULT = ("64x200000x256",)
_HALF = {"tables": 64, "rows": 200_000, "width": 128, "lookups": "32", "dtype": "float16"}

_SHAPES = shape_option(
    "TxNxD",
    "Tables, rows and width of each rank, say 64x200000x256; several times.",
)
Lookups = Annotated[
    str, typer.Option(help="Lookups of a bag, separated by commas; 0-60 draws from 0 to 60.")
]
Batch = Annotated[int, typer.Option(min=1, help="Samples of all ranks together.")]


def add_commands(bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add the operator's commands."""
    bench_app.command(OPERATOR)(bench_operator)
    tune_app.command(OPERATOR)(tune_operator)


def bench_operator(
    shape: list[str] | None = _SHAPES,
    lookups: Lookups = "1,8,20,64,0-60",
    batch: Batch = 4096,
    backward: Annotated[
        bool, typer.Option("--backward", help="The backward pass with row-wise Adagrad instead.")
    ] = False,
    world_size: Ranks = None,
    dtype: Dtype = "float32",
    json_file: JsonFile = None,
) -> None:
    """Embedding + All-to-All: fused, every unfused pair, pooling alone, communication alone, and
    the physical floor. From a source tree.

    Without --shape: 64 tables of 200,000 x 256 a rank, and 128 wide in float16 with 32 lookups.
    """
    run = Run(world_size, dtype, Outputs(json=json_file))
    run_bench(shape, lookups, batch, backward, run)


def tune_operator(
    shape: list[str] | None = _SHAPES,
    lookups: Lookups = "1,8,20,64,0-60",
    batch: Batch = 4096,
    world_size: Ranks = None,
    dtype: Dtype = "float32",
    json_file: JsonFile = None,
    *,
    table: TableFile,
) -> None:
    """Embedding + All-to-All: find good configurations, both directions, and write each shape's to
    the tuned table. From a source tree.
    """
    run = Run(world_size, dtype, Outputs(json=json_file, table=table))
    run_tune(shape, lookups, batch, run)


def run_bench(
    shapes: Sequence[str] | None, lookups: str, batch: int, is_backward: bool, run: Run
) -> None:
    """Measure one direction with every shape and number of lookups, and print a table of each.

    Args:
        shapes: Tables, rows and width of each rank, ``TxNxD``; None for the default ones.
        lookups: Lookups of a bag, separated by commas; ``"0-60"`` draws from 0 to 60.
        batch: Samples of all ranks together.
        is_backward: Whether the backward pass is measured instead of the forward pass.
        run: The ranks, the dtype and the files of the command.

    Raises:
        ArgumentError: An option has another value.
    """
    work = parse_work(shapes, lookups, batch, run.dtype)
    kind = "backward" if is_backward else "forward"
    bench.run_bench(OPERATOR, work, functools.partial(measure, kind=kind), run)


def run_tune(shapes: Sequence[str] | None, lookups: str, batch: int, run: Run) -> None:
    """Tune both directions of every shape, and write the configurations into the tuned table.

    The arguments are those of :func:`run_bench`.
    """
    work = parse_work(shapes, lookups, batch, run.dtype)
    bench.run_tune(OPERATOR, work, functools.partial(measure, kind="tune"), run)


def parse_work(
    shapes: Sequence[str] | None, lookups: str, batch: int, dtype: str
) -> list[dict[str, Any]]:
    """Return the sizes of every shape with every number of lookups."""
    bench.require_dtype(dtype)
    counts = lookups.split(",")
    for count in counts:
        ends = count.split("-")
        if (
            len(ends) > 2
            or not all(end.isdecimal() for end in ends)
            or int(ends[0]) > int(ends[-1])
        ):
            raise ArgumentError(
                f"--lookups must be numbers or ranges separated by commas; got {count!r}. Say "
                "--lookups 1,20,0-60."
            )
    meaning, names = "TxNxD: tables, rows and width", ("tables", "rows", "width")
    sizes = [bench.parse_sizes(text, meaning, "64x200000x256") for text in shapes or _DEFAULT]
    work: list[dict[str, Any]] = [
        {**dict(zip(names, size, strict=True)), "lookups": count, "batch": batch}
        for size in sizes
        for count in counts
    ]
    # Without --shape, one more point: narrow tables in half precision.
    return work if shapes else [*work, {**_HALF, "batch": batch}]
