"""A producer that knows nothing of other ranks: plain ``torch.mm``, whose output is the peers'
memory.

Run it anywhere: ``python examples/05_mapped_output.py`` (two ranks on the CPU backend without
GPUs).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import interlace

ROWS, COLUMNS, INNER = 64, 1024, 128


def worker() -> tuple[float, float]:
    """Largest differences from the same collectives by ``torch.distributed``."""
    device = interlace.group_of().device
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(ROWS, INNER, generator=generator, device=device)
    w = torch.randn(COLUMNS, INNER, generator=generator, device=device)

    # Every rank's rows go to the rank that they are for, while torch.mm runs.
    out = interlace.MappedOutput((ROWS, COLUMNS), dtype=x.dtype)
    torch.mm(x, w.T, out=out.begin())
    received = out.exchange().flatten(0, 1)

    expected = torch.empty_like(received)
    dist.all_to_all_single(expected, x @ w.T)
    exchanged = (received - expected).abs().max().item()

    # The same, and then the sum over ranks.
    product = interlace.fuse(torch.mm, "reduce_scatter", shape=(ROWS, COLUMNS), dtype=x.dtype)
    whole = x @ w.T
    dist.all_reduce(whole)
    rows = whole.chunk(dist.get_world_size())[dist.get_rank()]
    return exchanged, (product(x, w.T) - rows).abs().max().item()


if __name__ == "__main__":
    results = interlace.launch(worker, 2)
    print("largest differences of all-to-all and reduce-scatter, by rank:", results)
    assert all(exchanged < 1e-3 and summed < 1e-3 for exchanged, summed in results)
