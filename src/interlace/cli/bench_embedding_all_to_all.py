"""``interlace bench`` and ``interlace tune`` of pooled embeddings and their all-to-all, which
``benchmarks`` has.
"""

from __future__ import annotations

from typing import Annotated

import typer

from interlace.cli import scripts
from interlace.cli.options import Dtype, JsonFile, Ranks, Run, TableFile, shape_option
from interlace.cli.outputs import Outputs
from interlace.registry import Operator

_SHAPES = shape_option(
    "TxNxD",
    "Tables, rows and width of each rank, say 64x200000x256; several times.",
)
Lookups = Annotated[
    str, typer.Option(help="Lookups of a bag, separated by commas; 0-60 draws from 0 to 60.")
]
Batch = Annotated[int, typer.Option(min=1, help="Samples of all ranks together.")]


def add_commands(operator: Operator, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add the operator's commands."""
    bench_app.command(operator.name)(bench_operator)
    tune_app.command(operator.name)(tune_operator)


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
    commands = scripts.benchmark("embedding_commands")
    run = Run(world_size, dtype, Outputs(json=json_file))
    commands.run_bench(shape, lookups, batch, backward, run)


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
    commands = scripts.benchmark("embedding_commands")
    run = Run(world_size, dtype, Outputs(json=json_file, table=table))
    commands.run_tune(shape, lookups, batch, run)
