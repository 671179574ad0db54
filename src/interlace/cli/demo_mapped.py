"""A step of ``interlace demo``: an unmodified producer whose output is the peers' memory."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from interlace.cli import demo_mapped_ranks
from interlace.cli.console import run_ranks
from interlace.units import format_bytes, round_up

_ON_CPU, _ON_CUDA = (1024, 1024, 256), (8192, 8192, 2048)


def run(console: Console, world_size: int, backend: str) -> dict[str, Any]:
    """Multiply on all ranks; return a report for JSON, with ``"passed"``."""
    rows, columns, inner = _ON_CPU if backend == "cpu" else _ON_CUDA
    shape = round_up(rows, 128 * world_size), columns, inner
    ranks = run_ranks(
        console,
        f"mapped output on {backend}",
        1,
        demo_mapped_ranks.run_rank,
        world_size,
        shape,
        backend=backend,
    )
    times = {name: max(rank["times_ms"][name] for rank in ranks) for name in ranks[0]["times_ms"]}
    report = {
        "shape": shape,
        "times_ms": times,
        "passed": all(rank["same"] for rank in ranks),
        "ranks": ranks,
    }
    size = format_bytes(sum(rank["bytes"] for rank in ranks))
    console.print(
        f"\n[bold]A mapped output[/bold]: plain torch.mm, {shape[0]} x {columns} x {inner}, whose "
        "output is the memory of the rank "
        f"that each row is for. {size} reached the other ranks by its ordinary stores."
    )
    console.print(
        f"torch.mm into the peers' memory {times['producer']:.2f} ms, into memory of its own "
        f"{times['compute alone']:.2f} ms. "
        f"With the exchange{' (a kernel in the interpreter)' if backend == 'cpu' else ''} "
        f"{times['mapped']:.2f} ms; torch.mm and "
        f"all_to_all_single {times['unfused']:.2f} ms. Host's clock, slowest rank, median."
    )
    if report["passed"]:
        console.print(
            "Every rank holds what torch.mm and all_to_all_single give, bit by bit.", style="green"
        )
    else:
        console.print(
            "WRONG: mapped output: a rank holds something else than torch.mm and "
            "all_to_all_single give.",
            style="bold red",
        )
    return report
