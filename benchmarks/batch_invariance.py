"""``interlace bench batch-invariance``: what the same bits in every batch cost."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks.gemv_commands import parse_weights
from interlace.bench import products, report
from interlace.bench.benchmark import Way, relative_error
from interlace.cli import bench
from interlace.cli.console import make_console, make_table
from interlace.cli.options import Run
from interlace.comm import group_of
from interlace.gemm.invariance import invariant_implementations
from interlace.registry import BATCH_INVARIANT, operator_named, operators
from interlace.units import round_up

SHAPES = ("8192x2048", "8192x7168", "4096x4096")
_WORDS = ("auto", BATCH_INVARIANT)


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
    sizes = parse_weights(tokens, shapes or SHAPES, run.dtype)
    work = [(name, *size) for name in names or compared() for size in sizes]
    document = bench.measure_on_gpus("bench", "Measuring batch invariance", work, measure, run)
    console = make_console()
    console.print(table(document["results"]))
    console.print(report.machine_line(document["machine"], document["date"]))
    run.outputs.say_written(console, "All numbers")


def table(results: Iterable[Mapping[str, Any]]) -> Table:
    """Return the times in microseconds, and what the mode takes more, as a table."""
    lines = make_table("operator", "N x K", "tokens", "auto", "invariant", "more")
    for result in results:
        free, invariant = (report.median_us(result["times"][word]) for word in _WORDS)
        lines.add_row(
            result["operator"],
            f"{result['columns']} x {result['inner']}",
            str(result["tokens"]),
            f"{free:.1f}",
            f"{invariant:.1f}",
            f"{100 * (invariant / free - 1):+.0f} %",
        )
    return lines


def measure(work: tuple[str, int, int, int], *, dtype: str) -> list[dict[str, Any]]:
    """Check and time one call by ``impl="auto"`` and by ``"batch_invariant"``; collective.

    Args:
        work: The operator's name; rows of the product, rounded up until ranks share them out
            evenly, where they do; N and K of one rank's weight ``[N, K]``.
        dtype: The operands' dtype.

    Returns:
        One result, whose ``times`` are those of the two words of ``impl``.

    Raises:
        InterlaceError: A result is wrong; nothing is timed then.
    """
    operator, tokens, columns, inner = work
    if operator_named(operator).collective != "all_reduce":
        tokens = round_up(tokens, group_of().world_size)
    shape = products.ProductShape(operator, tokens, columns, inner, getattr(torch, dtype))
    case = products.TimedProduct(shape)
    ways = [Way(word, "ours", functools.partial(case.call, impl=word), word) for word in _WORDS]
    expected = case.expected(0)
    worst = max(
        case.accept([relative_error(way.call(0), expected)], way.name)  # type: ignore[arg-type]
        for way in ways
    )
    times = case.time(ways)
    case.owner.release()
    result = {
        "operator": operator,
        "tokens": tokens,
        "columns": columns,
        "inner": inner,
        "dtype": dtype,
        "world_size": case.owner.world_size,
        "relative_error": worst,
        "times": times,
    }
    return [result]
