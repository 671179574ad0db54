"""Kernels of the self-test, :mod:`interlace_gin.self_test`."""

import triton
import triton.language as tl

import interlace.language as il
from interlace_gin.language import gin_put, gin_sent, gin_wait


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
            gin_put(
                gin, landing, me * part_bytes, source, peer * part_bytes, nbytes, peer, me, group,
                peer,
            )
            if gin_wait(gin, peer, 1, peer, round, group):
                if gin_sent(gin, peer, 1, peer, round, group):
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
    came = gin_wait(gin, signal, 1, peer, 0, group)
    tl.store(arrived, came.to(tl.int32))
