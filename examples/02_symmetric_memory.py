"""The group's memory is a tensor with one more dimension: a put is an assignment, and a get is a
copy.
"""

import torch
import torch.distributed as dist

import interlace


def worker() -> list[list[int]]:
    """Every rank runs this; the result is what the others put in its memory."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sym = interlace.empty_symmetric((world_size, 2), dtype=torch.int32)
    # sym.local is [world_size, 2], this rank's own; sym.peers is [world_size, world_size, 2],
    # everybody's.
    assert sym.peers.shape == (world_size, world_size, 2)

    value = torch.tensor([rank, 10 * rank], dtype=torch.int32, device=sym.local.device)
    right = (rank + 1) % world_size
    sym.peers[right, rank] = value  # one put, to the right neighbour
    sym.peers[:, rank, 1] = 10 * rank  # a broadcast is a slice
    meet(sym.group)  # puts do not order themselves
    left = (rank - 1) % world_size
    assert sym.peers[left, left, 1].item() == 10 * left  # a get, from the left neighbour's memory
    meet(sym.group)  # nobody frees what a peer still reads
    return sym.local.tolist()


def meet(group: interlace.Group) -> None:
    """All ranks' puts before this are visible to all ranks after it."""
    group.synchronize()
    dist.barrier()


def main() -> None:
    received = interlace.launch(worker, 3)
    for rank, rows in enumerate(received):
        print(f"rank {rank} holds {rows}: row r is what rank r put there")
    assert received[1] == [[0, 0], [0, 10], [0, 20]]  # rank 0's put, then the broadcasts
    assert received[2] == [[0, 0], [1, 10], [0, 20]]


if __name__ == "__main__":
    main()
