"""``interlace bench gemv_all_reduce`` and ``interlace tune gemv_all_reduce``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from interlace import tuning
from interlace.bench import report
from interlace.cli import tuned
from interlace.cli.console import command_line, make_console, now, run_ranks, write_json
from interlace.errors import ArgumentError, BackendError

OPERATOR = "gemv_all_reduce"
SHAPES = (
    "8192x2048",
    "8192x7168",
    "8192x8192",
    "16384x4096",
    "12288x12288",
    "4096x4096",
    "5120x3456",
)
DTYPES = ("bfloat16", "float16", "float32")
_MAX_RANKS = 8


def run(
    tokens: str,
    shapes: list[str] | None,
    world_size: int | None,
    dtype: str,
    json_file: Path | None,
    tune: bool,
) -> None:
    """Measure every shape at every number of tokens; tables on the terminal, everything in
    ``json_file``.
    """
    document = _measure("bench", tokens, shapes, world_size, dtype, tune, json_file)
    show(document, OPERATOR, json_file)


def show(
    document: dict[str, Any],
    operator: str,
    json_file: Path | None,
    table: Callable[[str, Any], Table] = report.table,
) -> None:
    """Every result as a table on the terminal."""
    console = make_console()
    for result in document["results"]:
        console.print(table(operator, result))
        console.print()
    console.print(report.machine_line(document["machine"], document["date"]))
    if json_file is not None:
        console.print(f"All numbers: {json_file}")


def run_tune(
    tokens: str,
    shapes: list[str] | None,
    world_size: int | None,
    dtype: str,
    table: Path,
    json_file: Path | None,
) -> None:
    """Find the best configuration of every shape and put it in the tuned table; all times of these
    in ``json_file``.
    """
    old = tuned.read(table, OPERATOR)  # before minutes are spent
    document = _measure("tune", tokens, shapes, world_size, dtype, True, json_file)
    write_table(document, old, OPERATOR, table)


def write_table(
    document: dict[str, Any], old: dict[str, Any] | None, operator: str, table: Path
) -> None:
    """Put the document's results into the tuned table ``table``, whose contents so far are ``old``,
    and say what they are.
    """
    entries = [tuned.entry(result) for result in document["results"]]
    console = make_console()
    for entry, result in zip(entries, document["results"], strict=True):
        console.print(
            f"{report.shape(result)}: {entry['impl']}; fused {entry['fused_us']} us "
            f"({entry['config']}), {entry['unfused']} {entry['unfused_us']} us"
        )
    write_json(table, tuned.merge(old, operator, document["machine"], entries))
    console.print(f"Tuned table: {table}")
    if document["machine"]["gpus"]:
        name = tuning.file_name(operator, document["machine"]["gpus"][0])
        if table.name != name:
            console.print(
                f"Interlace reads it when it is src/interlace/tuning/tables/{name}.", style="dim"
            )


def read_document(file: Path) -> dict[str, Any]:
    """A file that ``interlace bench --json`` wrote.

    Raises:
        ArgumentError: it is not one.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"{file} must be a JSON file that interlace bench wrote; {error}."
        ) from error
    if not isinstance(document, dict) or not {"machine", "results"} <= document.keys():
        raise ArgumentError(
            f"{file} must be a JSON file that interlace bench wrote; it lacks machine and results."
        )
    return document


def parse_tokens(text: str) -> list[int]:
    """``"1,2,4"`` -> ``[1, 2, 4]``."""
    try:
        tokens = [int(part) for part in text.split(",")]
    except ValueError:
        tokens = [0]
    if min(tokens) < 1:
        raise ArgumentError(
            f"--tokens must be positive numbers separated by commas; got {text!r}. Say --tokens "
            "1,2,4."
        )
    return tokens


def parse_shape(text: str) -> tuple[int, int]:
    """``"8192x2048"`` -> ``(8192, 2048)``: N and K/R, of one rank's weight."""
    rows, _, columns = text.lower().partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise ArgumentError(
            f"--shape must be NxK, the sizes of one rank's weight; got {text!r}. Say --shape "
            "8192x2048."
        )
    return int(rows), int(columns)


def _measure(
    command: str,
    tokens: str,
    shapes: list[str] | None,
    world_size: int | None,
    dtype: str,
    tune: bool,
    json_file: Path | None,
) -> dict[str, Any]:
    """Run the ranks; the document that ``--json`` writes, which grows shape by shape."""
    sizes = [parse_shape(shape) for shape in shapes or SHAPES]
    counts = parse_tokens(tokens)
    if dtype not in DTYPES:
        raise ArgumentError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    work = [(count, rows, columns) for rows, columns in sizes for count in counts]
    from interlace.cli.bench_ranks import run_rank

    what = f"{'Tuning' if tune else 'Measuring'} {OPERATOR}"
    return measure_on_gpus(command, what, work, run_rank, (dtype, tune), world_size, json_file)


def measure_on_gpus(
    command: str,
    what: str,
    work: Sequence[Any],
    worker: Callable[..., list[dict[str, Any]]],
    more: tuple[Any, ...],
    world_size: int | None,
    json_file: Path | None,
) -> dict[str, Any]:
    """Run ``worker(folder, work, *more, header, file)`` on every rank; the document of its results.

    Raises:
        BackendError: there are no GPUs, or fewer than ranks.
    """
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise BackendError(
            f"interlace {command} must have CUDA GPUs, since no time measured on the CPU means "
            "anything; got none. "
            "`interlace doctor` says what is missing; `interlace demo --backend cpu` checks the "
            "kernels without a GPU."
        )
    world_size = world_size or min(gpus, _MAX_RANKS)
    if world_size > gpus:
        raise BackendError(
            f"interlace {command} must have a GPU for each of {world_size} ranks, since times of "
            "ranks that share a GPU mean "
            f"nothing; got {gpus}. Say --world-size {gpus}."
        )
    from interlace.cli import machine

    header = {"machine": machine.describe(), "command": command_line(), "date": now()}
    if json_file is not None:
        write_json(
            json_file, {**header, "results": []}
        )  # before minutes are spent: it can be written
    file = None if json_file is None else str(json_file.absolute())
    title = f"{what} on {world_size} GPUs"
    ranks = run_ranks(
        make_console(),
        title,
        len(work),
        worker,
        world_size,
        list(work),
        *more,
        header,
        file,
        backend="cuda",
    )
    document = {**header, "results": ranks[0]}
    if json_file is not None:
        write_json(json_file, document)
    return document
