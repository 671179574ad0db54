"""``interlace bench batch-invariance``: what the same bits in every batch cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from interlace.bench import report
from interlace.bench.measures import measure_batch_invariance
from interlace.cli import bench
from interlace.cli.bench_gemm_all_reduce import parse_work
from interlace.cli.console import make_console
from interlace.cli.options import Run
from interlace.cli.tables import make_table
from interlace.gemm.invariance import invariant_implementations
from interlace.registry import BATCH_INVARIANT, operators

SHAPES = ("8192x2048", "8192x7168", "4096x4096")


def compared() -> list[str]:
    """Return the operators around one product that have a batch-invariant implementation."""
    return [
        name
        for name, operator in operators().items()
        if operator.pattern and operator.has_public_function and invariant_implementations(operator)
    ]


def run_comparison(
    names: Sequence[str], tokens: str, shapes: Sequence[str] | None, run: Run
) -> None:
    """Measure every operator at every number of tokens, and print the ratios."""
    sizes = parse_work(tokens, shapes or SHAPES, run.dtype)
    work = [(name, *size) for name in names or compared() for size in sizes]
    document = bench.measure_run(
        "bench", "Measuring batch invariance", work, measure_batch_invariance, run
    )
    console = make_console()
    console.print(table(document["results"]))
    console.print(report.machine_line(document["machine"], document["date"]))
    run.outputs.say_written(console, "All numbers")


def table(results: Iterable[Mapping[str, Any]]) -> Table:
    """Return the times in microseconds, and what the mode takes more, as a table."""
    lines = make_table("operator", "N x K", "tokens", "auto", "invariant", "more")
    for result in results:
        free, invariant = (
            report.median_us(result["times"][word]) for word in ("auto", BATCH_INVARIANT)
        )
        lines.add_row(
            result["operator"],
            f"{result['columns']} x {result['inner']}",
            str(result["tokens"]),
            f"{free:.1f}",
            f"{invariant:.1f}",
            f"{100 * (invariant / free - 1):+.0f} %",
        )
    return lines
