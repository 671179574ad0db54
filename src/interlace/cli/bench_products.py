"""``interlace bench`` and ``interlace tune`` of the operators around a matrix product; those of few
rows are in ``benchmarks``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from interlace.bench import products
from interlace.cli import bench, scripts
from interlace.cli.operator_commands import title_of
from interlace.cli.options import JsonFile, Ranks, Run, TableFile, shape_option
from interlace.cli.outputs import Outputs
from interlace.errors import ArgumentError
from interlace.registry import Operator, operators

SHAPES = (
    "8192x8192x2048", "4096x8192x2048", "16384x7168x2048", "8192x8192x7168", "4096x4096x14336",
    "1024x8192x7168", "256x8192x7168", "64x8192x7168",
)  # fmt: skip
DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
"""Dtypes that cuBLAS takes, and whose results NCCL does."""

_COMPARED = ("all_to_all", "reduce_scatter")  # collectives whose transports can be compared

_Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float8_e4m3fn.")]
_PRODUCTS = shape_option(
    "MxNxK", "One rank's product, say 8192x8192x2048; several times. \\[default: eight]"
)


def add_commands(operator: Operator, bench_app: typer.Typer, tune_app: typer.Typer) -> None:
    """Add an operator's commands, and those for few rows by the name of their function."""
    title = title_of(operator)

    def parse(shapes: Sequence[str] | None, dtype: str) -> list[tuple[Any, ...]]:
        bench.require_dtype(dtype, DTYPES)
        return [(operator.name, *bench.parse_product(shape)) for shape in shapes or SHAPES]

    @bench_app.command(
        operator.name,
        help=f"{title}: fused, every unfused pair, the product alone, communication alone, and the "
        "floor.",
    )
    def bench_operator(
        shape: list[str] | None = _PRODUCTS,
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
        world_size: Ranks = None,
        dtype: _Dtype = "bfloat16",
        block_scales: Annotated[
            bool,
            typer.Option("--block-scales", help="Give float8 operands a scale for each block."),
        ] = False,
        json_file: JsonFile = None,
    ) -> None:
        if block_scales and dtype != DTYPES[-1]:
            raise ArgumentError(f"--block-scales must be given with {DTYPES[-1]}; got {dtype}.")
        run, work = Run(world_size, dtype, Outputs(json=json_file)), parse(shape, dtype)
        if transports:
            _require_transports(operator.name)
            compared = scripts.benchmark("transports")
            bench.run_bench(operator.name, work, compared.measure, run, table=compared.table)
        else:
            measure = functools.partial(products.measure, tunes=tune, block_scales=block_scales)
            bench.run_bench(operator.name, work, measure, run)

    @tune_app.command(
        operator.name,
        help=f"{title}: find good configurations and write each shape's to the tuned table.",
    )
    def tune_operator(
        shape: list[str] | None = _PRODUCTS,
        world_size: Ranks = None,
        dtype: _Dtype = "bfloat16",
        json_file: JsonFile = None,
        *,
        table: TableFile,
    ) -> None:
        run = Run(world_size, dtype, Outputs(json=json_file, table=table))
        measure = functools.partial(products.measure, tunes=True)
        bench.run_tune(operator.name, parse(shape, dtype), measure, run)

    if operator.vector_name:
        scripts.add_benchmark(operator.vector_name, bench_app, tune_app)


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
