"""Products whose parts are summed over ranks: what the kernels of gemm_reduce_scatter and
gemm_all_reduce share.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.places import FIRST_ROW, ROUTE, ROWS_SENT
from interlace.gemm.kernels.tiles import (
    add_bias, cells_of, finish_tile, multiply_tile, tile_place,
)
from interlace.language.tree import add_to_tree

_PARTS_IN_FLIGHT = tl.constexpr(3)


class Slots(NamedTuple):
    """Symmetric memory in which parts arrive, ``[rank, half, source, row, column]``.

    Attributes:
        tiles: A tensor descriptor of it; None without tile stores.
        address: Rank 0's address of this call's half, for ordinary stores.
        half: 0 or 1, by the epoch's parity.
        most_rows: Rows of a slot.
        row_stride: Elements between two rows, of slots and of results.
        flags: This rank's int32 signals, ``[source][tile]``.
        per_source: Signals of one source.
    """

    tiles: Any
    address: Any
    half: Any
    most_rows: Any
    row_stride: Any
    flags: Any
    per_source: Any


class SlotHalves(NamedTuple):
    """The two halves of the slots, which calls use in turn.

    Attributes:
        address: Rank 0's address of the first half.
        nbytes: Bytes of a half.
    """

    address: Any
    nbytes: Any


class Results(NamedTuple):
    """The memory that sums are stored to.

    Attributes:
        tiles: A tensor descriptor of every rank's buffers, ``[rank, buffer, 0, row of M, column]``,
            or of this rank's result, ``[0, 0, 0, own row, column]``; None without tile stores.
        address: Rank 0's address of the first buffer, or that of this rank's result.
        buffers: Each rank's buffer, an int32 tile; 0 for this rank's result.
        buffer_bytes: Bytes between two buffers.
    """

    tiles: Any
    address: Any
    buffers: Any
    buffer_bytes: Any


@triton.jit
def add_parts(
    total, slots, row, column, rows, N, group, SENDING: tl.constexpr, TILING: tl.constexpr,
    OWN_PART: tl.constexpr = False,
):
    """Return a float32 tile of this rank's own rows plus the peers' parts of it, in rank order.

    This rank's own tile is the first to be added, unrounded. With ``SENDING.in_rank_order`` it is
    rounded like the received parts, and added in rank order with them, or with ``SENDING.in_tree``
    in a tree of pairs.

    Args:
        OWN_PART: Whether this rank's slot holds a part, too.
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    me = il.rank(group)
    OUT: tl.constexpr = tl.dtype(SENDING.dtype)
    parts = il.pointer(slots.address, OUT)
    slot_stride = slots.most_rows.to(tl.int64) * slots.row_stride
    IN_RANK_ORDER: tl.constexpr = SENDING.in_rank_order
    if IN_RANK_ORDER:
        # Rounded as if it had travelled: otherwise a row's bits would depend on which rank owns it.
        own = total.to(OUT).to(tl.float32)
        total = tl.zeros_like(total)
    # A tree of two is their sum in rank order, which takes fewer registers.
    IN_TREE: tl.constexpr = SENDING.in_tree and WORLD_SIZE > 2
    if IN_TREE:
        ones = tl.zeros(total.shape, OUT)
        twos, fours = ones, ones
    all_ranks = OWN_PART or IN_RANK_ORDER
    sources = WORLD_SIZE if all_ranks else WORLD_SIZE - 1
    for index in tl.range(0, sources, num_stages=_PARTS_IN_FLIGHT):
        source = index if all_ranks else tl.where(me <= index, index + 1, index)
        if SENDING.tile_stores:
            # The addresses of a tile do not fit in registers beside it, so a descriptor loads it.
            part = tl.reshape(slots.tiles.load([me, slots.half, source, row, column]), total.shape)
        else:
            cells, inside = cells_of(0, row, column, rows, N, slots.row_stride, TILING)
            if IN_RANK_ORDER:
                # Nobody has written this rank's own slot.
                inside = inside & (source + cells * 0 != me)
            part = il.get(parts + source * slot_stride + cells, me, group, inside, 0.0)
        value = part.to(tl.float32)
        if IN_RANK_ORDER:
            value = tl.where(source == me, own, value)
        if IN_TREE:
            total, ones, twos, fours = add_to_tree(
                value, ones, twos, fours, source, WORLD_SIZE, OUT
            )
        else:
            total += value
    return total


@triton.jit
def send_and_sum(
    matrices, scales, bias, slots, results, waiting, routes, stamp, group, BROADCAST: tl.constexpr,
    SENDING: tl.constexpr, TILING: tl.constexpr,
):
    """Send parts of the product to their owners' slots, and store the sums of this rank's own rows,
    with the parts that came, where they belong.

    Program p takes tiles p, p + programs, ... of every rank's rows. A *round* is one of these tiles
    for each peer, and this rank's own tile of the round before; programs begin a round with
    different ranks, so that own tiles, which send nothing, are spread. Tiles' copies run while the
    next ones are computed; in the next round they are complete and their owners are told, all at
    once. The sum is float32, in the order of :func:`add_parts`.

    A wait is for peers' programs of the same index, in the same round, after this program's own
    signals of that round: a grid finishes even if its programs run one after another.

    Args:
        waiting: Where sums of several leaves of K wait; see :func:`add_to_tree`.
        routes: ``[ranks][ROUTE]``, the rows of each rank.
        BROADCAST: Whether sums go to every rank's buffer, or else to this rank's result.

    Returns:
        Whether all parts arrived (int32 scalar).
    """
    WORLD_SIZE: tl.constexpr = SENDING.world_size
    OUT: tl.constexpr = tl.dtype(SENDING.dtype)
    TILES: tl.constexpr = SENDING.tile_stores
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    GROUP_M: tl.constexpr = TILING.group_m
    program, programs = tl.program_id(0), tl.num_programs(0)
    me = il.rank(group)
    N, row_stride, flags = matrices.N, slots.row_stride, slots.flags
    peers, is_peer = il.other_ranks(me, WORLD_SIZE)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = (slots.most_rows + BLOCK_M - 1) // BLOCK_M
    rounds = (tiles_m * tiles_n + programs - 1) // programs
    slot_stride = slots.most_rows.to(tl.int64) * row_stride
    parts = il.pointer(slots.address, OUT)
    all_arrived = 1
    # The tile, the same for every peer, that was sent in an earlier step and not announced yet.
    unannounced = -1
    for step in tl.range(0, rounds * WORLD_SIZE + 1):
        # After the last round, one step more for this rank's own tile of that round.
        shifted = (step + program // SENDING.interleave) % WORLD_SIZE
        turn = tl.where(step < rounds * WORLD_SIZE, shifted, WORLD_SIZE - 1)
        # A round's own tile is computed a round later, when the peers have sent their parts of it.
        dest = (me + 1 + turn) % WORLD_SIZE
        this_round = step // WORLD_SIZE * programs + program
        tile = tl.where(dest == me, this_round - programs, this_round)
        first = tl.load(routes + dest * ROUTE + FIRST_ROW).to(tl.int32)
        rows = tl.load(routes + dest * ROUTE + ROWS_SENT).to(tl.int32)
        tile_m, tile_n = tile_place(tl.maximum(tile, 0), tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        if (tile >= 0) & (tile < tiles_m * tiles_n) & (row < rows):
            il.record("tile", tile, group)
            x_row, x_rows = first + row, first + rows
            total = multiply_tile(
                matrices, x_row, column, x_rows, TILING, scales=scales, waiting=waiting
            )
            total = finish_tile(total, scales, None, x_row, column, x_rows, N, TILING)
            il.record("computed", tile, group)
            # Tiles of an earlier round have left shared memory while this one was computed.
            if (unannounced >= 0) & (unannounced < this_round):
                _announce(unannounced, slots, stamp, group, WORLD_SIZE, TILES)
                unannounced = -1
            # 1. A peer's part goes into this rank's slot at the peer; it is announced later.
            if dest != me:
                if TILES:
                    corner = [dest, slots.half, me, row, column]
                    part = tl.reshape(total.to(OUT), [1, 1, 1, BLOCK_M, BLOCK_N])
                    il.put_tile(slots.tiles, corner, part, group)
                else:
                    cells, inside = cells_of(0, row, column, rows, N, row_stride, TILING)
                    il.put(parts + me * slot_stride + cells, total.to(OUT), dest, group, inside)
                unannounced = this_round
            else:
                # 2. A tile of this rank's own rows: wait for the peers' parts and add them.
                if WORLD_SIZE > 1:
                    # Two ranks cannot wait for each other here: this program has announced its own
                    # parts of the awaited round by now, above at the latest.
                    awaited = flags + peers * slots.per_source + tile
                    arrived = il.wait(awaited, stamp, peers, tile, group, is_peer).to(tl.int32)
                    all_arrived = all_arrived * arrived
                    if TILES:
                        il.accept_tiles()
                    total = add_parts(total, slots, row, column, rows, N, group, SENDING, TILING)
                    # After a failed wait the slots may hold parts of an earlier call.
                    total = il.nan_unless(arrived, total)
                elif SENDING.in_rank_order and not SENDING.in_tree:
                    total = total.to(OUT).to(tl.float32)
                if bias is not None:
                    total = add_bias(total, bias, column, N)
                value = total.to(OUT)
                cells, inside = cells_of(0, row, column, rows, N, row_stride, TILING)
                # 3. The sum goes to this rank's result, or with BROADCAST to every rank's buffer,
                # beginning at a different rank on each rank so that no link is congested.
                for ahead in tl.static_range(WORLD_SIZE if BROADCAST else 1):
                    peer = (me + ahead) % WORLD_SIZE if BROADCAST else me
                    buffer = tl.sum(tl.where(peers == peer, results.buffers, 0))
                    if TILES:
                        line = first + row if BROADCAST else row
                        corner = [peer if BROADCAST else 0, buffer, 0, line, column]
                        block = tl.reshape(value, [1, 1, 1, BLOCK_M, BLOCK_N])
                        il.put_tile(results.tiles, corner, block, group if BROADCAST else None)
                    elif BROADCAST:
                        offset = buffer.to(tl.int64) * results.buffer_bytes
                        output = il.pointer(results.address + offset, OUT)
                        start = output + first.to(tl.int64) * row_stride
                        il.put(start + cells, value, peer, group, inside)
                    else:
                        tl.store(il.pointer(results.address, OUT) + cells, value, mask=inside)
    # The last round's parts have no later tile behind which their copies could complete.
    if unannounced >= 0:
        _announce(unannounced, slots, stamp, group, WORLD_SIZE, TILES)
    return all_arrived


@triton.jit
def _announce(tile, slots, stamp, group, WORLD_SIZE: tl.constexpr, TILES: tl.constexpr):
    """Tell every peer that this rank's part of its ``tile`` lies in its slot."""
    # A signal must not overtake the tile's copy out of shared memory.
    if TILES:
        il.complete_tiles()
    me = il.rank(group)
    peers, is_peer = il.other_ranks(me, WORLD_SIZE)
    sent = slots.flags + me * slots.per_source + tile + tl.zeros_like(peers)
    il.signal(sent, stamp, peers, group, is_peer)
