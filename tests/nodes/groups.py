"""Groups of several nodes for tests, on the ranks of one machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

import interlace
from interlace.comm.nodes import NODES_VARIABLE


@contextmanager
def process_group_of(nodes: int) -> Iterator[dist.ProcessGroup]:
    """On a rank: a new process group of all ranks, which count as so many nodes."""
    before = os.environ.get(NODES_VARIABLE)
    os.environ[NODES_VARIABLE] = str(nodes)
    try:
        process_group = dist.new_group()
        interlace.group_of(process_group)
    finally:
        del os.environ[NODES_VARIABLE]
        if before is not None:
            os.environ[NODES_VARIABLE] = before
    yield process_group
    dist.destroy_process_group(process_group)
