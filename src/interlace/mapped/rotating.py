"""``empty_rotating``: a matrix that can be read from any rank's rows on, cyclically."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from interlace.comm import group_of
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import ArgumentError
from interlace.mapped.layout import Mapping, chunk_of_rows, tensor_at


@dataclasses.dataclass(frozen=True, eq=False)
class RotatingInput:
    """A matrix whose memory is mapped twice in a row, so that rotating its rows copies nothing.

    Attributes:
        natural: ``[M, K]``.
        rotated: ``[M, K]``: the same rows, from those for rank ``rank + 1`` on, this rank's own the
            last. A producer that writes a :class:`MappedOutput` in rotated order reads it.
    """

    natural: torch.Tensor
    rotated: torch.Tensor


@makes_ordinary_tensors
def empty_rotating(
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> RotatingInput:
    """Allocate memory for ``[M, K]`` that is mapped twice in a row. Collective.

    Within one kernel use one of the two tensors only: CUDA does not order accesses through two
    addresses of the same memory.

    Args:
        shape: M, which the ranks divide, and K; rows may be padded, as in :class:`MappedOutput`.
        dtype, group, device: See :class:`MappedOutput`.

    Raises:
        ArgumentError: The ranks do not divide M, or padding would take more than half.
    """
    owner = group_of(group, device)
    owner.require_one_node("empty_rotating")
    if len(shape) != 2 or shape[0] % owner.world_size:
        raise ArgumentError(
            f"empty_rotating: shape must be (M, K), and the {owner.world_size} ranks divide M; "
            f"got {tuple(shape)}."
        )
    rows, columns = int(shape[0]), int(shape[1])
    owner.agree("empty_rotating", shape=(rows, columns), dtype=str(dtype))
    chunk = chunk_of_rows("empty_rotating", rows, columns, dtype.itemsize, owner.granularity)
    block = owner.allocate(chunk.nbytes)
    address = block.address + owner.rank * block.stride
    natural = tensor_at(owner, address, chunk.nbytes, chunk.sizes, chunk.strides, dtype, block)
    # The own rows come last, so a rank on its own rotates nothing.
    if owner.world_size == 1:
        return RotatingInput(natural, natural)
    # The same memory twice in a row: what ends with the first mapping goes on in the second.
    mapping = Mapping(block, owner.device, *owner.remap([address, address], chunk.nbytes))
    start = (
        (owner.rank + 1)
        % owner.world_size
        * (rows // owner.world_size)
        * chunk.strides[0]
        * dtype.itemsize
    )
    rotated = tensor_at(
        owner, mapping.address + start, chunk.nbytes, chunk.sizes, chunk.strides, dtype, mapping
    )
    return RotatingInput(natural, rotated)
