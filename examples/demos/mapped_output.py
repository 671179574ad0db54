"""Plain ``torch.mm``, which knows nothing of other ranks, writes its output into the peers' memory.

    python examples/demos/mapped_output.py --world-size 4

What it brings is compared, bit by bit, with torch.mm and an all-to-all after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import demo_script
import torch
import torch.distributed as dist

from interlace.cli.ranks import advance
from interlace.comm import Group, group_of
from interlace.mapped import MappedOutput
from interlace.units import format_bytes, round_up

if TYPE_CHECKING:
    from rich.console import Console

_ON_CPU, _ON_CUDA = (1024, 1024, 256), (8192, 8192, 2048)
_REPEATS = 15


def run(console: Console, world_size: int, backend: str) -> dict[str, Any]:
    """Multiply on all ranks; return a report for JSON, with ``"passed"``."""
    from interlace.cli.console import run_ranks

    rows, columns, inner = _ON_CPU if backend == "cpu" else _ON_CUDA
    shape = round_up(rows, 128 * world_size), columns, inner
    ranks = run_ranks(
        console,
        f"mapped output on {backend}",
        1,
        run_rank,
        world_size,
        shape,
        backend=backend,
    )
    report = {
        "shape": shape,
        "passed": all(rank["same"] for rank in ranks),
        "ranks": ranks,
    }
    size = format_bytes(sum(rank["bytes"] for rank in ranks))
    console.print(
        f"\n[bold]A mapped output[/bold]: plain torch.mm, {shape[0]} x {columns} x {inner}, whose "
        "output is the memory of the rank "
        f"that each row is for. {size} reached the other ranks by its ordinary stores.",
        markup=True,
    )
    if backend == "cuda":  # times of the interpreter would mislead
        times = {
            name: max(rank["times_ms"][name] for rank in ranks) for name in ranks[0]["times_ms"]
        }
        report["times_ms"] = times
        console.print(
            f"torch.mm into the peers' memory {times['producer']:.2f} ms, into memory of its own "
            f"{times['compute alone']:.2f} ms. With the exchange {times['mapped']:.2f} ms; "
            f"torch.mm and all_to_all_single {times['unfused']:.2f} ms. Host's clock, slowest "
            "rank, median."
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


# What each rank does


def run_rank(folder: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Multiply into the peers' memory; return a report for JSON.

    For comparison, multiply into memory of this rank and then run an all-to-all.
    """
    group = group_of()
    rows, columns, inner = shape
    dtype = torch.float32 if group.backend == "cpu" else torch.bfloat16
    generator = torch.Generator(group.device).manual_seed(group.rank)
    x = torch.randn(rows, inner, generator=generator, device=group.device).to(dtype)
    w = torch.randn(columns, inner, generator=generator, device=group.device).to(dtype)
    out = MappedOutput((rows, columns), dtype=dtype)
    local, received = (
        torch.empty(rows, columns, dtype=dtype, device=group.device) for _ in range(2)
    )

    def mapped() -> torch.Tensor:
        torch.mm(x, w.T, out=out.begin())
        return out.exchange().flatten(0, 1)

    def unfused() -> torch.Tensor:
        torch.mm(x, w.T, out=local)
        if group.world_size > 1:
            dist.all_to_all_single(received, local)
            return received
        return local

    is_equal = bool(torch.equal(mapped(), unfused()))
    sent_bytes = (group.world_size - 1) * (rows // group.world_size) * columns * dtype.itemsize
    report: dict[str, Any] = {"rank": group.rank, "same": is_equal, "bytes": sent_bytes}
    if group.backend == "cuda":
        times = {
            "mapped": _time(group, mapped),
            "unfused": _time(group, unfused),
            "compute alone": _time(group, lambda: torch.mm(x, w.T, out=local)),
        }
        # The producer alone is timed without the exchange, so it stores to one epoch over and over.
        target = out.begin()
        times["producer"] = _time(group, lambda: torch.mm(x, w.T, out=target))
        out.exchange()
        report["times_ms"] = times
    advance(folder)
    return report


def _time(group: Group, step: Callable[[], torch.Tensor]) -> float:
    """Median milliseconds of one call, the ranks beginning together."""
    times = []
    for _ in range(_REPEATS):
        if group.world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        step()
        group.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    """Run the demo with the options of the command line."""
    demo_script.run_script(demo_script.parse_options(__doc__), run)


if __name__ == "__main__":
    main()
