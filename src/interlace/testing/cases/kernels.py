"""Kernels of the cases, such as users write, with the primitives of ``interlace.language``."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.language.sizes import next_power_of_2


@triton.jit(do_not_specialize=["rows", "rows_per_piece", "part_stride", "row_stride"])
def double_and_count(
    x, out, counters, rows, rows_per_piece, part_stride, row_stride, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ``out = 2 * x``, one row per program: ``x [parts * rows, COLUMNS]``, ``out [parts,
    rows, COLUMNS]`` with its strides.

    Each row is a tile, counted in the counter of its piece.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * COLUMNS + columns, columns < COLUMNS, 0.0)
    row_start = out + (row // rows).to(tl.int64) * part_stride + (row % rows) * row_stride
    doubled = (values.to(tl.float32) * 2).to(values.dtype)
    tl.store(row_start + columns, doubled, columns < COLUMNS)
    il.count(counters + row // rows_per_piece)


@triton.jit(do_not_specialize=["data", "signals", "epoch"])
def put_signal_sum(x, y, data, signals, epoch, ctx, WORLD_SIZE: tl.constexpr, SIZE: tl.constexpr):
    """Compute ``y = sum over ranks of x``, ``[SIZE]``, in rank order.

    Protocol: slots are ``[epoch % 2][source][SIZE]``, signals ``[source]``. A slot is written again
    two calls later: by then its reader has sent the tile of the call in between, after reading.
    """
    group = il.join(ctx)
    me = il.rank(group)
    i = tl.arange(0, SIZE)
    slots = il.pointer(data, tl.float32) + (epoch % 2) * WORLD_SIZE * SIZE + i
    flags = il.pointer(signals, tl.int32)
    part = tl.load(x + i)
    for step in tl.static_range(WORLD_SIZE):
        peer = (me + 1 + step) % WORLD_SIZE
        il.put_signal(slots + me * SIZE, part, flags + me, epoch, peer, group)
    peers = tl.arange(0, next_power_of_2(WORLD_SIZE))
    arrived = il.wait(flags + peers, epoch, peers, 0, group, peers < WORLD_SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for source in tl.static_range(WORLD_SIZE):
        total += il.get(slots + source * SIZE, me, group)
    tl.store(y + i, tl.where(arrived, total, float("nan")))
