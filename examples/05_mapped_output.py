"""Plain ``torch.mm``, which knows nothing of other ranks, writes its output into the peers' memory.

Run it with ``python examples/05_mapped_output.py``: two ranks, on the CPU backend without GPUs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import interlace

ROWS, COLUMNS, INNER = 64, 1024, 128


def worker() -> tuple[float, float]:
    """Return the largest differences from two collectives of ``torch.distributed``."""
    device = interlace.group_of().device
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(ROWS, INNER, generator=generator, device=device)
    w = torch.randn(COLUMNS, INNER, generator=generator, device=device)

    # Each part of ``out`` is the memory of the rank that the part is for. So the all-to-all happens
    # while torch.mm stores its result, and ``exchange`` only waits for the peers.
    out = interlace.MappedOutput((ROWS, COLUMNS), dtype=x.dtype)
    torch.mm(x, w.T, out=out.begin())
    received = out.exchange().flatten(0, 1)

    expected = torch.empty_like(received)
    dist.all_to_all_single(expected, x @ w.T)
    exchanged = (received - expected).abs().max().item()

    # Rows go to their ranks in the same way, and each rank adds the rows that it has received.
    product = interlace.fuse(torch.mm, "reduce_scatter", shape=(ROWS, COLUMNS), dtype=x.dtype)
    total = x @ w.T
    dist.all_reduce(total)
    rows = total.chunk(dist.get_world_size())[dist.get_rank()]
    return exchanged, (product(x, w.T) - rows).abs().max().item()


if __name__ == "__main__":
    results = interlace.launch(worker, 2)
    print("largest differences of all-to-all and reduce-scatter, by rank:", results)
    assert all(exchanged < 1e-3 and summed < 1e-3 for exchanged, summed in results)
