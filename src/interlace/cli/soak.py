"""``interlace soak``: random calls of every operator, each result checked, with a report."""

from __future__ import annotations

import collections
import multiprocessing
import os
import random
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from interlace.bench.report import machine_line, read_document
from interlace.cli.console import command_line, make_console, run_ranks
from interlace.cli.options import MOST_RANKS
from interlace.cli.outputs import Outputs
from interlace.documents import reading
from interlace.errors import ArgumentError

_SECONDS = 60.0
_DEADLINE_S = 60.0
"""The default deadline: long, for kernels are compiled meanwhile."""
_SUMMED = ("calls", "wrong", "timeouts", "errors", "replayed_in_graphs", "with_backward", "seconds")


def run(
    seconds: float | None,
    calls: int | None,
    ranks: int | None,
    nodes: int | None,
    backend: str,
    seed: int | None,
    start: int,
    operators: Sequence[str],
    deadline_s: float | None,
    outputs: Outputs,
) -> int:
    """Make calls until ``seconds`` or ``calls`` are spent; return 1 if anything was wrong.

    Args:
        nodes: Number of nodes that the ranks count as; None for those that they are on.

    Raises:
        ArgumentError: an operator or a start that there is not, or none between nodes.
        BackendError: no GPUs for backend cuda.
    """
    import torch

    from interlace.cli import machine
    from interlace.cli.gpus import choose_backend
    from interlace.testing.cases import IMPLEMENTATIONS, between_nodes
    from interlace.testing.soak import ROUND_CALLS, SoakPlan, on_interrupt, run_rank

    gpus = torch.cuda.device_count()
    backend = choose_backend("soak", backend)
    for operator in operators:
        if operator not in IMPLEMENTATIONS:
            raise ArgumentError(
                f"--operators must be among {', '.join(IMPLEMENTATIONS)}; got {operator!r}."
            )
    if (nodes or 1) > 1 and not between_nodes(operators):
        raise ArgumentError(
            f"--operators must be among {', '.join(between_nodes())} on several nodes; got "
            f"{', '.join(operators)}."
        )
    if start % ROUND_CALLS[backend]:
        nearest = start - start % ROUND_CALLS[backend]
        raise ArgumentError(
            f"--start must be a multiple of {ROUND_CALLS[backend]}; got {start}. Say --start "
            f"{nearest}."
        )
    # Two ranks are the fewest that communicate, and the CPU has no room for many.
    world_size = ranks or (min(gpus, MOST_RANKS) if backend == "cuda" else max(2, nodes or 1))
    plan = SoakPlan(
        seed=random.SystemRandom().randrange(1 << 31) if seed is None else seed,
        start=start,
        calls=calls or 0,
        seconds=seconds or (0.0 if calls else _SECONDS),
        operators=tuple(operators),
        deadline_s=deadline_s or _DEADLINE_S,
    )
    header = machine.header()
    # The file exists from the start, so a run that is cut off is no stale file of an earlier one.
    outputs.write_json(lambda: {**header, "results": []})
    console = make_console()
    title = f"Soak of {world_size} ranks on the {backend} backend, seed {plan.seed}"
    with on_interrupt(_pass_on_interrupt):
        result = run_ranks(
            console, title, 100, run_rank, world_size, plan, backend=backend, nodes=nodes
        )[0]
    document = {**header, "results": [result]}
    outputs.write_json(lambda: document)
    return show(console, document, outputs)


def run_add(files: Sequence[Path], outputs: Outputs) -> int:
    """Add up the files of several soaks; return 1 if anything was wrong in any.

    Raises:
        ArgumentError: a file is not a soak's, the files are of several kinds of machine, or calls
            would count twice.
    """
    documents = [read_document(file) for file in files]
    with reading(files, "JSON files that interlace soak wrote"):
        return _add(files, documents, outputs)


def _add(files: Sequence[Path], documents: Sequence[dict[str, Any]], outputs: Outputs) -> int:
    results: list[dict[str, Any]] = []
    for file, document in zip(files, documents, strict=True):
        if document["machine"].get("gpus") != documents[0]["machine"].get("gpus"):
            raise ArgumentError(
                "soaks that are added up must be of one kind of machine; got another one in "
                f"{file}."
            )
        for result in document["results"]:
            if "by_operator" not in result:
                raise ArgumentError(
                    f"{file} must be a JSON file that interlace soak wrote; it is another "
                    "command's."
                )
            # Calls that count twice would claim more testing than there was.
            for earlier in results:
                if _overlap(result, earlier):
                    raise ArgumentError(
                        "soaks that are added up must make different calls; got seed "
                        f"{result['seed']} from call "
                        f"{result['start']} twice, in {file} too. Soak with another --seed."
                    )
            results.append(result)
    document = {**documents[0], "command": command_line(), "results": results}
    outputs.write_json(lambda: document)
    return show(make_console(), document, outputs)


def _overlap(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Return whether two results contain some of the same calls."""
    # Soaks of before there were nodes are of one.
    left, right = ({"nodes": 1} | result for result in (left, right))
    is_same_plan = all(
        left[name] == right[name]
        for name in ("seed", "backend", "world_size", "nodes", "operators")
    )
    first, second = sorted((left, right), key=lambda result: int(result["start"]))
    return is_same_plan and int(second["start"]) < int(first["start"]) + int(first["calls"])


def show(console: Console, document: dict[str, Any], outputs: Outputs) -> int:
    """Print the report of one or several soaks; return the exit code."""
    results = document["results"]
    totals = {name: sum(result[name] for result in results) for name in _SUMMED}
    console.print(_table(results))
    rate = totals["calls"] / max(totals["seconds"], 1e-9)
    console.print(
        f"{totals['calls']:,} calls, {totals['wrong']} wrong, {totals['timeouts']} timeouts, "
        f"{totals['errors']} errors "
        f"in {totals['seconds']:.0f} s ({rate:.0f} calls/s); {totals['with_backward']:,} with "
        "their backward pass, "
        f"{totals['replayed_in_graphs']:,} in CUDA graphs."
    )
    for result in results:
        ranks = f"{result['world_size']} ranks on the {result['backend']} backend"
        if result.get("nodes", 1) > 1:
            ranks += f", of {result['nodes']} nodes"
        ended = " (interrupted)" if result["interrupted"] else ""
        console.print(
            f"Seed {result['seed']}, from call {result['start']}: {result['calls']:,} calls of "
            f"{ranks}{ended}."
        )
        if result["failures"]:
            _print_failure(console, result)
    console.print(machine_line(document["machine"], document["date"]))
    outputs.say_written(console, "All numbers")
    return 1 if any(result["failures"] for result in results) else 0


def _table(results: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the calls of each implementation of each operator, over all results."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for result in results:
        for operator, implementations in result["by_operator"].items():
            for impl, count in implementations.items():
                counts[operator, impl] += count
    calls = Column("calls", justify="right")
    table = Table("operator", "implementation", calls, title="Calls made", title_justify="left")
    for (operator, impl), count in sorted(counts.items()):
        table.add_row(operator, impl, f"{count:,}")
    return table


def _print_failure(console: Console, result: dict[str, Any]) -> None:
    """Print the first call that failed, and the command that repeats it."""
    first = result["failures"][0]
    console.print(
        f"First failure: call {first['call']} on rank {first['rank']}, {first['kind']}: "
        f"{first['what']}",
        style="bold red",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"To repeat it: {_repeat(result, first['call'])}", markup=False, soft_wrap=True)


def _repeat(result: dict[str, Any], call: int) -> str:
    """Return the command that makes the calls of a round up to the failing call."""
    # Calls are made in rounds, so a repetition begins with the first call of a round.
    start = call - call % result["round_calls"]
    operators = [word for operator in result["operators"] for word in ("--operators", operator)]
    options = {
        "--backend": result["backend"],
        "--world-size": result["world_size"],
        **({"--nodes": result["nodes"]} if result.get("nodes", 1) > 1 else {}),
        "--seed": result["seed"],
        "--start": start,
        "--calls": call - start + 1,
    }
    words = [str(word) for option in options.items() for word in option]
    return shlex.join(["interlace", "soak", *words, *operators])


def _pass_on_interrupt(*_: object) -> None:
    """Pass the first Ctrl-C on to the ranks, which end with the report so far; the second one ends
    everything.
    """
    # The second interrupt raises KeyboardInterrupt as usual.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for process in multiprocessing.active_children():
        if process.pid is not None:
            os.kill(process.pid, signal.SIGINT)
