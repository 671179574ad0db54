"""``interlace bench mixture_of_experts`` and ``interlace tune mixture_of_experts``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from benchmarks.expert_decoding import TOKENS
from benchmarks.mixture_of_experts import FORMS, PARTS, ROUTINGS, measure
from interlace.cli import bench
from interlace.cli.options import Dtype, JsonFile, Ranks, Run, TableFile, shape_option
from interlace.cli.outputs import Outputs
from interlace.errors import ArgumentError
from interlace.operators.mixture_of_experts.config import OPERATOR

SHAPES = ("8x4096x14336x2", "64x2048x1408x6")
"""Mixtral's layer, and a fine-grained one such as DeepSeekMoE's."""

DECODING_SHAPES = ("8x4096x14336x2", "128x2048x768x8")
"""The layers of Mixtral 8x7B and of Qwen3-30B-A3B."""

GPT_OSS_SHAPES = ("128x2880x2880x4", "32x2880x2880x4")
"""The layers of gpt-oss-120b and of gpt-oss-20b."""

_TOKENS = 4096

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


def add_commands(bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add the operator's commands."""
    bench_app.command(OPERATOR)(bench_operator)
    tune_app.command(OPERATOR)(tune_operator)


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
    run = Run(world_size, dtype, Outputs(json=json_file))
    run_bench(shape, tokens, routing, part, form, config, run)


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
    run = Run(world_size, dtype, Outputs(json=json_file, table=table))
    run_tune(shape, tokens, decoding, run)


def run_bench(
    shapes: Sequence[str] | None,
    tokens: Sequence[int] | None,
    routing: str,
    part: str,
    form: str,
    config: str,
    run: Run,
) -> None:
    """Measure every layer, and print a table of each.

    Args:
        shapes: Sizes ``ExHxFxK`` of the layers; None for those that fit ``part`` and ``form``.
        tokens: Tokens of each rank; None for those that fit ``part``.
        routing: Names among ``ROUTINGS``, separated by commas.
        part: One of ``PARTS``; ``"all"`` for all of them; or ``"decoding"``.
        form: One of ``FORMS``.
        config: The fused kernels' configuration; empty for the default one.
        run: The ranks, the dtype and the files of the command.

    Raises:
        ArgumentError: An option has another value.
    """
    known = ("all", *PARTS, "decoding")
    if part not in known:
        raise ArgumentError(f"--part must be one of {', '.join(known)}; got {part!r}.")
    if form not in FORMS:
        raise ArgumentError(f"--form must be one of {', '.join(FORMS)}; got {form!r}.")
    if form == "gpt-oss":
        shapes = shapes or GPT_OSS_SHAPES
    if part == "decoding":
        shapes, tokens = shapes or DECODING_SHAPES, tokens or TOKENS
    work = parse_work(shapes, tokens or [_TOKENS], routing, run.dtype)
    work = [sizes | {"form": form} for sizes in work]
    bench.run_bench(OPERATOR, work, functools.partial(measure, part=part, config=config), run)


def run_tune(
    shapes: Sequence[str] | None, tokens: Sequence[int] | None, is_decoding: bool, run: Run
) -> None:
    """Tune every layer, and write the configurations into the tuned table.

    Args:
        shapes, tokens: See :func:`run_bench`.
        is_decoding: Whether the kernels for few tokens are tuned, forward only.
        run: The ranks, the dtype and the files of the command.
    """
    if is_decoding:
        shapes, tokens = shapes or DECODING_SHAPES, tokens or TOKENS
    # The balanced routing stands for all: the table's sizes do not tell routings apart.
    work = parse_work(shapes, tokens or [_TOKENS], "balanced", run.dtype)
    part = "tune decoding" if is_decoding else "tune"
    bench.run_tune(OPERATOR, work, functools.partial(measure, part=part), run)


def parse_work(
    shapes: Sequence[str] | None, tokens: Sequence[int], routing: str, dtype: str
) -> list[dict[str, Any]]:
    """Return the sizes of every shape with every number of tokens and every routing."""
    bench.require_dtype(dtype)
    routings = routing.split(",")
    for name in routings:
        if name not in ROUTINGS:
            raise ArgumentError(
                f"--routing must be {' or '.join(ROUTINGS)}, or both with a comma; got {name!r}."
            )
    meaning = "ExHxFxK: experts of all ranks, hidden, FFN and experts a token"
    names = ("experts", "hidden", "ffn", "top_k")
    sizes = [bench.parse_sizes(text, meaning, "8x4096x14336x2") for text in shapes or SHAPES]
    return [
        {**dict(zip(names, size, strict=True)), "tokens": count, "routing": name}
        for size in sizes
        for count in tokens
        for name in routings
    ]
