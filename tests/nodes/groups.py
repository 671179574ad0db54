"""Groups of several nodes for tests, on the ranks of one machine."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

import interlace
from interlace.comm.nodes import NODES_VARIABLE


@contextmanager
def process_group_of(nodes: int | Sequence[int]) -> Iterator[dist.ProcessGroup]:
    """On a rank: a new process group of all ranks, which count as so many nodes.

    Args:
        nodes: The number of nodes, of consecutive ranks; or each rank's node.
    """
    if isinstance(nodes, int):
        variables = {NODES_VARIABLE: str(nodes)}
    else:
        # As torchrun says it.
        variables = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": str(nodes[dist.get_rank()])}
    with mock.patch.dict(os.environ, variables):
        process_group = dist.new_group()
        interlace.group_of(process_group)
    yield process_group
    dist.destroy_process_group(process_group)
