"""``empty_symmetric``: the group's memory as a tensor with one more dimension."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.comm.dlpack import bytes_at, view_as
from interlace.comm.group import Group, group_of
from interlace.comm.ordinary import makes_ordinary_tensors
from interlace.errors import ArgumentError


@dataclasses.dataclass(frozen=True, eq=False)
class SymmetricTensor:
    """A tensor of the same shape on every rank of a group, each rank's reachable from all.

    Attributes:
        local: ``[*shape]``, this rank's own.
        peers: ``[world_size, *shape]``; ``peers[r]`` is rank r's, and ``peers[rank]`` is ``local``,
            at one address.
        group: the group whose memory this is.
    """

    local: torch.Tensor
    peers: torch.Tensor
    group: Group

    @property
    def address(self) -> int:
        """Of rank 0's copy, for kernels: ``il.pointer(address, dtype)`` and then ``peer=``."""
        return self.peers.data_ptr()


@makes_ordinary_tensors
def empty_symmetric(
    shape: Sequence[int] | int,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> SymmetricTensor:
    """Allocate a tensor of the same shape on every rank, mapped into every rank's address space.

    ``sym.peers[r].copy_(x)`` is a put to rank r, and ``sym.peers[r].clone()`` a get; slices and
    views are torch's own. Neither orders itself against the peer: synchronise as with any memory
    that two devices share. Collective; returns when all ranks have the memory, zeroed. It is freed
    when the last view of it is gone.

    Args:
        shape: of one rank's tensor; the same on every rank.
        dtype: the same on every rank.
        group: default: the default process group; without one, this process on its own.
        device: default: the current CUDA device, or the CPU if there is none.

    Raises:
        ArgumentError: a negative size.
        RankMismatchError: shapes or dtypes differ between ranks.
        WorkspaceError: the memory does not fit, or a CUDA graph is being captured.

    Example:
        >>> sym = interlace.empty_symmetric((4, 8), dtype=torch.float32)
        >>> sym.peers.shape  # on two ranks
        torch.Size([2, 4, 8])
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ArgumentError(f"empty_symmetric: sizes must not be negative; got {sizes}.")
    owner = group_of(group, device)
    owner.compare("empty_symmetric", {"shape": list(sizes), "dtype": str(dtype)})
    nbytes = math.prod(sizes) * dtype.itemsize
    block = owner.allocate(nbytes)
    spans = bytes_at(
        block.address, (owner.world_size, nbytes), (block.stride, 1), owner.device, block
    )
    # A storage of its own, so that code which copies whole storages never touches the peers.
    mine = bytes_at(block.address + owner.rank * block.stride, (nbytes,), (1,), owner.device, block)
    return SymmetricTensor(
        local=view_as(mine, sizes, dtype), peers=view_as(spans, sizes, dtype), group=owner
    )
