"""The ways to carry cuBLAS's or our product to its ranks: mapped outputs and copy engines."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from interlace.bench.benchmark import Way
from interlace.gemm.config import GemmConfig
from interlace.gemm.implementations.chunked import multiply_in_chunks
from interlace.gemm.implementations.triggered import count_product
from interlace.gemm.operands import Operands
from interlace.mapped import Fused, TriggeredTransfers, empty_rotating, fuse
from interlace.mapped.layout import stride_of_rows
from interlace.mapped.output import ORDERS
from interlace.units import ceil_div

if TYPE_CHECKING:
    from interlace.bench.products import Case


def carriers(case: Case, config: GemmConfig, pieces: tuple[int, ...] = (1,)) -> list[Way]:
    """Return every way that an operator has whose product may be written straight to the peers.

    Args:
        case: The operands.
        config: The configuration of the product that counts its tiles.
        pieces: Numbers of pieces per rank in which copy engines take that product.
    """
    shape, owner = case.shape, case.owner
    if "remote_stores" not in case.operator.words or shape.rows % owner.world_size:
        return []
    counted = [way for count in pieces for way in counted_ways(case, config, count)]
    ways = [chunked_way(case), *counted]
    rows_of_rank, itemsize = shape.rows // owner.world_size, shape.dtype.itemsize
    # Of other shapes a matrix [M, N] over the peers' memory would mostly be padding.
    if stride_of_rows(rows_of_rank, shape.columns, itemsize, owner.granularity) is not None:
        ways = [*mapped_ways(case), *ways]
    return ways


def mapped_ways(case: Case) -> list[Way]:
    """Return unchanged cuBLAS that stores to the peers' memory, in both orders of rows."""
    shape = (case.shape.rows, case.shape.columns)
    ways = []
    for order in ORDERS:
        run = fuse(
            torch.mm, case.operator.collective, shape=shape, dtype=case.shape.dtype,
            order=order, group=case.group
        )  # fmt: skip
        sources = [x for x, _ in case.sets]
        # In the rotated order each rank begins with the next rank's rows, so no peer is flooded.
        if order == "rotated":
            inputs = [
                empty_rotating(
                    (case.shape.rows, case.shape.inner), dtype=case.shape.dtype, group=case.group
                )
                for _ in sources
            ]
            for source, x in zip(inputs, sources, strict=True):
                source.natural.copy_(x)
            sources = [source.rotated for source in inputs]
        call = functools.partial(_run_mapped, run, sources, [w for _, w in case.sets])
        ways.append(Way(f"cuBLAS, mapped output, {order}", "ours", call))
    return ways


def _run_mapped(
    run: Fused, sources: list[torch.Tensor], weights: list[torch.Tensor], i: int
) -> torch.Tensor:
    return run(sources[i % len(sources)], weights[i % len(weights)].T)


def chunked_way(case: Case) -> Way:
    """Return cuBLAS for each rank's rows, and copy engines."""
    dtype = case.shape.dtype
    run = fuse(
        functools.partial(multiply_in_chunks, case.owner),
        case.operator.collective,
        shape=_shape_by_rank(case),
        dtype=dtype,
        transport="copy_engine",
        group=case.group,
    )
    sets = [Operands(x, w, None, None, None, dtype) for x, w in case.sets]
    return Way("cuBLAS in parts, copy engines", "ours", lambda i: run(sets[i % len(sets)], False))


def counted_ways(case: Case, config: GemmConfig, pieces: int) -> list[Way]:
    """Return the product that counts its tiles, with copy engines; and each of the two alone."""
    shape, dtype, ranks = _shape_by_rank(case), case.shape.dtype, case.owner.world_size
    tiles = ceil_div(shape[1] // pieces, config.block_m) * ceil_div(shape[2], config.block_n)
    sets = [Operands(x, w, None, None, None, dtype).for_kernel() for x, w in case.sets]
    product = functools.partial(count_product, case.owner)
    run = fuse(
        product,
        case.operator.collective,
        shape=shape,
        dtype=dtype,
        transport="copy_engine",
        tiles=tiles,
        pieces=pieces,
        group=case.group,
    )
    copies = TriggeredTransfers(shape, dtype=dtype, tiles=tiles, pieces=pieces, group=case.group)
    counters = torch.zeros(ranks * pieces, dtype=torch.int32, device=case.device)
    plain = case.product.view(shape)

    def copy(i: int) -> None:
        copies.begin()
        # Full counters from the start: the copies wait for no product.
        copies.counters.fill_(tiles)
        copies.exchange()

    def multiply(i: int) -> object:
        return product(sets[i % len(sets)], False, config, out=plain, counters=counters)

    cut = "" if pieces == 1 else f", {pieces} pieces a rank"
    return [
        Way(
            f"counted product, copy engines{cut}",
            "ours",
            lambda i: run(sets[i % len(sets)], False, config),
        ),
        Way(f"copy engines{cut} alone", "communication", copy),
        Way(f"our counted product{cut} alone", "compute", multiply),
    ]


def _shape_by_rank(case: Case) -> tuple[int, int, int]:
    ranks = case.owner.world_size
    return ranks, case.shape.rows // ranks, case.shape.columns
