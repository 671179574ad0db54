"""Two operators between nodes: what one node has for another leaves in slices, while the kernel
still computes.

    python examples/demos/between_nodes.py --world-size 4 --nodes 2

The ranks count as so many nodes, also on one machine; PyTorch's pairs must give the same bits.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import demo_script
import torch
import torch.distributed as dist

from interlace.cli.ranks import advance
from interlace.comm import Group, group_of
from interlace.costs.embedding_all_to_all import forward
from interlace.costs.gemm import network_traffic
from interlace.errors import ArgumentError
from interlace.operators.embedding_all_to_all import embedding_all_to_all
from interlace.operators.embedding_all_to_all.config import EmbeddingAllToAllConfig
from interlace.operators.gemm_all_to_all import gemm_all_to_all

if TYPE_CHECKING:
    from rich.console import Console


_REPEATS = 9


@dataclasses.dataclass(frozen=True)
class SliceSizes:
    """The sizes of both calls on one rank.

    Attributes:
        tables, rows, width: The rank's tables, ``[rows, width]`` each.
        samples: Samples that each rank owns.
        lookups: Lookups of each bag.
        config: The embeddings' configuration; None for the tuned one.
        product: Rows for each rank, columns, and K of the product.
    """

    tables: int
    rows: int
    width: int
    samples: int
    lookups: int
    config: EmbeddingAllToAllConfig | None
    product: tuple[int, int, int]


# Slices of four samples, so that there are several; Triton's interpreter is slow.
ON_CPU = SliceSizes(
    2, 50, 16, 16, 3, EmbeddingAllToAllConfig(block_bags=4, slice_blocks=1, max_programs=4),
    (32, 24, 16),
)  # fmt: skip
ON_CUDA = SliceSizes(8, 500_000, 128, 8192, 64, None, (4096, 2048, 8192))


def run(console: Console, world_size: int, backend: str, *, nodes: int) -> dict[str, Any]:
    """Run two operators between nodes; return a report for JSON, with ``"passed"``: whether slices
    brought what they should.

    Args:
        console: Where the report is shown.
        world_size: Number of ranks.
        backend: ``"cpu"`` or ``"cuda"``.
        nodes: Number of nodes that the ranks count as.

    Raises:
        ArgumentError: There are less than two nodes.
    """
    from interlace.cli.console import run_ranks

    if nodes < 2:
        raise ArgumentError(f"demo: --nodes must be at least 2; got {nodes}. Leave it out for one.")
    sizes = ON_CPU if backend == "cpu" else ON_CUDA
    ranks = run_ranks(
        console,
        f"{world_size} ranks of {nodes} nodes on {backend}",
        2,
        run_rank,
        world_size,
        sizes,
        backend=backend,
        nodes=nodes,
    )
    document: dict[str, Any] = {
        "backend": backend,
        "world_size": world_size,
        "nodes": nodes,
        "passed": all(map(_is_right, ranks)),
        "ranks": ranks,
    }
    _show(console, document)
    return document


def _is_right(rank: dict[str, Any]) -> bool:
    """Return whether a rank has the pair's bits, and sent the bytes that were predicted."""
    return all(
        call["same"] and call.get("counted") == call.get("predicted") for call in rank["operators"]
    )


def _show(console: Console, document: dict[str, Any]) -> None:
    from interlace.cli.console import make_table

    ranks = document["ranks"]
    parts = {rank["node"]: rank["shares_memory_with"] for rank in ranks}
    console.print(
        "[bold]Between nodes[/bold] nothing is mapped: "
        + "; ".join(
            f"ranks {', '.join(map(str, members))} share memory on node {node}"
            for node, members in parts.items()
        )
        + ". What one node has for another leaves in slices, while the kernel still computes.",
        markup=True,
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


# What each rank does


def run_rank(folder: str, sizes: SliceSizes) -> dict[str, Any]:
    """Run both operators in slices and as pairs; return a report for JSON."""
    group = group_of()
    reports = []
    for run in (_embeddings, _product):
        reports.append(run(group, sizes))
        advance(folder)
    return {
        "rank": group.rank,
        "node": group.members.node,
        "shares_memory_with": list(group.members.local_ranks),
        "operators": reports,
    }


def _embeddings(group: Group, sizes: SliceSizes) -> dict[str, Any]:
    device, ranks = group.device, group.world_size
    generator = torch.Generator(device).manual_seed(group.rank)
    # Small whole numbers: all orders of their sums have the same bits.
    tables = [
        torch.randint(-8, 9, (sizes.rows, sizes.width), generator=generator, device=device).float()
        for _ in range(sizes.tables)
    ]
    batch = sizes.samples * ranks
    bags = sizes.tables * batch
    indices = torch.randint(
        sizes.rows, (bags * sizes.lookups,), generator=generator, device=device, dtype=torch.int32
    )
    offsets = torch.arange(bags + 1, dtype=torch.int32, device=device) * sizes.lookups

    @torch.no_grad()
    def call(impl: str, config: EmbeddingAllToAllConfig | None = None) -> torch.Tensor:
        return embedding_all_to_all(
            tables, indices, offsets, name="demo", impl=impl, config=config, check_indices=False
        )

    predicted = None
    if sizes.config is not None:
        cost = forward(
            rank=group.rank,
            widths=((sizes.width,) * sizes.tables,) * ranks,
            batch=batch,
            lookups=[sizes.lookups * batch] * sizes.tables,
            itemsize=4,
            output_itemsize=4,
            index_itemsize=4,
            block_bags=sizes.config.block_bags,
            slice_blocks=sizes.config.slice_blocks,
            node_of_rank=group.members.node_of_rank,
        )
        predicted = cost.network_bytes
    return _compared(
        group,
        "embedding_all_to_all",
        lambda: call("fused", sizes.config),
        lambda: call("unfused"),
        predicted,
    )


def _product(group: Group, sizes: SliceSizes) -> dict[str, Any]:
    rows, columns, inner = sizes.product
    generator = torch.Generator(group.device).manual_seed(group.rank)
    x, w = (
        torch.randint(-3, 4, (count, inner), generator=generator, device=group.device).float()
        for count in (rows * group.world_size, columns)
    )
    if group.backend == "cuda":
        x, w = x.bfloat16(), w.bfloat16()
    predicted, _ = network_traffic(
        rank=group.rank,
        sent=[[rows] * group.world_size] * group.world_size,
        row_bytes=columns * x.element_size(),
        slices=1,
        node_of_rank=group.members.node_of_rank,
    )
    return _compared(
        group,
        "gemm_all_to_all",
        lambda: gemm_all_to_all(x, w, impl="chunked"),
        lambda: gemm_all_to_all(x, w, impl="unfused"),
        predicted,
    )


def _compared(
    group: Group,
    name: str,
    sliced: Callable[[], torch.Tensor],
    pair: Callable[[], torch.Tensor],
    predicted: int | None,
) -> dict[str, Any]:
    """Compare a call in slices with the pair; count its bytes, or time both on GPUs."""
    sliced()
    group.traffic.reset()
    y = sliced()
    report: dict[str, Any] = {"operator": name, "same": bool(torch.equal(y, pair()))}
    if group.backend == "cpu":
        sent = group.traffic.bytes_to
        report["counted"] = sum(sent.get(peer, 0) for peer in group.members.remote_ranks)
        report["predicted"] = predicted
    else:
        report["times_ms"] = {"slices": _time(group, sliced), "pair": _time(group, pair)}
    return report


def _time(group: Group, step: Callable[[], object]) -> float:
    """Return the median milliseconds of one call, the ranks beginning together."""
    times: Sequence[float] = [_once(group, step) for _ in range(_REPEATS)]
    return statistics.median(times)


def _once(group: Group, step: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    group.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """Run the demo with the options of the command line."""
    nodes = {"type": int, "default": 2, "help": "nodes that the ranks count as (default: 2)"}
    options = demo_script.parse_options(__doc__, ("--nodes", nodes))
    demo_script.run_script(options, run, nodes=options.nodes)


if __name__ == "__main__":
    main()
