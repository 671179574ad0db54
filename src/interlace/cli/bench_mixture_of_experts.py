"""``interlace bench`` and ``interlace tune`` of a mixture of experts, which ``benchmarks`` has."""

from __future__ import annotations

from typing import Annotated

import typer

from interlace.cli import scripts
from interlace.cli.options import Dtype, JsonFile, Ranks, Run, TableFile, shape_option
from interlace.cli.outputs import Outputs
from interlace.registry import Operator

_SHAPES = shape_option(
    "ExHxFxK",
    "Experts of all ranks, hidden, FFN and experts a token; several times. \\[default: two]",
)
Tokens = Annotated[
    list[int] | None,
    typer.Option(
        min=1, help="Tokens of each rank; several times. \\[default: 4096; in decoding 1 to 256]"
    ),
]


def add_commands(operator: Operator, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add the operator's commands."""
    bench_app.command(operator.name)(bench_operator)
    tune_app.command(operator.name)(tune_operator)


def bench_operator(
    shape: list[str] | None = _SHAPES,
    tokens: Tokens = None,
    routing: Annotated[
        str, typer.Option(help="balanced, skewed, or both with a comma.")
    ] = "balanced,skewed",
    part: Annotated[
        str, typer.Option(help="combine, forward, backward, all of these, or decoding.")
    ] = "all",
    form: Annotated[
        str,
        typer.Option(help="swiglu, or gpt-oss: its activation, biases and order of the weights."),
    ] = "swiglu",
    config: Annotated[
        str, typer.Option(help="The fused kernels' configuration, as results show it.")
    ] = "",
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
) -> None:
    """Mixture of experts: second product and combine, the layer, its backward pass; fused, unfused,
    and the physical floor. From a source tree.

    Without --shape: Mixtral's 8 experts of 4096 x 14336, top 2, and 64 experts of 2048 x 1408, top
    6. With --part decoding: few tokens and cold weights, the time of each kernel, and in place of
    the second layer that of Qwen3-30B-A3B, 128 experts of 2048 x 768, top 8. With --form gpt-oss:
    128 and 32 experts of 2880 x 2880, top 4.
    """
    commands = scripts.benchmark("expert_commands")
    run = Run(world_size, dtype, Outputs(json=json_file))
    commands.run_bench(shape, tokens, routing, part, form, config, run)


def tune_operator(
    shape: list[str] | None = _SHAPES,
    tokens: Tokens = None,
    decoding: Annotated[
        bool, typer.Option("--decoding", help="The kernels for few tokens, forward only.")
    ] = False,
    world_size: Ranks = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
    *,
    table: TableFile,
) -> None:
    """Mixture of experts: find a good configuration of each layer, both directions, or of its
    decoding, and write it to the tuned table. From a source tree.
    """
    commands = scripts.benchmark("expert_commands")
    run = Run(world_size, dtype, Outputs(json=json_file, table=table))
    commands.run_tune(shape, tokens, decoding, run)
