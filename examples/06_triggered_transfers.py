"""A kernel counts its tiles, and copy engines send each rank's rows as soon as they are complete.

The kernel stores to this GPU's memory and knows no peer. One line of it counts a stored row, and
``TriggeredTransfers`` knows the number of rows per piece. Run it with ``python
examples/06_triggered_transfers.py``: two ranks, on the CPU backend without GPUs, where a thread
plays the copy engine.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl

import interlace
import interlace.language as il

ROWS, COLUMNS = 16, 1024


@triton.jit(do_not_specialize=["first", "rows", "rows_per_piece"])
def swiglu(gate, up, out, counters, first, rows, rows_per_piece, stride, COLUMNS: tl.constexpr):
    """Compute ``silu(gate) * up``, one row per program, from row ``first`` on and round the end."""
    row = (first + tl.program_id(0)) % rows
    columns = tl.arange(0, COLUMNS)
    g = tl.load(gate + row * COLUMNS + columns)
    u = tl.load(up + row * COLUMNS + columns)
    tl.store(out + row * stride + columns, g / (1 + tl.exp(-g)) * u)
    il.count(counters + row // rows_per_piece)


def run_swiglu(
    gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor, counters: torch.Tensor
) -> None:
    """Launch the kernel, as the producer of a fused collective."""
    rows_per_piece = ROWS // len(counters)
    # The next rank's rows come first and this rank's own rows last: these need no copy to a peer.
    first = (dist.get_rank() + 1) * rows_per_piece
    swiglu[(ROWS,)](
        gate, up, out, counters, first, ROWS, rows_per_piece, out.stride(0), COLUMNS=COLUMNS
    )


def worker() -> tuple[float, float]:
    """Return the largest differences from two collectives of ``torch.distributed``."""
    device, ranks = interlace.group_of().device, dist.get_world_size()
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    gate, up = (torch.randn(ROWS, COLUMNS, generator=generator, device=device) for _ in range(2))
    plain = F.silu(gate) * up

    # An all-to-all: each rank gets its rows of every rank's output.
    out = interlace.TriggeredTransfers((ROWS, COLUMNS), dtype=gate.dtype, tiles=ROWS // ranks)
    run_swiglu(gate, up, out=out.begin(), counters=out.counters)
    received = out.exchange().flatten(0, 1)
    expected = torch.empty_like(received)
    dist.all_to_all_single(expected, plain)
    exchanged = (received - expected).abs().max().item()

    # A reduce-scatter: each rank adds the rows that it has received.
    summed = interlace.fuse(
        run_swiglu,
        "reduce_scatter",
        shape=(ROWS, COLUMNS),
        dtype=gate.dtype,
        transport="copy_engine",
        tiles=ROWS // ranks,
    )
    dist.all_reduce(plain)
    return exchanged, (summed(gate, up) - plain.chunk(ranks)[dist.get_rank()]).abs().max().item()


if __name__ == "__main__":
    results = interlace.launch(worker, 2)
    print("largest differences of all-to-all and reduce-scatter, by rank:", results)
    assert all(exchanged < 1e-5 and summed < 1e-5 for exchanged, summed in results)
