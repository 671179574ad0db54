"""``interlace demo --nodes``: what leaves a node in slices, checked against the stock pair."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from interlace.cli import demo_nodes_ranks, machine
from interlace.cli.console import command_line, make_console, now, run_ranks
from interlace.cli.outputs import Outputs
from interlace.cli.tables import make_table
from interlace.errors import ArgumentError


def run(world_size: int, nodes: int, backend: str, outputs: Outputs) -> int:
    """Run two operators between nodes; return the exit code: 0 if slices brought what they should.

    Args:
        world_size: Number of ranks.
        nodes: Number of nodes that they count as.
        backend: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        ArgumentError: There is no such backend, or less than two nodes.
    """
    if backend not in ("auto", "cpu", "cuda"):
        raise ArgumentError(f"demo: --backend must be auto, cpu or cuda; got {backend!r}.")
    if nodes < 2:
        raise ArgumentError(f"demo: --nodes must be at least 2; got {nodes}. Leave it out for one.")
    if backend == "auto":
        backend = "cuda" if torch.cuda.device_count() >= world_size else "cpu"
    console = make_console()
    sizes = demo_nodes_ranks.ON_CPU if backend == "cpu" else demo_nodes_ranks.ON_CUDA
    ranks = run_ranks(
        console,
        f"{world_size} ranks of {nodes} nodes on {backend}",
        2,
        demo_nodes_ranks.run_rank,
        world_size,
        sizes,
        backend=backend,
        nodes=nodes,
    )
    document: dict[str, Any] = {
        "machine": machine.describe(),
        "command": command_line(),
        "date": now(),
        "backend": backend,
        "world_size": world_size,
        "nodes": nodes,
        "passed": all(map(_is_right, ranks)),
        "ranks": ranks,
    }
    _show(console, document)
    outputs.write_json(lambda: document)
    outputs.say_written(console, "All numbers")
    return 0 if document["passed"] else 1


def _is_right(rank: dict[str, Any]) -> bool:
    """Return whether a rank has the pair's bits, and sent the bytes that were predicted."""
    return all(
        call["same"] and call.get("counted") == call.get("predicted") for call in rank["operators"]
    )


def _show(console: Console, document: dict[str, Any]) -> None:
    ranks = document["ranks"]
    parts = {rank["node"]: rank["shares_memory_with"] for rank in ranks}
    console.print(
        "[bold]Between nodes[/bold] nothing is mapped: "
        + "; ".join(
            f"ranks {', '.join(map(str, members))} share memory on node {node}"
            for node, members in parts.items()
        )
        + ". What one node has for another leaves in slices, while the kernel still computes."
    )
    on_cpu = document["backend"] == "cpu"
    columns = ("sent to other nodes", "predicted") if on_cpu else ("in slices, ms", "pair, ms")
    table = make_table("operator", "the pair's bits", *columns, left=("operator",))
    for number, first in enumerate(ranks[0]["operators"]):
        calls = [rank["operators"][number] for rank in ranks]
        if on_cpu:
            figures = [f"{sum(call[key] for call in calls)} B" for key in ("counted", "predicted")]
        else:
            figures = [
                f"{max(call['times_ms'][key] for call in calls):.2f}" for key in ("slices", "pair")
            ]
        answer = "yes" if all(call["same"] for call in calls) else "NO"
        table.add_row(first["operator"], answer, *figures)
    console.print(table)
    if document["passed"]:
        console.print("Every rank holds what PyTorch's pair gives, bit by bit.", style="green")
    else:
        console.print("WRONG: a rank holds or sent something else.", style="bold red")
