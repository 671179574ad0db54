"""``interlace bench`` and ``interlace tune`` of the operators around a matrix product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from interlace.bench import report
from interlace.bench.measures import measure_product
from interlace.cli import bench
from interlace.cli.operator_commands import title_of
from interlace.cli.options import HalfDtype, Run, shape_option, takes_run
from interlace.errors import ArgumentError
from interlace.registry import Operator, operators

SHAPES = (
    "8192x8192x2048", "4096x8192x2048", "16384x7168x2048", "8192x8192x7168", "4096x4096x14336",
    "1024x8192x7168", "256x8192x7168", "64x8192x7168",
)  # fmt: skip
DTYPES = ("bfloat16", "float16")
"""Dtypes that both cuBLAS and NCCL take."""

_COMPARED = ("all_to_all", "reduce_scatter")  # collectives whose transports can be compared


_SHAPES = shape_option(
    "MxNxK", "One rank's product, say 8192x8192x2048; several times. \\[default: eight]"
)


def add_commands(operator: Operator, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add an operator's commands."""
    title = title_of(operator)
    parse = functools.partial(parse_work, operator.name)

    @bench_app.command(
        operator.name,
        help=f"{title}: fused, every unfused pair, the product alone, communication alone, and the "
        "floor.",
    )
    @takes_run(dtypes=HalfDtype)
    def bench_operator(
        run: Run,
        shape: list[str] | None = _SHAPES,
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
        measure = functools.partial(measure_product, kind=kind)
        bench.run_bench(operator.name, parse(shape, run.dtype), measure, run, table=table)

    add_tune_command(
        tune_app,
        operator.name,
        f"{title}: find good configurations and write each shape's to the tuned table.",
        _SHAPES,
        parse,
        functools.partial(measure_product, kind="tune"),
    )


def add_tune_command(
    app: typer.Typer,
    operator: str,
    description: str,
    shapes: Any,
    parse: Callable[[list[str] | None, str], list[tuple[Any, ...]]],
    measure: Callable[..., list[dict[str, Any]]],
    *,
    verb: str = "Tuning",
) -> None:
    """Add ``interlace tune`` of an operator around products.

    Args:
        app: The group of the command.
        operator: The operator's name.
        description: The command's help.
        shapes: The option that :func:`shape_option` has made.
        parse: Function of the shapes and the dtype that returns the work.
        measure: Function that measures one piece of work with a ``dtype``, on every rank.
        verb: First word of the progress bar.
    """

    @app.command(operator, help=description)
    @takes_run(dtypes=HalfDtype, makes_table=True)
    def tune_operator(run: Run, shape: list[str] | None = shapes) -> None:
        bench.run_tune(operator, parse(shape, run.dtype), measure, run, verb=verb)


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
    shapes: Sequence[str] | None,
    dtype: str,
    *,
    dtypes: Sequence[str] = DTYPES,
    default: Sequence[str] = SHAPES,
    meaning: str = "MxNxK, the sizes of one rank's product",
    example: str = "4096x4096x4096",
) -> list[tuple[Any, ...]]:
    """Return the operator and the sizes of every shape, or of the default shapes.

    ``dtype`` must be one of ``dtypes``; ``meaning`` and ``example`` are those of
    :func:`interlace.cli.bench.parse_sizes`.
    """
    bench.require_dtype(dtype, dtypes)
    return [(operator, *bench.parse_sizes(shape, meaning, example)) for shape in shapes or default]
