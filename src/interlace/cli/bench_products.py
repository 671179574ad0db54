"""``interlace bench`` and ``interlace tune`` of the operators around a matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from interlace.bench import report
from interlace.cli import bench
from interlace.cli.bench_ranks import run_product_rank
from interlace.cli.operator_commands import title_of
from interlace.cli.options import HalfDtype, JsonFile, Ranks, TableFile
from interlace.cli.outputs import Outputs
from interlace.errors import ArgumentError
from interlace.registry import Operator, operators

SHAPES = (
    "8192x8192x2048", "4096x8192x2048", "16384x7168x2048", "8192x8192x7168", "4096x4096x14336",
    "1024x8192x7168", "256x8192x7168", "64x8192x7168",
)  # fmt: skip
DTYPES = ("bfloat16", "float16")
"""Dtypes that both cuBLAS and NCCL take."""

_COMPARED = ("all_to_all", "reduce_scatter")  # collectives whose transports can be compared

Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="MxNxK",
        help="One rank's product, say 8192x8192x2048; several times. \\[default: eight]",
    ),
]


def add_commands(operator: Operator, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add an operator's commands."""
    title = title_of(operator)

    @bench_app.command(
        operator.name,
        help=f"{title}: fused, every unfused pair, the product alone, communication alone, and the "
        "floor.",
    )
    def bench_operator(
        shape: Shapes = None,
        world_size: Ranks = None,
        dtype: HalfDtype = "bfloat16",
        json_file: JsonFile = None,
        tune: Annotated[
            bool, typer.Option("--tune", help="First find a good configuration of each shape.")
        ] = False,
        transports: Annotated[
            bool,
            typer.Option(
                "--transports",
                help="Instead, compare what carries the product to its ranks: stores, copy "
                "engines, NCCL; and their kernels.",
            ),
        ] = False,
    ) -> None:
        if transports:
            _require_transports(operator.name)
        kind = "transports" if transports else "tune" if tune else "bench"
        table = report.transports_table if transports else report.table
        outputs = Outputs(json=json_file)
        work = parse_work(operator.name, shape or SHAPES, dtype)
        document = bench.measure_on_gpus(
            "bench",
            f"Measuring {operator.name}",
            work,
            run_product_rank,
            (dtype, kind),
            world_size,
            outputs,
        )
        bench.show(document, operator.name, outputs, table)

    @tune_app.command(
        operator.name,
        help=f"{title}: find good configurations and write each shape's to the tuned table.",
    )
    def tune_operator(
        table: TableFile,
        shape: Shapes = None,
        world_size: Ranks = None,
        dtype: HalfDtype = "bfloat16",
        json_file: JsonFile = None,
    ) -> None:
        outputs = Outputs(json=json_file, table=table)
        old_table = bench.read_table(outputs, operator.name)
        work = parse_work(operator.name, shape or SHAPES, dtype)
        document = bench.measure_on_gpus(
            "tune",
            f"Tuning {operator.name}",
            work,
            run_product_rank,
            (dtype, "tune"),
            world_size,
            outputs,
        )
        bench.write_table(document, old_table, operator.name, outputs)


def _require_transports(operator: str) -> None:
    """Refuse an operator whose product nothing but its own kernel carries to the peers.

    Raises:
        ArgumentError: The operator has no transports to compare.
    """
    compared = [
        declaration.name
        for declaration in operators().values()
        if declaration.collective in _COMPARED and declaration.pattern[:1] == ("gemm",)
    ]
    if operator not in compared:
        raise ArgumentError(
            f"--transports must be of one of {' and '.join(compared)}; got {operator}."
        )


def parse_work(
    operator: str,
    shapes: Sequence[str],
    dtype: str,
    names: str = "MxNxK",
    description: str = "product",
) -> list[tuple[Any, ...]]:
    """Return the operator and the sizes of every shape, each of which :func:`parse_sizes` reads."""
    bench.require_dtype(dtype, DTYPES)
    return [(operator, *parse_sizes(shape, names, description)) for shape in shapes]


def parse_sizes(text: str, names: str, description: str) -> tuple[int, ...]:
    """Parse ``"8192x8192x2048"`` as M, N and K of one rank's product.

    Args:
        text: the option's value.
        names: the sizes' names in order, such as ``"MxNxK"``.
        description: the thing that has these sizes, for messages.
    """
    parts, expected = text.lower().split("x"), names.split("x")
    if len(parts) != len(expected) or not all(part.isdecimal() and int(part) for part in parts):
        example = "x".join({"B": "2"}.get(name, "4096") for name in expected)
        raise ArgumentError(
            f"--shape must be {names}, the sizes of one rank's {description}; got {text!r}. Say "
            f"--shape {example}."
        )
    return tuple(map(int, parts))
