"""Describe the work of a call apart from its memory, so that a call that comes again is found by
its operands alone.

Most of what the host does in a call comes out the same when the call comes again: whether its
arguments are valid, what ranks have agreed on, which implementation runs, where its workspace lies.
What differs is the memory of the result, which is new each time. So an implementation says
separately which memory is new, what is enqueued with it, and what the result is. Where the very
operands come again, ``Group.recall`` takes new memory and replays the graph that goes with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from interlace.comm.replay.tapes import step
from interlace.comm.runtime.dlpack import contiguous_strides

Shaped = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a tensor."""


@dataclasses.dataclass(frozen=True)
class New:
    """Allocate the tensors of one call.

    Attributes:
        device: Where they are.
        tensors: Their shapes and dtypes.
    """

    device: torch.device
    tensors: tuple[Shaped, ...]

    @staticmethod
    def like(operand: torch.Tensor, *shapes: Sequence[int]) -> New:
        """Return what allocates tensors of these shapes, with device and dtype of ``operand``."""
        return New(operand.device, tuple((shape, operand.dtype) for shape in shapes))

    def __call__(self, group: Any) -> tuple[torch.Tensor, ...]:
        """Return new tensors, uninitialised."""
        return tuple(empty(shape, dtype, self.device) for shape, dtype in self.tensors)


_empty_on_current_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new tensor, uninitialised, as ``torch.empty`` does.

    On torch's current GPU it comes from the function that Inductor's programs call, which takes the
    host a third of the time: calls take two to four tensors each.
    """
    if (
        _empty_on_current_gpu is None
        or device.type != "cuda"
        or torch._C._cuda_getDevice() != device.index
    ):
        return torch.empty(shape, dtype=dtype, device=device)
    shape = tuple(shape)
    new: torch.Tensor = step(_empty_on_current_gpu, shape, contiguous_strides(shape), dtype)
    return new


def empty_rows_on(device: torch.device) -> Callable[[int, int, torch.dtype], torch.Tensor]:
    """Return what makes ``[rows, columns]`` of a dtype as :func:`empty` does, as a step of a tape,
    for calls that have made sure that the device is torch's current GPU.
    """
    new = _empty_on_current_gpu
    if new is None or device.type != "cuda":
        return lambda rows, columns, dtype: torch.empty((rows, columns), dtype=dtype, device=device)
    return lambda rows, columns, dtype: step(new, (rows, columns), (columns, 1), dtype)


def addresses(*memory: torch.Tensor | None) -> tuple[int, ...]:
    """Return where tensors lie; 0 for none."""
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in memory)


def first(*memory: torch.Tensor) -> torch.Tensor:
    """Return the first tensor: the result, where others are for intermediate values."""
    return memory[0]


def _nothing(group: Any, *memory: Any) -> None:
    """Do nothing."""


@dataclasses.dataclass(frozen=True)
class DeferredCall:
    """A call that has yet to run: its memory, its work and its result, apart.

    All but ``prepare`` and ``again`` outlives the call and must refer to no operand and no group.

    Attributes:
        key: All that the work depends on beside the memory that ``take`` returns: places of the
            operands, and numbers.
        take: Returns the call's new memory, given the group.
        prepare: Returns what enqueues the work, given that memory: kernels and copies that begin
            and end on the current stream; see :meth:`Replays.run`. Symmetric memory may have to
            grow, so it is collective, and comes before anything is enqueued.
        result: Returns the call's result, given that memory.
        where: Returns all that the work depends on of that memory.
        copied: The tensors of that memory which copy engines or NCCL read or write, by position.
        with_libraries: Whether the work may contain products by cuBLAS.
        replayed: Called with group and memory after a graph has been launched, for what
            ``prepare`` and its work would have counted on the host.
        temporary_bytes: What the work allocates for itself alone, of torch's memory, at most. In a
            graph it stays with the graphs, so with much of it there is none.
        is_of_operands: Whether the work reads the call's own operands, and no copies that were
            made of them before.
        again: Called after the work has been enqueued: returns what makes a call of the same form
            for other operands, given the group and them, past ``prepare``. That must refer to no
            operand and no group, and returns None for a call that it does not make. None itself
            where there is no such thing.
    """

    key: tuple[Hashable, ...]
    take: Callable[[Any], tuple[Any, ...]]
    prepare: Callable[..., Callable[[], None]]
    result: Callable[..., Any] = first
    where: Callable[..., Hashable] = addresses
    copied: tuple[int, ...] = ()
    with_libraries: bool = True
    replayed: Callable[..., None] = _nothing
    temporary_bytes: int = 0
    is_of_operands: bool = True
    again: Callable[[], Callable[..., Any] | None] | None = None

    def into(self, out: torch.Tensor) -> DeferredCall:
        """Return the call with its result in ``out``: without a copy where the call's first tensor
        is the result as it is, and else by one. It is remembered by nothing, as it refers to
        ``out``.
        """

        def take(group: Any) -> tuple[Any, ...]:
            first_tensor, *tensors = self.take(group)
            is_alike = isinstance(first_tensor, torch.Tensor) and (
                (first_tensor.shape, first_tensor.dtype) == (out.shape, out.dtype)
            )
            return (out if is_alike else first_tensor, *tensors)

        def result(*memory: Any) -> torch.Tensor:
            y: torch.Tensor = self.result(*memory)
            return out if y.data_ptr() == out.data_ptr() else out.copy_(y)

        return dataclasses.replace(self, take=take, result=result, is_of_operands=False, again=None)


@dataclasses.dataclass(frozen=True)
class PerformedCall:
    """A call that has run, by calls of other operators.

    Attributes:
        result: The call's result.
        again: As a :class:`DeferredCall` has it.
    """

    result: Any
    again: Callable[[], Callable[..., Any] | None]
