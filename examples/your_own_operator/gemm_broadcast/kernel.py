"""The kernel of ``gemm_broadcast``."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.tiles import Matrices, add_bias, multiply_tile, tile_place

_MAX_RANKS = tl.constexpr(8)
# int32 signals of a rank: two sets of DONE, [set][reader], then the number of programs that have
# read all their tiles, and one signal per tile.
_COUNTER = tl.constexpr(16)
FIRST_TILE = tl.constexpr(32)


@triton.jit(do_not_specialize=["landing_address", "signals", "call", "M", "N", "K"])
def gemm_broadcast(
    x, w, bias, y, landing_address, signals, epochs, ctx, call, M, N, K, x_stride, w_stride,
    ROOT: tl.constexpr, SENDING: tl.constexpr, TILING: tl.constexpr,
):  # fmt: skip
    """Multiply on the root, and store each tile in every rank's landing.

    Protocol: the root writes the landings, one signal per tile says that it is there, and each
    reader copies it into its own result. When the last program of a reader has copied everything,
    it sets DONE at the root; the root waits for all readers' DONE of the last call before it writes
    anything, so a landing is never written while it is read.

    Example: two ranks, two tiles. Rank 0 stores tile 0 in rank 1's landing and sets signal 0 there;
    rank 1 copies it while rank 0 computes tile 1.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    GROUP_M: tl.constexpr = TILING.group_m
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch, stamp, group, me = il.enter(epochs, ctx, call)
    peers, others = il.other_ranks(me, WORLD_SIZE)
    flags = il.pointer(signals, tl.int32)
    landing = il.pointer(landing_address, y.dtype.element_ty)
    matrices = Matrices(x, w, N, K, x_stride, w_stride)
    tiles_m, tiles_n = (M + BLOCK_M - 1) // BLOCK_M, (N + BLOCK_N - 1) // BLOCK_N
    if me == ROOT:
        # 1. The readers have copied the last call's tiles.
        last = il.previous_epoch(epoch)
        done = il.in_turn(flags, last, _MAX_RANKS)
        free = il.wait(done + peers, last, peers, 0, group, others).to(tl.int32)
        for tile in tl.range(program, tiles_m * tiles_n, programs):
            tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
            row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
            total = multiply_tile(matrices, row, column, M, TILING)
            if bias is not None:
                total = add_bias(total, bias, column, N)
            m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            cells = m.to(tl.int64)[:, None] * N + n[None, :]
            inside = (m < M)[:, None] & (n < N)[None, :]
            value = total.to(y.dtype.element_ty)
            tl.store(y + cells, value, mask=inside)
            # 2. Each tile is announced behind its own stores.
            if free > 0:
                for step in tl.static_range(WORLD_SIZE - 1):
                    il.put(landing + cells, value, (me + 1 + step) % WORLD_SIZE, group, inside)
                there = flags + FIRST_TILE + tile + tl.zeros_like(peers)
                il.signal(there, stamp, peers, group, others)
    else:
        for tile in tl.range(program, tiles_m * tiles_n, programs):
            # 3. Readers copy a tile as soon as it is there; NaN where the root never came.
            there = flags + FIRST_TILE + tile + tl.arange(0, 1)
            arrived = il.wait(there, stamp, ROOT, tile, group).to(tl.int32)
            tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
            m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            cells = m.to(tl.int64)[:, None] * N + n[None, :]
            inside = (m < M)[:, None] & (n < N)[None, :]
            value = il.get(landing + cells, me, group, inside, 0.0)
            tl.store(y + cells, il.nan_unless(arrived, value), mask=inside)
        # 4. The last program of a reader frees the landing for the next call.
        if il.arrive_last(il.peer_pointer(flags + _COUNTER, me, group), program, programs):
            done = il.in_turn(flags, epoch, _MAX_RANKS)
            il.signal(done + me, epoch, ROOT, group)
    il.clear_old(flags + FIRST_TILE, tiles_m * tiles_n, epoch, group)
    il.advance_epoch(epochs, epoch)
