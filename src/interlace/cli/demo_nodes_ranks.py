"""The work of each rank in ``interlace demo --nodes``: two operators in slices, and their pairs."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.cli.ranks import advance
from interlace.comm import Group, group_of
from interlace.costs.embedding_all_to_all import forward
from interlace.costs.gemm_all_to_all import network_traffic
from interlace.operators.embedding_all_to_all.api import embedding_all_to_all
from interlace.operators.embedding_all_to_all.config import EmbeddingAllToAllConfig
from interlace.operators.gemm_all_to_all import gemm_all_to_all

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
            protocol="between_nodes",
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
