"""Products whose parts are summed over ranks: what the kernels of gemm_reduce_scatter and
gemm_all_reduce share.
"""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels import layout
from interlace.gemm.kernels.tiles import add_bias, multiply_tile, scale_tile, tile_place

_HEADER = tl.constexpr(layout.HEADER)
_FIRST_ROW = tl.constexpr(layout.FIRST_ROW)
_ROWS = tl.constexpr(layout.ROWS)
_ROUTE = tl.constexpr(layout.ROUTE)
_PART_STAGES = tl.constexpr(3)  # parts in flight


@triton.jit
def add_parts(
    total, slots, parts, half, row, column, rows, N, slot_stride, row_stride, group,
    WORLD_SIZE: tl.constexpr, TILES: tl.constexpr, OWN_PART: tl.constexpr = False,
):  # fmt: skip
    """``total``, a float32 tile of this rank's own rows, and the peers' parts of it, which are
    here; in rank order.

    Args:
        OWN_PART: this rank's slot holds a part, too.
        slots, parts: of parts, ``[rank, half, source, row, column]``: a tensor descriptor under
            ``TILES``; else a pointer to rank 0's ``[source, row, column]``.
    """
    me = il.rank(group)
    m, n = row + tl.arange(0, total.shape[0]), column + tl.arange(0, total.shape[1])
    for each in tl.range(0, WORLD_SIZE if OWN_PART else WORLD_SIZE - 1, num_stages=_PART_STAGES):
        source = each if OWN_PART else tl.where(me <= each, each + 1, each)
        if TILES:  # the addresses of a tile do not fit in registers beside it
            part = tl.reshape(slots.load([me, half, source, row, column]), total.shape)
        else:
            here = parts + source * slot_stride + m.to(tl.int64)[:, None] * row_stride + n[None, :]
            part = il.get(here, me, group, (m < rows)[:, None] & (n < N)[None, :], 0.0)
        total += part.to(tl.float32)
    return total


@triton.jit
def send_and_sum(
    x, w, bias, x_scale, w_scale, slots, slot_address, results, result_address, buffers,
    buffer_bytes, routes, flags, per_source, stamp, group, half, half_bytes, most_rows, N, K,
    x_stride, w_stride, x_scale_stride, w_scale_stride, row_stride, WORLD_SIZE: tl.constexpr,
    OUT: tl.constexpr, BROADCAST: tl.constexpr, DESCRIPTORS: tl.constexpr, TILES: tl.constexpr,
    W_ALONG_K: tl.constexpr, PRECISION: tl.constexpr, GROUP_M: tl.constexpr,
    INTERLEAVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Parts of the product to their owners' slots; this rank's own rows, with the parts that came,
    to where the sum belongs.

    Program p takes tiles p, p + programs, ... of every rank's rows. A *round* is one of these tiles
    for each peer, and this rank's own tile of the round before; programs begin a round with
    different ranks, so that own tiles, which send nothing, are spread. Tiles' copies run while the
    next ones are computed; in the next round they are complete and their owners are told, all at
    once. The sum is float32: the own part first, then the peers' in rank order.

    A wait is for peers' programs of the same index, in the same round, after this program's own
    signals of that round: a grid finishes even if its programs run one after another.

    Args:
        slots, slot_address: of parts, ``[rank, half, source, row, column]``: a tensor descriptor
            under ``TILES``, and rank 0's address for ordinary stores.
        results, result_address: of sums. ``BROADCAST``: every rank's, ``[rank, buffer, 0, row of M,
            column]``, and rank 0's address. Else this rank's, ``[0, 0, 0, own row, column]``, and
            its address.
        buffers, buffer_bytes: under ``BROADCAST`` each rank's buffer, an int32 tile, and the bytes
            between two of them.
        flags: int32 signals, ``[source][tile]``, ``per_source`` apart.
        half: 0 or 1, by the epoch.

    Returns:
        Whether all parts arrived (int32 scalar).
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    me = il.rank(group)
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    others = (peers < WORLD_SIZE) & (peers != me)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = (most_rows + BLOCK_M - 1) // BLOCK_M
    rounds = (tiles_m * tiles_n + programs - 1) // programs
    slot_stride = most_rows.to(tl.int64) * row_stride
    parts = il.pointer(slot_address + half * half_bytes, OUT)
    arrived_all = 1
    # The tile, the same for every peer, that was sent in an earlier step and not announced yet
    untold = -1
    for step in tl.range(0, rounds * WORLD_SIZE + 1):
        turn = tl.where(step < rounds * WORLD_SIZE, (step + program // INTERLEAVE) % WORLD_SIZE, WORLD_SIZE - 1)
        dest = (me + 1 + turn) % WORLD_SIZE
        this_round = step // WORLD_SIZE * programs + program
        tile = tl.where(dest == me, this_round - programs, this_round)
        first = tl.load(routes + dest * _ROUTE + _FIRST_ROW).to(tl.int32)
        rows = tl.load(routes + dest * _ROUTE + _ROWS).to(tl.int32)
        tile_m, tile_n = tile_place(tl.maximum(tile, 0), tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        if (tile >= 0) & (tile < tiles_m * tiles_n) & (row < rows):
            total = multiply_tile(
                x, w, first + row, column, first + rows, N, K, x_stride, w_stride,
                DESCRIPTORS, W_ALONG_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if x_scale is not None:
                total = scale_tile(total, x_scale, w_scale, first + row, column, first + rows, N, x_scale_stride, w_scale_stride)
            if (untold >= 0) & (untold < this_round):
                if TILES:
                    il.complete_tiles()
                il.signal(flags + me * per_source + untold + tl.zeros_like(peers), stamp, peers, group, others)
                untold = -1
            if dest != me:
                if TILES:
                    corner = [dest, half, me, row, column]
                    il.put_tile(slots, corner, tl.reshape(total.to(OUT), [1, 1, 1, BLOCK_M, BLOCK_N]))
                else:
                    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
                    target = parts + me * slot_stride + m.to(tl.int64)[:, None] * row_stride + n[None, :]
                    il.put(target, total.to(OUT), dest, group, (m < rows)[:, None] & (n < N)[None, :])
                untold = this_round
            else:
                if WORLD_SIZE > 1:
                    arrived = il.wait(flags + peers * per_source + tile, stamp, peers, tile, group, others).to(tl.int32)
                    arrived_all = arrived_all * arrived
                    if TILES:
                        il.accept_tiles()
                    total = add_parts(
                        total, slots, parts, half, row, column, rows, N, slot_stride, row_stride,
                        group, WORLD_SIZE, TILES
                    )
                    total = tl.where((arrived + tl.arange(0, BLOCK_M) * 0 > 0)[:, None], total, float("nan"))
                if bias is not None:
                    total = add_bias(total, bias, column, N)
                value = total.to(OUT)
                m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
                cells = m.to(tl.int64)[:, None] * row_stride + n[None, :]
                inside = (m < rows)[:, None] & (n < N)[None, :]
                for ahead in tl.static_range(WORLD_SIZE if BROADCAST else 1):
                    peer = (me + ahead) % WORLD_SIZE if BROADCAST else me
                    buffer = tl.sum(tl.where(peers == peer, buffers, 0))
                    if TILES:
                        place = first + row if BROADCAST else row
                        corner = [peer if BROADCAST else 0, buffer, 0, place, column]
                        il.put_tile(results, corner, tl.reshape(value, [1, 1, 1, BLOCK_M, BLOCK_N]))
                    elif BROADCAST:
                        output = il.pointer(result_address + buffer.to(tl.int64) * buffer_bytes, OUT)
                        il.put(output + first.to(tl.int64) * row_stride + cells, value, peer, group, inside)
                    else:
                        tl.store(il.pointer(result_address, OUT) + cells, value, mask=inside)
    if untold >= 0:
        if TILES:
            il.complete_tiles()
        il.signal(flags + me * per_source + untold + tl.zeros_like(peers), stamp, peers, group, others)
    return arrived_all
