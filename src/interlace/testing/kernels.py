"""Kernels of the cases and of checks, with the primitives of ``interlace.language``."""

import triton
import triton.language as tl

import interlace.language as il

# Cases: kernels such as users write


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
    peers = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    arrived = il.wait(flags + peers, epoch, peers, 0, group, peers < WORLD_SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for source in tl.static_range(WORLD_SIZE):
        total += il.get(slots + source * SIZE, me, group)
    tl.store(y + i, tl.where(arrived, total, float("nan")))


# The self-test of GPU-initiated puts, interlace.testing.gin_check


@triton.jit(do_not_specialize=["gin", "source", "landing", "nbytes", "part_bytes", "rounds"])
def exchange_ranges(
    peers, arrived, gin, source, landing, nbytes, part_bytes, rounds, ctx
):
    """Put one range to each peer and wait for its own, in several rounds; one program per peer.

    Protocol: source and landing are windows ``[rank][part_bytes]``. In each round this rank puts
    ``source[peer][:nbytes]`` to ``landing[rank]`` of the peer. Signal r of a rank counts the puts
    of rank r, and counter r those to rank r. A landing may be written again at once, as the content
    is the same in all rounds of a launch; launches are kept apart on the host.

    Example, rank 0 of two: put ``source[1]`` to ``landing[0]`` of rank 1, signal 0. Wait for signal
    1, behind which rank 1's range is in ``landing[1]``. Wait until the own put has been sent.

    Args:
        peers: int32 ``[programs]``: the rank that each program exchanges with.
        arrived: int32 ``[programs]``: gets the number of rounds that were complete.
        gin: int64: ``Gin.address``.
        source, landing: int64: handles of the two windows.
        nbytes: int64: length of each range.
        part_bytes: int64: bytes of each rank's part of a window.
        rounds: int32.
        ctx: The group's context.
    """
    group = il.join(ctx)
    me = il.rank(group)
    peer = tl.load(peers + tl.program_id(0))
    complete = 0
    for round in range(rounds):
        # After a failure a wait ends at once, and nothing more is put.
        if complete == round:
            il.gin_put(
                gin, landing, me * part_bytes, source, peer * part_bytes, nbytes, peer, me, group,
                peer,
            )
            if il.gin_wait(gin, peer, 1, peer, round, group):
                if il.gin_sent(gin, peer, 1, peer, round, group):
                    complete = round + 1
    tl.store(arrived + tl.program_id(0), complete)


@triton.jit(do_not_specialize=["gin", "signal", "peer"])
def await_nothing(arrived, gin, signal, peer, ctx):
    """Wait for a signal that nobody sends: the group's deadline must end it.

    Args:
        arrived: int32 ``[1]``: gets 0, or 1 if something has arrived.
        gin: int64: ``Gin.address``.
        signal: int32: the signal.
        peer: int32: the rank that the error shall name.
        ctx: The group's context.
    """
    group = il.join(ctx)
    came = il.gin_wait(gin, signal, 1, peer, 0, group)
    tl.store(arrived, came.to(tl.int32))
