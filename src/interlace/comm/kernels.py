"""What operators hand to Triton: launches, element types, descriptors of the group's memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.dlpack import bytes_at, view_as
from interlace.comm.group import Group

_ALONE = 1 << 20  # a stride between ranks, where there is one


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to go: what an operator runs, and its tuner compiles ahead.

    Attributes:
        keep: tensors whose addresses are among the arguments.
    """

    kernel: Any
    grid: tuple[int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    keep: tuple[Any, ...] = ()

    def __call__(self) -> None:
        """Enqueue it on the current stream (run it, on the CPU backend); within ``Group.running`` if there are peers."""
        self.kernel[self.grid](*self.arguments, **self.options)


@functools.cache  # hosts ask in every call
def processors(device: torch.device) -> int:
    """How many processors (streaming multiprocessors) a GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of an element type; Triton is imported here and not before."""
    import triton.language as tl

    return {
        torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float8_e4m3fn: tl.float8e4nv,
    }[dtype]  # fmt: skip


def describe_matrix(matrix: torch.Tensor, stride: int, block: list[int]) -> Any:
    """A tensor descriptor of a matrix whose rows are contiguous and ``stride`` elements apart."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(matrix, [max(size, 1) for size in matrix.shape], [stride, 1], block)


def describe_parts(parts: torch.Tensor, block: list[int]) -> Any:
    """A tensor descriptor of matrices of this rank, ``[part, row, column]``; tiles of one part each, cut off at its end."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(parts, list(parts.shape), list(parts.stride()), [1, *block])


def describe_ranks(group: Group, address: int, dtype: torch.dtype, inner: Sequence[tuple[int, int]], block: list[int]) -> Any:
    """A tensor descriptor of every rank's memory at ``address`` (rank 0's copy): ``[rank, *inner sizes]``.

    Args:
        inner: size and stride, in elements, of each further dimension.
        block: of a tile, in the last two dimensions.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    base = view_as(bytes_at(address, (16,), (1,), group.device, None), (16 // dtype.itemsize,), dtype)
    shape, strides = zip((group.world_size, group.stride // dtype.itemsize or _ALONE), *inner, strict=True)
    return TensorDescriptor(base, list(shape), list(strides), [1] * (len(shape) - 2) + block)
