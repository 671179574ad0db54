"""The parts that ``interlace bench`` and ``interlace tune`` share between operators."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from interlace import tuning
from interlace.bench import report
from interlace.cli import tuned
from interlace.cli.console import command_line, make_console, now, run_ranks
from interlace.cli.outputs import Outputs
from interlace.errors import ArgumentError, BackendError

DTYPES = ("bfloat16", "float16", "float32")
_MAX_RANKS = 8


def show(
    document: dict[str, Any],
    operator: str,
    outputs: Outputs,
    table: Callable[[str, Any], Table] = report.table,
) -> None:
    """Print every result as a table on the terminal."""
    console = make_console()
    for result in document["results"]:
        console.print(table(operator, result))
        console.print()
    console.print(report.machine_line(document["machine"], document["date"]))
    outputs.say_written(console, "All numbers")


def write_table(
    document: dict[str, Any], old_table: dict[str, Any] | None, operator: str, outputs: Outputs
) -> None:
    """Put the document's results into the tuned table and print them.

    Args:
        document: what :func:`measure_on_gpus` returned.
        old_table: the contents of the table before; None if there was none.
        operator: the operator's name.
        outputs: the files of the command, of which ``table`` is extended.
    """
    entries = [tuned.entry(result) for result in document["results"]]
    console = make_console()
    for entry, result in zip(entries, document["results"], strict=True):
        fused = f"fused {entry['fused_us']} us ({entry['config']}), " if "fused_us" in entry else ""
        console.print(
            f"{report.shape(result)}: {entry['impl']}; {fused}"
            f"{entry['unfused']} {entry['unfused_us']} us"
        )
    outputs.write_table(lambda: tuned.merge(old_table, operator, document["machine"], entries))
    assert outputs.table is not None
    console.print(f"Tuned table: {outputs.table}")
    if document["machine"]["gpus"]:
        name = tuning.file_name(operator, document["machine"]["gpus"][0])
        if outputs.table.name != name:
            console.print(
                f"Interlace reads it when it is src/interlace/tuning/tables/{name}.", style="dim"
            )


def read_table(outputs: Outputs, operator: str) -> dict[str, Any] | None:
    """Return the tuned table that is to be extended; None if there is none yet.

    Commands call it before they measure for minutes.
    """
    assert outputs.table is not None
    return tuned.read(outputs.table, operator)


def require_dtype(dtype: str, known: Sequence[str] = DTYPES) -> None:
    """Refuse a dtype that cannot be measured.

    Raises:
        ArgumentError: ``dtype`` is not known.
    """
    if dtype not in known:
        raise ArgumentError(f"--dtype must be one of {', '.join(known)}; got {dtype!r}.")


def read_document(file: Path) -> dict[str, Any]:
    """Read a file that ``interlace bench --json`` wrote.

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


def measure_on_gpus(
    command: str,
    title: str,
    work: Sequence[Any],
    worker: Callable[..., list[dict[str, Any]]],
    more: tuple[Any, ...],
    world_size: int | None,
    outputs: Outputs,
) -> dict[str, Any]:
    """Run ``worker(folder, work, *more, header, file)`` on every rank; return its results.

    The returned document is what ``--json`` writes, which grows shape by shape.

    Raises:
        BackendError: there are no GPUs, or fewer than ranks.
    """
    import torch

    # Refuse before processes start.
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
    # The file exists from the start, so a run that is cut off is no stale file of an earlier one.
    outputs.write_json(lambda: {**header, "results": []})
    file = None if outputs.json is None else str(outputs.json.absolute())
    ranks = run_ranks(
        make_console(),
        f"{title} on {world_size} GPUs",
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
    outputs.write_json(lambda: document)
    return document
