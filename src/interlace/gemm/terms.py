"""The properties of a call by which an implementation may refuse it."""

from __future__ import annotations

import dataclasses

import torch


def default_output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products of operands of a dtype where the caller names none."""
    return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype


@dataclasses.dataclass(frozen=True)
class Terms:
    """The properties of a call by which an implementation may refuse it.

    They are known before anything runs, so the pass for ``torch.compile`` and ``interlace.explain``
    ask with them, too.

    Attributes:
        rows: Rows of this rank's x.
        device_type: ``"cuda"`` or ``"cpu"``.
        dtype: The operands' dtype.
        result_bytes: The size of the whole product, in bytes.
        world_size: The number of ranks.
        has_bias: Whether there is a bias to add.
        converts: Whether the result's dtype is not the one that comes by default: the operands',
            and bfloat16 for float8.
        is_even: Whether every rank gets as many rows from every rank.
        node_of_rank: Number of each rank's node; empty if all ranks are on one node.
        w_along_k: Whether w is contiguous along K, as in ``nn.Linear``; else it is along N.
    """

    rows: int
    device_type: str
    dtype: torch.dtype
    result_bytes: int
    world_size: int
    has_bias: bool = False
    converts: bool = False
    is_even: bool = True
    node_of_rank: tuple[int, ...] = ()
    w_along_k: bool = True

    @staticmethod
    def of_sizes(
        rows: int, columns: int, dtype: torch.dtype, device_type: str, world_size: int
    ) -> Terms:
        """Return the terms of the simplest call of these sizes: even rows, no bias, one dtype."""
        result_bytes = rows * columns * default_output_dtype(dtype).itemsize
        return Terms(rows, device_type, dtype, result_bytes, world_size)
