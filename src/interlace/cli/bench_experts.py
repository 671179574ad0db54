"""``interlace bench mixture_of_experts`` and ``interlace tune mixture_of_experts``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from interlace.cli import bench, tuned
from interlace.cli.bench_ranks import run_experts_rank
from interlace.errors import ArgumentError

OPERATOR = "mixture_of_experts"
PARTS = ("all", "combine", "forward", "backward")
ROUTINGS = ("balanced", "skewed")
SHAPES = ("8x4096x14336x2", "64x2048x1408x6")
"""Mixtral's layer, and a fine-grained one such as DeepSeekMoE's."""


def run(
    shapes: list[str] | None,
    tokens: int,
    routing: str,
    part: str,
    world_size: int | None,
    dtype: str,
    json_file: Path | None,
    config: str,
) -> None:
    """Measure every shape with every routing; tables on the terminal, everything in ``json_file``."""
    if part not in PARTS:
        raise ArgumentError(f"--part must be one of {', '.join(PARTS)}; got {part!r}.")
    work = parse_work(shapes, tokens, routing, dtype)
    what = f"Measuring {OPERATOR}"
    document = bench.measure_on_gpus(
        "bench", what, work, run_experts_rank, (dtype, part, config), world_size, json_file
    )
    bench.show(document, OPERATOR, json_file)


def run_tune(
    shapes: list[str] | None,
    tokens: int,
    world_size: int | None,
    dtype: str,
    table: Path,
    json_file: Path | None,
) -> None:
    """Find a good configuration of every shape, balanced, and put it in the tuned table."""
    old = tuned.read(table, OPERATOR)  # before minutes are spent
    work = parse_work(shapes, tokens, "balanced", dtype)
    more = dtype, "tune", ""
    document = bench.measure_on_gpus(
        "tune", f"Tuning {OPERATOR}", work, run_experts_rank, more, world_size, json_file
    )
    bench.write_table(document, old, OPERATOR, table)


def parse_work(
    shapes: list[str] | None, tokens: int, routing: str, dtype: str
) -> list[dict[str, Any]]:
    """Arguments of ``bench.mixture_of_experts.Shape``, of every shape with every routing."""
    if dtype not in bench.DTYPES:
        raise ArgumentError(f"--dtype must be one of {', '.join(bench.DTYPES)}; got {dtype!r}.")
    for each in routing.split(","):
        if each not in ROUTINGS:
            raise ArgumentError(
                f"--routing must be {' or '.join(ROUTINGS)}, or both with a comma; got {each!r}."
            )
    sizes = [parse_layer(shape) for shape in shapes or SHAPES]
    return [
        {**size, "tokens": tokens, "routing": each} for size in sizes for each in routing.split(",")
    ]


def parse_layer(text: str) -> dict[str, int]:
    """``"8x4096x14336x2"`` -> experts, hidden, ffn and top_k."""
    parts = text.lower().split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentError(
            "--shape must be ExHxFxK: experts of all ranks, hidden, FFN and experts a token; got "
            f"{text!r}. "
            f"Say --shape 8x4096x14336x2."
        )
    experts, hidden, ffn, top_k = map(int, parts)
    return {"experts": experts, "hidden": hidden, "ffn": ffn, "top_k": top_k}
