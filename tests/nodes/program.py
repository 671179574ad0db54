"""A rank of ``test_torchrun``: what it finds out about its nodes, and whether a call is right."""

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import interlace
from tests.operators.embedding_all_to_all.calls import Call, run_one


def work(folder: Path) -> tuple[int, int]:
    """Write down what this rank finds out; return the rank and its process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    group = interlace.group_of()
    call = Call(tuple((4, 8) for _ in range(ranks)), 13)
    y = run_one(call)
    mine = call.samples(rank)
    error = float((y.double() - call.expected()[mine]).abs().max())
    interfaces = [name for _, name in socket.if_nameindex()]
    found = [group.members.node_of_rank, error, float(call.bound()[mine].max()), interfaces]
    (folder / f"rank-{rank}").write_text(json.dumps(found))
    return rank, os.getpid()


def main(folder: Path) -> None:
    """Call in a group that ``launch`` makes, which starts nothing here, and in one of our own."""
    results = interlace.launch(work, 2, folder, backend="cpu")
    assert [rank for rank, _ in results] == [0, 1]
    assert results[int(os.environ["RANK"])][1] == os.getpid()
    assert not dist.is_initialized()
    # As programs do that know torchrun.
    dist.init_process_group("gloo")
    assert work(folder) == (dist.get_rank(), os.getpid())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
