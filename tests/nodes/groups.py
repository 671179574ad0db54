"""Groups of several nodes for tests, on the ranks of one machine."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

import interlace
from interlace.comm.nodes import NODES_VARIABLE
from tests.errors import error_of


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


def call_without_one(call, late, nodes=2):
    """On a rank: make a product's call twice, the second time without rank ``late``; recover.

    Returns:
        The error of the second call, or None on the late rank; its seconds; and what a third call,
        after recovery, returns.
    """
    with process_group_of(nodes) as process_group:
        call.make(process_group)
        interlace.set_deadline(4.0, process_group)
        start, error = time.monotonic(), None
        if dist.get_rank() != late:
            error = error_of(call.make, process_group)
        took_s = time.monotonic() - start
        dist.barrier()
        interlace.set_deadline(60.0, process_group)
        interlace.recover(process_group)
        return error, took_s, call.make(process_group)
