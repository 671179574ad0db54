"""``interlace bench`` and ``interlace tune`` of the operators around a matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interlace.bench import report
from interlace.cli import bench, tuned
from interlace.cli.bench_ranks import run_product_rank
from interlace.errors import ArgumentError
from interlace.registry import operators

SHAPES = (
    "8192x8192x2048", "4096x8192x2048", "16384x7168x2048", "8192x8192x7168", "4096x4096x14336",
    "1024x8192x7168", "256x8192x7168", "64x8192x7168",
)  # fmt: skip
DTYPES = ("bfloat16", "float16")  # of what cuBLAS and NCCL both take

_COMPARED = ("all_to_all", "reduce_scatter")  # collectives whose transports can be compared


def run(
    operator: str,
    shapes: list[str] | None,
    world_size: int | None,
    dtype: str,
    json_file: Path | None,
    tune: bool,
    transports: bool,
) -> None:
    """Measure every shape; tables on the terminal, everything in ``json_file``."""
    if transports:
        declared = operators().values()
        compared = [
            each.name
            for each in declared
            if each.collective in _COMPARED and each.pattern[:1] == ("gemm",)
        ]
        if operator not in compared:
            raise ArgumentError(
                f"--transports must be of one of {' and '.join(compared)}; got {operator}."
            )
    work = parse_work(operator, shapes or SHAPES, dtype)
    what = f"Measuring {operator}"
    kind = "transports" if transports else "tune" if tune else "bench"
    document = bench.measure_on_gpus(
        "bench", what, work, run_product_rank, (dtype, kind), world_size, json_file
    )
    bench.show(
        document, operator, json_file, report.transports_table if transports else report.table
    )


def run_tune(
    operator: str,
    shapes: list[str] | None,
    world_size: int | None,
    dtype: str,
    table: Path,
    json_file: Path | None,
) -> None:
    """Find a good configuration of every shape and put it in the tuned table; all times of these in
    ``json_file``.
    """
    old = tuned.read(table, operator)  # before minutes are spent
    work = parse_work(operator, shapes or SHAPES, dtype)
    document = bench.measure_on_gpus(
        "tune", f"Tuning {operator}", work, run_product_rank, (dtype, "tune"), world_size, json_file
    )
    bench.write_table(document, old, operator, table)


def parse_work(
    operator: str, shapes: Sequence[str], dtype: str, names: str = "MxNxK", what: str = "product"
) -> list[tuple[Any, ...]]:
    """Operator and sizes of every shape, which is written as in :func:`parse_sizes`."""
    if dtype not in DTYPES:
        raise ArgumentError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    return [(operator, *parse_sizes(shape, names, what)) for shape in shapes]


def parse_sizes(text: str, names: str, what: str) -> tuple[int, ...]:
    """``"8192x8192x2048"`` -> M, N and K of one rank's product.

    Args:
        names: ``"MxNxK"``.
        what: has these sizes.
    """
    parts, wanted = text.lower().split("x"), names.split("x")
    if len(parts) != len(wanted) or not all(part.isdecimal() and int(part) for part in parts):
        example = "x".join({"B": "2"}.get(name, "4096") for name in wanted)
        raise ArgumentError(
            f"--shape must be {names}, the sizes of one rank's {what}; got {text!r}. Say --shape "
            f"{example}."
        )
    return tuple(map(int, parts))
