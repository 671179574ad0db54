"""The parts that ``interlace bench`` and ``interlace tune`` share between operators."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from interlace import environment, tuning
from interlace.bench import report, tuned
from interlace.cache_folder import cache_folder
from interlace.cli.console import make_console, run_ranks
from interlace.cli.options import MOST_RANKS, Run
from interlace.cli.ranks import measure_shapes
from interlace.errors import ArgumentError, BackendError
from interlace.units import parse_count, shortened

DTYPES = ("bfloat16", "float16", "float32")


def run_bench(
    operator: str,
    work: Sequence[Any],
    measure: Callable[..., Any],
    run: Run,
    *,
    table: Callable[[str, Any], Table] = report.table,
) -> None:
    """Measure an operator for ``interlace bench``, and print every result as a table.

    Args:
        operator: The operator's name.
        work: Sizes of each measured shape.
        measure: Function that every rank calls with the sizes of a shape and a ``dtype``.
        run: The ranks, the dtype and the files of the command.
        table: Function that makes a result's table.
    """
    document = measure_on_gpus("bench", f"Measuring {operator}", work, measure, run)
    console = make_console()
    for result in document["results"]:
        console.print(table(operator, result))
        console.print()
    console.print(report.machine_line(document["machine"], document["date"]))
    run.outputs.say_written(console, "All numbers")


def run_tune(operator: str, work: Sequence[Any], measure: Callable[..., Any], run: Run) -> None:
    """Measure an operator for ``interlace tune``, and put its results into the tuned table.

    The arguments are those of :func:`run_bench`; ``run.outputs.table`` is the table to extend.
    """
    outputs = run.outputs
    assert outputs.table is not None
    # A table that cannot be extended is refused before minutes are spent on measuring.
    old_table = tuned.read(outputs.table, operator)
    document = measure_on_gpus("tune", f"Tuning {operator}", work, measure, run)
    machine, results = document["machine"], document["results"]
    entries = [tuned.entry(result) for result in results]
    console = make_console()
    for entry, result in zip(entries, results, strict=True):
        fused = f"fused {entry['fused_us']} us ({entry['config']}), " if "fused_us" in entry else ""
        console.print(
            f"{report.shape(result)}: {entry['impl']}; {fused}"
            f"{entry['unfused']} {entry['unfused_us']} us"
        )
    outputs.write_table(lambda: tuned.merge(old_table, operator, machine, entries))
    console.print(f"Tuned table: {outputs.table}")
    # Without a GPU's name there is no telling which table Interlace would read.
    for gpu in machine["gpus"][:1]:
        name = tuning.file_name(operator, gpu)
        if outputs.table.name != name:
            console.print(
                f"Interlace reads it when it is src/interlace/tuning/tables/{name}.", style="dim"
            )


def require_dtype(dtype: str, known: Sequence[str] = DTYPES) -> None:
    """Refuse a dtype that cannot be measured.

    Raises:
        ArgumentError: ``dtype`` is not known.
    """
    if dtype not in known:
        raise ArgumentError(f"--dtype must be one of {', '.join(known)}; got {dtype!r}.")


def parse_sizes(text: str, meaning: str, example: str) -> tuple[int, ...]:
    """Parse the value of ``--shape``, such as ``"8192x2048"``, as positive numbers.

    Args:
        text: The option's value.
        meaning: The sizes and what they are of, for the message.
        example: A value that is right; it has as many sizes as ``text`` must have.

    Raises:
        ArgumentError: ``text`` has other than so many positive numbers.
    """
    sizes = [parse_count(part) for part in text.lower().split("x")]
    if len(sizes) != len(example.split("x")) or not all(sizes):
        raise ArgumentError(f"a shape must be {meaning}; got {shortened(text)}. Say {example}.")
    return tuple(size for size in sizes if size)


def parse_product(text: str) -> tuple[int, ...]:
    """Parse M, N and K of a product on one rank, such as ``"4096x4096x4096"``.

    Raises:
        ArgumentError: ``text`` has other than three positive numbers.
    """
    return parse_sizes(text, "MxNxK, the sizes of one rank's product", "4096x4096x4096")


@contextlib.contextmanager
def nothing_measured() -> Iterator[None]:
    """Let ranks that start within the context measure every call, whatever this user's programs
    have measured before; the user's own machine profile stays known.
    """
    profiles = cache_folder("profiles")
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:
        if profiles.is_dir():
            shutil.copytree(profiles, Path(folder) / "profiles")
        with environment.changed({"INTERLACE_CACHE_DIR": folder}):
            yield


def measure_on_gpus(
    command: str,
    title: str,
    work: Sequence[Any],
    measure: Callable[..., list[dict[str, Any]]],
    run: Run,
    budget_s: float = math.inf,
) -> dict[str, Any]:
    """Measure shapes on all ranks; return the document, which ``--json`` gets shape by shape.

    Args:
        command: ``"bench"`` or ``"tune"``.
        title: Words of the progress bar.
        work: Sizes of each shape.
        measure: Function that every rank calls with the sizes of a shape and a ``dtype``.
        run: The ranks, the dtype and the files of the command.
        budget_s: Seconds after which no further shape is begun.

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
    world_size, outputs = run.world_size or min(gpus, MOST_RANKS), run.outputs
    if world_size > gpus:
        raise BackendError(
            f"interlace {command} must have a GPU for each of {world_size} ranks, since times of "
            "ranks that share a GPU mean "
            f"nothing; got {gpus}. Say --world-size {gpus}."
        )
    from interlace.cli import machine

    header = machine.header()
    # The file exists from the start, so a run that is cut off is no stale file of an earlier one.
    outputs.write_json(lambda: {**header, "results": []})
    file = None if outputs.json is None else str(outputs.json.absolute())
    ranks = run_ranks(
        make_console(),
        f"{title} on {world_size} GPUs",
        len(work),
        measure_shapes,
        world_size,
        list(work),
        functools.partial(measure, dtype=run.dtype),
        budget_s,
        header,
        file,
        backend="cuda",
    )
    document = {**header, "results": ranks[0]}
    outputs.write_json(lambda: document)
    return document
