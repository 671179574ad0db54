"""Modules that compute and communicate at once, in place of torch's own."""

from interlace.nn.row_parallel import RowParallelLinear

__all__ = ["RowParallelLinear"]
