"""``interlace bench batch-invariance``: what the same bits in every batch cost, and on any number
of ranks.
"""

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
from interlace.gemm.invariance import MOST_RANKS, batch_invariant, invariant_implementations
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
    results = list(results)
    # Those of several numbers of ranks have other trees; all of a command have the same ones.
    trees = [word for word in results[0]["times"] if word not in _WORDS] if results else []
    columns = [heading for word in trees for heading in (word, "more than invariant")]
    lines = make_table("operator", "N x K", "tokens", "auto", "invariant", "more", *columns)
    for result in results:
        free, invariant = (report.median_us(result["times"][word]) for word in _WORDS)
        in_trees = [report.median_us(result["times"][word]) for word in trees]
        lines.add_row(
            result["operator"],
            f"{result['columns']} x {result['inner']}",
            str(result["tokens"]),
            f"{free:.1f}",
            f"{invariant:.1f}",
            f"{100 * (invariant / free - 1):+.0f} %",
            *(
                cell
                for us in in_trees
                for cell in (f"{us:.1f}", f"{100 * (us / invariant - 1):+.0f} %")
            ),
        )
    return lines


def measure(work: tuple[str, int, int, int], *, dtype: str) -> list[dict[str, Any]]:
    """Check and time one call by ``impl="auto"``, by ``"batch_invariant"``, and by the latter where
    the number of ranks must not matter, up to this one and up to 8; collective.

    Args:
        work: The operator's name; rows of the product, rounded up until ranks share them out
            evenly, where they do; N and K of one rank's weight ``[N, K]``.
        dtype: The operands' dtype.

    Returns:
        One result, whose ``times`` are those of the two words of ``impl`` and of ``"ranks=2"``, or
        so many as there are, and ``"ranks=8"``.

    Raises:
        InterlaceError: A result is wrong; nothing is timed then.
    """
    operator, tokens, columns, inner = work
    if operator_named(operator).collective != "all_reduce":
        tokens = round_up(tokens, group_of().world_size)
    shape = products.ProductShape(operator, tokens, columns, inner, getattr(torch, dtype))
    case = products.TimedProduct(shape)
    ways = [Way(word, "ours", functools.partial(case.call, impl=word), word) for word in _WORDS]
    for ranks in sorted({max(case.owner.world_size, 2), MOST_RANKS}):
        call = functools.partial(_call_in_tree, case, ranks)
        ways.append(Way(f"ranks={ranks}", "ours", call, BATCH_INVARIANT))
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


def _call_in_tree(case: products.TimedProduct, ranks: int, i: int) -> torch.Tensor:
    """Run the i-th call within ``batch_invariant(ranks=ranks)``."""
    with batch_invariant(ranks=ranks):
        return case.call(i, impl=BATCH_INVARIANT)
