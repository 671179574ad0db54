"""Make symmetric tensors, whose peers are one more dimension: the rank."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from interlace.comm.groups.group import Group, group_of
from interlace.comm.runtime.dlpack import tensor_at
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import ArgumentError


@dataclasses.dataclass(frozen=True, eq=False)
class SymmetricTensor:
    """Hold a tensor of equal shape on every rank of a group, which every rank can reach.

    Attributes:
        local: ``[*shape]``, the tensor of this rank.
        peers: ``[world_size, *shape]``; ``peers[r]`` is the tensor of rank r, and ``peers[rank]``
            and ``local`` have the same address.
        group: The group whose memory this is.
    """

    local: torch.Tensor
    peers: torch.Tensor
    group: Group

    @property
    def address(self) -> int:
        """Return the address of rank 0's copy, for kernels.

        A kernel passes it to ``il.pointer(address, dtype)`` and chooses the rank by ``peer=``.
        """
        return self.peers.data_ptr()

    @property
    def dtype(self) -> torch.dtype:
        """Return the element type."""
        return self.local.dtype

    def data_ptr(self) -> NoReturn:
        """Refuse to be the argument of a kernel, of which Triton asks this method.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            "a kernel must get the address of symmetric memory; got the SymmetricTensor. Give the "
            "kernel sym.address, for il.pointer, or sym.local, if it reaches this rank's tensor "
            "only."
        )

    untyped_storage = data_ptr  # what Triton's interpreter asks first

    def __reduce__(self) -> NoReturn:
        """Refuse to leave this process, whose mappings the tensor consists of.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            "a symmetric tensor must stay in its process; got one to pickle. Return or save "
            "sym.local.clone()."
        )


def sizes_of(caller: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape as a tuple of integers.

    Args:
        caller: Name of the public function, for the error.
        shape: The shape as the caller got it.

    Raises:
        ArgumentError: The shape is not a sequence of integers of 0 or more.
    """
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise ArgumentError(f"{caller}: shape must have sizes of 0 or more; got {shape!r}.")
    return sizes


def require_dtype(caller: str, dtype: object) -> None:
    """Refuse an element type that is not torch's, such as its name.

    Raises:
        ArgumentError: ``dtype`` is not a ``torch.dtype``.
    """
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(
            f"{caller}: dtype must be a torch.dtype; got {dtype!r}. Say torch.float32, for example."
        )


@makes_ordinary_tensors
def empty_symmetric(
    shape: Sequence[int] | int,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> SymmetricTensor:
    """Allocate a tensor of equal shape on every rank, mapped into every rank's address space.

    ``sym.peers[r].copy_(x)`` is a put to rank r, and ``sym.peers[r].clone()`` a get; slices and
    views are torch's own. Neither orders itself against the peer: synchronise as with any memory
    that two devices share. Collective; it returns when all ranks have the memory, zeroed. The
    memory is freed when the last view of it is gone.

    Rows in ``sym.local`` need no staging where an operator's peers fetch them
    (:func:`interlace.all_gather_gemm`), which orders itself.

    Args:
        shape: Shape of one rank's tensor; equal on all ranks.
        dtype: Element type; equal on all ranks.
        group: Process group. Default: the default process group; this process on its own if there
            is none.
        device: Device of the tensor. Default: the current CUDA device, or the CPU if there is none.

    Raises:
        ArgumentError: A size is negative or no integer, or ``dtype`` is not torch's.
        GroupError: The ranks are on several nodes, between which no memory can be mapped.
        RankMismatchError: Shapes or dtypes differ between ranks.
        WorkspaceError: The memory does not fit, or a CUDA graph is being captured.

    Example:
        >>> sym = interlace.empty_symmetric((4, 8), dtype=torch.float32)
        >>> sym.peers.shape  # on two ranks
        torch.Size([2, 4, 8])
    """
    sizes = sizes_of("empty_symmetric", shape if isinstance(shape, Iterable) else (shape,))
    require_dtype("empty_symmetric", dtype)
    owner = group_of(group, device)
    owner.require_one_node("empty_symmetric")
    # Compared first: each rank maps its peers' memory in the size of its own request.
    owner.agreement.compare("empty_symmetric", {"shape": list(sizes), "dtype": str(dtype)})
    nbytes = math.prod(sizes) * dtype.itemsize
    block = owner.memory.allocate_tensor(nbytes)
    local = block.part_of(owner.rank, owner.device, sizes, dtype)
    shape, strides = (owner.world_size, *sizes), (block.stride // dtype.itemsize, *local.stride())
    peers = tensor_at(block.address, shape, dtype, owner.device, block, strides)
    return SymmetricTensor(local=local, peers=peers, group=owner)
