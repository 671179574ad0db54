"""The tensor descriptor of the memory that gradients arrive in."""

from __future__ import annotations

from typing import Any

import torch

from interlace.comm import Group
from interlace.comm.launching.kernels import describe_ranks
from interlace.operators.embedding_all_to_all.launch import MOST_TILE_BYTES
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.units import next_power_of_2


def describe_landing(
    group: Group, layout: Layout, dtype: torch.dtype, landing: int, rows: int, align: int
) -> Any:
    """Describe every rank's landing, ``[rank, sample, column]``, in blocks of ``rows`` samples.

    A block has a table's columns. The result is None where a descriptor cannot describe the blocks;
    ordinary stores then write the same bytes.
    """
    widths = [width for rank_widths in layout.widths for width in rank_widths]
    width = max(widths, default=1)
    same_width = all(table_width == width == next_power_of_2(width) for table_width in widths)
    if (
        not same_width
        or align * dtype.itemsize != 16
        or rows * width * dtype.itemsize > MOST_TILE_BYTES
    ):
        return None
    columns = max(layout.rank_columns)
    return describe_ranks(
        group, landing, dtype, [(layout.batch, columns), (columns, 1)], [rows, width]
    )
