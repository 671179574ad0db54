"""Commands of ``interlace bench`` and ``interlace tune`` for our own results and profiles.

Each command's module is imported when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from interlace.cli.options import Dtype, JsonFile, Ranks, Run
from interlace.cli.outputs import Outputs


def add_commands(bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add the commands."""
    bench_app.command("sweep")(bench_sweep)
    bench_app.command("batch-invariance")(bench_batch_invariance)
    bench_app.command("table")(bench_table)
    tune_app.command("profile")(tune_profile)


def bench_sweep(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random calls.")] = 0,
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds after which no further call is measured.")
    ] = 120,
    add: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Measure nothing, add up what sweeps wrote with --json, with auto as it chooses "
            "today; several times.",
        ),
    ] = None,
    any_size: Annotated[
        bool,
        typer.Option(
            "--any-size",
            help="Draw calls that no model need have: other sizes, weights along N, padded rows, "
            "biases.",
        ),
    ] = False,
    world_size: Ranks = None,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32 or float8_e4m3fn.")
    ] = "bfloat16",
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw cumulative curves: PNG, SVG or PDF."),
    ] = None,
) -> None:
    """Measure every implementation of random calls, by default those of models, and
    compare what impl="auto" takes with the fastest.
    """
    from benchmarks.sweep import run_sweep

    outputs = Outputs(json=json_file, plot=plot)
    run_sweep(seed, budget, add or (), any_size, world_size, dtype, outputs)


def bench_batch_invariance(
    operator: Annotated[
        list[str] | None,
        typer.Option(help="An operator; several times. \\[default: all that have the mode]"),
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Tokens to measure at, separated by commas.")
    ] = "1,2,4,8,16,32,64",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NxK",
            help="Rows and columns of one rank's weight, say 8192x2048; several times. "
            "\\[default: three]",
        ),
    ] = None,
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
) -> None:
    """Measure what the same bits in every batch, and for any number of ranks, cost
    (interlace.batch_invariant).
    """
    from benchmarks.batch_invariance import run_comparison

    run = Run(world_size, dtype, Outputs(json=json_file))
    run_comparison(operator or (), tokens, shape, run)


def bench_table(
    files: Annotated[list[Path], typer.Argument(help="JSON files that `interlace bench` wrote.")],
) -> None:
    """Render measurements as a Markdown table."""
    from benchmarks.tables import render

    typer.echo(render(files), nl=False)


def tune_profile(
    files: Annotated[
        list[Path],
        typer.Argument(help="JSON files that `interlace bench` wrote, `sweep` among them."),
    ],
    json_file: JsonFile = None,
) -> None:
    """Fit a machine's profile, by which impl="auto" predicts times, to measurements."""
    from benchmarks.profile_fit import run_profile

    run_profile(files, Outputs(json=json_file))
