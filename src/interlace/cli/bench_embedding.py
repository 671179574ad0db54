"""``interlace bench embedding_all_to_all`` and ``interlace tune embedding_all_to_all``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from interlace.bench.report import study_table
from interlace.cli import bench, tuned
from interlace.cli.bench_ranks import run_embedding_rank
from interlace.cli.console import is_first_rank, make_console
from interlace.errors import ArgumentError

OPERATOR = "embedding_all_to_all"
_DEFAULT = ("64x200000x256",)
_HALF = {"tables": 64, "rows": 200_000, "width": 128, "lookups": "32", "dtype": "float16"}


def run(
    shapes: list[str] | None,
    lookups: str,
    batch: int,
    world_size: int | None,
    dtype: str,
    json_file: Path | None,
    backward: bool,
    study: bool,
    plot: Path | None,
) -> None:
    """Measure every shape with every number of lookups; tables on the terminal, everything in
    ``json_file``.
    """
    if study and backward:
        raise ArgumentError(
            "--study must stand without --backward: it is of the forward pass. Leave one out."
        )
    if plot is not None and not study:
        raise ArgumentError("--plot must go with --study; got it alone.")
    kind = "study" if study else "backward" if backward else "forward"
    work = parse_work(shapes, lookups, batch, dtype)
    what = f"{'Studying' if study else 'Measuring'} {OPERATOR}"
    document = bench.measure_on_gpus(
        "bench", what, work, run_embedding_rank, (dtype, kind), world_size, json_file
    )
    if not study:
        bench.show(document, OPERATOR, json_file)
        return
    for result in document["results"]:
        make_console().print(study_table(OPERATOR, result))
    if plot is not None and is_first_rank():
        from interlace.cli.picture import draw_study

        draw_study(document, plot)


def run_tune(
    shapes: list[str] | None,
    lookups: str,
    batch: int,
    world_size: int | None,
    dtype: str,
    table: Path,
    json_file: Path | None,
) -> None:
    """Find a good configuration of every shape and put it in the tuned table; all times of these in
    ``json_file``.
    """
    old = tuned.read(table, OPERATOR)  # before minutes are spent
    work = parse_work(shapes, lookups, batch, dtype)
    document = bench.measure_on_gpus(
        "tune",
        f"Tuning {OPERATOR}",
        work,
        run_embedding_rank,
        (dtype, "tune"),
        world_size,
        json_file,
    )
    bench.write_table(document, old, OPERATOR, table)


def parse_work(
    shapes: list[str] | None, lookups: str, batch: int, dtype: str
) -> list[dict[str, Any]]:
    """Arguments of ``bench.embedding_all_to_all.Shape``, of every shape with every number of
    lookups.
    """
    if dtype not in bench.DTYPES:
        raise ArgumentError(f"--dtype must be one of {', '.join(bench.DTYPES)}; got {dtype!r}.")
    counts = lookups.split(",")
    for each in counts:
        ends = each.split("-")
        if (
            len(ends) > 2
            or not all(end.isdecimal() for end in ends)
            or int(ends[0]) > int(ends[-1])
        ):
            raise ArgumentError(
                f"--lookups must be numbers or ranges separated by commas; got {each!r}. Say "
                "--lookups 1,20,0-60."
            )
    sizes = [parse_tables(shape) for shape in shapes or _DEFAULT]
    work: list[dict[str, Any]] = [
        {**size, "lookups": count, "batch": batch} for size in sizes for count in counts
    ]
    return work if shapes else [*work, {**_HALF, "batch": batch}]


def parse_tables(text: str) -> dict[str, int]:
    """``"64x200000x256"`` -> tables, rows and width of each rank."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentError(
            f"--shape must be TxNxD: tables, rows and width; got {text!r}. Say --shape "
            "64x200000x256."
        )
    tables, rows, width = map(int, parts)
    return {"tables": tables, "rows": rows, "width": width}
