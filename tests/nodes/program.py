"""A rank of ``test_torchrun``: what it finds out about its nodes, and whether a call is right."""

import json
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import interlace
from tests.operators.embedding_all_to_all.calls import Call, run_one


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
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
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
