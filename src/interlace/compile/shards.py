"""Tensors of the program that is being compiled whose shards differ in size from rank to rank.

A graph holds the shapes of this rank alone: ranks that decided by them would decide differently.
"""

from __future__ import annotations

import torch.distributed as dist
from torch._guards import TracingContext


def uneven_groups() -> list[str]:
    """Return the names of the process groups over which a DTensor of the program that is being
    compiled is sharded unevenly. It is the same list on every rank, and nothing is sent.
    """
    context = TracingContext.try_get()
    # Without a DTensor in the process there is no need to import what defines it.
    if context is None or not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.tensor import DTensor, Shard

    names = set()
    for tensor in list(context.tensor_to_context.keys()):
        if not isinstance(tensor, DTensor):
            continue
        mesh = tensor.device_mesh
        for dimension, size in enumerate(tensor.shape):
            over = [
                number
                for number, placement in enumerate(tensor.placements)
                if isinstance(placement, Shard) and placement.dim % tensor.dim() == dimension
            ]
            ranks = 1
            for number in over:
                ranks *= mesh.size(number)
            if int(size) % ranks:
                names |= {mesh.get_group(number).group_name for number in over}
    return sorted(names)
