"""What operators hand to Triton: launches, element types, descriptors of the group's memory."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
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
    """One kernel launch with all its arguments: what an operator runs, and its tuner compiles ahead.

    Attributes:
        kernel: The ``@triton.jit`` function.
        grid: The number of programs.
        arguments: The value of every parameter that is no constant, by the parameter's name.
        constants: The values of the ``tl.constexpr`` parameters, and Triton's own options such as
            ``num_warps``.
        keep: Tensors whose addresses are among the arguments; they live as long as the launch.
    """

    kernel: Any
    grid: tuple[int]
    arguments: Mapping[str, Any]
    constants: dict[str, Any]
    keep: tuple[Any, ...] = ()

    def __call__(self) -> None:
        """Enqueue the kernel on the current stream; on the CPU backend, run it.

        If the kernel reaches peers, this must happen within ``Group.running``.

        Raises:
            TypeError: The arguments are not those of the kernel.
        """
        values = _in_order(self.kernel, self.arguments, self.constants)
        # Triton looks at every argument to find the kernel that it has compiled, which takes the
        # host longer than the launch itself. So compiled kernels are remembered here.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        key = (self.kernel, self.grid, device, *map(_kind, values), *self.constants.items())
        compiled_launch = _compiled.get(key)
        # Counted before the launch: if that is interrupted, the kernel may be running.
        launches.value += 1
        if compiled_launch is not None:
            launch, constants = compiled_launch
            launch(*values, *constants)
            return
        try:
            compiled = self.kernel[self.grid](*values, **self.constants)
        except Exception:
            # A kernel that did not compile does not run; one that fails in the interpreter has run
            # in part.
            if not interpreting():
                launches.value -= 1
            raise
        # The interpreter returns None instead of a compiled kernel.
        if compiled is not None:
            if len(_compiled) >= _MOST_COMPILED:
                _compiled.clear()
            names = self.kernel.arg_names[len(values) :]
            constants = tuple(self.constants[name] for name in names)
            _compiled[key] = (compiled[(*self.grid, 1, 1)], constants)

    def compile(self) -> Any:
        """Compile the kernel without running it; Triton's compiled kernel."""
        values = _in_order(self.kernel, self.arguments, self.constants)
        return self.kernel.warmup(*values, grid=self.grid, **self.constants)


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_orders: dict[Any, Callable[[Mapping[str, Any]], Any]] = {}


def _in_order(
    kernel: Any, arguments: Mapping[str, Any], constants: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments' values in the order of the kernel's parameters."""
    if isinstance(arguments, tuple):  # until every launch names its arguments
        return arguments
    order = _orders.get(kernel)
    if order is None:
        names = [name for name in kernel.arg_names if name not in constants]
        # For a single name itemgetter returns the value itself, not a tuple.
        order = operator.itemgetter(*names) if len(names) > 1 else lambda given: (given[names[0]],)
        _orders[kernel] = order
    try:
        values: tuple[Any, ...] = order(arguments)
    except KeyError:
        values = ()
    if len(values) != len(arguments):
        names = [name for name in kernel.arg_names if name not in constants]
        missing = [name for name in names if name not in arguments]
        unknown = [name for name in arguments if name not in names]
        raise TypeError(
            f"the launch of {getattr(kernel, '__name__', kernel)} must name all parameters of the "
            f"kernel and no others; missing {missing}, unknown {unknown}."
        )
    return values


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
