"""Symmetric memory is a tensor with one more dimension: a put is an assignment, a get is a copy."""

import torch
import torch.distributed as dist

import interlace


def worker() -> list[list[int]]:
    """Put values into the peers' memory, and return the contents of this rank's memory."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sym = interlace.empty_symmetric((world_size, 2), dtype=torch.int32)
    # sym.local [world_size, 2] is this rank's memory. sym.peers [world_size, world_size, 2] is the
    # memory of all ranks, one after another.
    assert sym.peers.shape == (world_size, world_size, 2)

    value = torch.tensor([rank, 10 * rank], dtype=torch.int32, device=sym.local.device)
    right = (rank + 1) % world_size
    # One put, to the right neighbour.
    sym.peers[right, rank] = value
    # A broadcast is a put to a slice of all ranks.
    sym.peers[:, rank, 1] = 10 * rank
    # Puts have no order by themselves, so the ranks meet before they read.
    meet(sym.group)
    left = (rank - 1) % world_size
    # A get, from the left neighbour's memory.
    assert sym.peers[left, left, 1].item() == 10 * left
    # The ranks meet again, so that no rank frees memory that a peer still reads.
    meet(sym.group)
    return sym.local.tolist()


def meet(group: interlace.Group) -> None:
    """Make all ranks' earlier puts visible to all ranks."""
    group.synchronize()
    dist.barrier()


def main() -> None:
    received = interlace.launch(worker, 3)
    for rank, rows in enumerate(received):
        print(f"rank {rank} holds {rows}: rank r has put row r")
    # Rank 1 has a put from rank 0, and then all ranks' broadcasts.
    assert received[1] == [[0, 0], [0, 10], [0, 20]]
    assert received[2] == [[0, 0], [1, 10], [0, 20]]


if __name__ == "__main__":
    main()
