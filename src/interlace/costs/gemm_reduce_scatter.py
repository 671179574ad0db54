"""What ``gemm_reduce_scatter`` computes and moves: parts of ``x @ w.T``, summed over ranks, rows split over ranks."""

from __future__ import annotations

from interlace.costs.gemm import ProductCost, leaving, product


def fused(*, rows: int, columns: int, inner: int, itemsize: int, world_size: int, part_itemsize: int | None = None) -> ProductCost:
    """Cost of one rank: ``x [rows, inner]``, ``w [columns, inner]`` with ``inner`` the rank's share of K.

    Every rank stores each part in its owner's slot for it; the owner adds the slots.

    Args:
        part_itemsize: bytes of an element of a part; the output's by default.
    """
    part = part_itemsize or itemsize
    flops, memory_bytes = product(rows, columns, inner, itemsize)
    size = rows * columns * part
    memory_bytes += size - rows * columns * itemsize  # parts are written instead of the output
    output = rows * columns * itemsize // world_size
    return ProductCost(flops, memory_bytes, leaving(size, world_size), size + output if world_size > 1 else 0, size)
