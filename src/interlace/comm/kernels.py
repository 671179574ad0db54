"""What operators hand to Triton: launches, element types, descriptors of the group's memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.dlpack import bytes_at, view_as
from interlace.comm.group import Group
from interlace.comm.interpreter import interpreting
from interlace.comm.launches import launches
from interlace.units import ceil_div

MOST_MOVERS = 1024  # programs of a kernel that moves rows; each has signals of its own
_ENOUGH = 132  # of them, where rows are few: one a processor of an H200
_TILE = {"ROWS": 4, "COLS": 1024}
_ALONE = 1 << 20  # a stride between ranks, where there is one
_MOST_COMPILED = 4096  # calls whose compiled kernel is remembered
# Integers from here on are 64 bits wide, to Triton; addresses are, and are others in each call
_LARGE = 1 << 31


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to go: what an operator runs, and its tuner compiles ahead.

    Attributes:
        arguments: for all parameters but the constants, which come last.
        options: the constants, and Triton's own.
        keep: tensors whose addresses are among the arguments.
    """

    kernel: Any
    grid: tuple[int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    keep: tuple[Any, ...] = ()

    def __call__(self) -> None:
        """Enqueue it on the current stream (run it, on the CPU backend); within ``Group.running``
        if there are peers.
        """
        # Triton looks at every argument to find the kernel that it has compiled, which takes the
        # host longer than the launch.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        key = (self.kernel, self.grid, device, *map(_kind, self.arguments), *self.options.items())
        found = _compiled.get(key)
        launches.value += 1  # before the launch: if that is interrupted, the kernel may be running
        if found is not None:
            launch, constants = found
            launch(*self.arguments, *constants)
            return
        try:
            compiled = self.kernel[self.grid](*self.arguments, **self.options)
        except Exception:
            # It did not compile, so nothing runs; in the interpreter a part of it has run
            if not interpreting():
                launches.value -= 1
            raise
        names = getattr(self.kernel, "arg_names", [])[len(self.arguments) :]
        # None from the interpreter
        if compiled is not None and all(name in self.options for name in names):
            if len(_compiled) >= _MOST_COMPILED:
                _compiled.clear()
            _compiled[key] = (
                compiled[(*self.grid, 1, 1)],
                tuple(self.options[name] for name in names),
            )


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def _kind(value: Any) -> Any:
    """All that the kernel which Triton compiles may depend on, of an argument."""
    if type(value) is int:
        return value if value < _LARGE else _aligned(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, _aligned(value.data_ptr())
    if type(value) is float:
        return float
    block = getattr(value, "block_shape", None)  # of a tensor descriptor
    return value if block is None else (value.base.dtype, *block)


def _aligned(address: int) -> str:
    return "anywhere" if address % 16 else "aligned"


@functools.cache  # hosts ask in every call
def processors(device: torch.device) -> int:
    """How many processors (streaming multiprocessors) a GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def cut_rows(rows: int, columns: int, group: Group) -> tuple[int, dict[str, int]]:
    """How many programs move rows, and the tile that each takes at a time.

    Each has signals to send and to wait for, so where rows are few, few programs are faster.
    """
    tiles = ceil_div(rows, _TILE["ROWS"]) * ceil_div(columns, _TILE["COLS"])
    most = 8 if group.backend == "cpu" else min(max(_ENOUGH, tiles // 2), MOST_MOVERS)
    return max(min(tiles, most), 1), _TILE


@functools.cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of an element type; Triton is imported here and not before."""
    import triton.language as tl

    return {
        torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32,
        torch.float8_e4m3fn: tl.float8e4nv,
    }[dtype]  # fmt: skip


def describe_matrix(matrix: torch.Tensor, stride: int, block: list[int]) -> Any:
    """A tensor descriptor of a matrix whose rows are contiguous and ``stride`` elements apart.

    A matrix without elements has no address, which a descriptor must have: it gets one of a row
    that nobody reads.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(
        addressable(matrix, stride), [max(size, 1) for size in matrix.shape], [stride, 1], block
    )


def addressable(matrix: torch.Tensor, elements: int) -> torch.Tensor:
    """``matrix``, or ``elements`` of its kind where it has none."""
    return matrix if matrix.numel() else matrix.new_empty(elements)


def describe_parts(parts: torch.Tensor, block: list[int]) -> Any:
    """A tensor descriptor of matrices of this rank, ``[part, row, column]``; tiles of one part
    each, cut off at its end.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(parts, list(parts.shape), list(parts.stride()), [1, *block])


def describe_ranks(
    group: Group,
    address: int,
    dtype: torch.dtype,
    inner: Sequence[tuple[int, int]],
    block: list[int],
) -> Any:
    """A tensor descriptor of every rank's memory at ``address`` (rank 0's copy): ``[rank, *inner
    sizes]``.

    Args:
        inner: size and stride, in elements, of each further dimension.
        block: of a tile, in the last two dimensions.
    """
    outer = (group.world_size, group.stride // dtype.itemsize or _ALONE)
    return _describe_at(address, group.device, dtype, (outer, *inner), tuple(block))


@functools.lru_cache(maxsize=256)  # of the same memory in every call
def _describe_at(
    address: int, device: torch.device, dtype: torch.dtype, sizes: Any, block: tuple[int, int]
) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    base = view_as(bytes_at(address, (16,), (1,), device, None), (16 // dtype.itemsize,), dtype)
    shape, strides = zip(*sizes, strict=True)
    return TensorDescriptor(base, list(shape), list(strides), [1] * (len(shape) - 2) + list(block))
