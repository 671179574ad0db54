"""Grants of output buffers, and the end of sending: what kernels share that store rows straight
into their peers' memory.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.places import COUNTER, DONE, GRANTS, MAX_RANKS


class Turn(NamedTuple):
    """The signals of one call, of which a rank has two sets: it may be a call ahead of its peers.

    Attributes:
        me: This rank.
        peers, is_peer: All ranks, and which of them are others, as blocks.
        granted: This rank's signals ``[source]``: the source has granted a buffer.
        numbers: The buffers that they have granted, ``[source]``.
        done: This rank's signals ``[source]``: the source has sent everything.
    """

    me: Any
    peers: Any
    is_peer: Any
    granted: Any
    numbers: Any
    done: Any


class OutputBuffers(NamedTuple):
    """The buffers that every rank has for its output, at the same distances.

    Attributes:
        address: Rank 0's address of the first buffer.
        nbytes: Bytes from one buffer to the next.
    """

    address: Any
    nbytes: Any


@triton.jit
def turn_of(flags, epoch, me, WORLD_SIZE: tl.constexpr):
    """Return the signals of one call.

    Args:
        flags: Pointer to the operator's int32 signals.
    """
    peers, is_peer = il.other_ranks(me, WORLD_SIZE)
    return Turn(
        me, peers, is_peer, il.in_turn(flags, epoch, MAX_RANKS),
        il.in_turn(flags + GRANTS, epoch, MAX_RANKS), il.in_turn(flags + DONE, epoch, MAX_RANKS),
    )


@triton.jit
def grant_buffer(turn, own_buffer, stamp, group):
    """Tell every source which of this rank's buffers it may write in this call. By one program.

    A rank that is not in this call yet has granted nothing, so no peer writes to it.
    """
    mine = turn.me + tl.zeros_like(turn.peers)
    # The number comes first: the signal behind it releases it.
    number = own_buffer + tl.zeros_like(turn.peers)
    il.put(turn.numbers + mine, number, turn.peers, group, turn.is_peer)
    il.signal(turn.granted + mine, stamp, turn.peers, group, turn.is_peer)


@triton.jit
def granted_buffers(turn, own_buffer, stamp, group):
    """Wait for the grants of all peers. Return whether all came, and each rank's buffer."""
    # The wait acquires, and each grant's signal has released the buffer's number, so the load below
    # reads the number of this call.
    arrived = il.wait(turn.granted + turn.peers, stamp, turn.peers, 0, group, turn.is_peer)
    theirs = il.get(turn.numbers + turn.peers, turn.me, group, turn.is_peer, 0)
    return arrived, tl.where(turn.peers == turn.me, own_buffer, theirs)


@triton.jit
def end_sending(turn, flags, stamp, group):
    """Tell every peer that this rank has sent everything, once its last program has.

    Programs count themselves, so that a peer waits for one signal rather than for every program's.
    """
    counter = il.peer_pointer(flags + COUNTER, turn.me, group)
    # Each program counts itself with acquire-release order. So the puts of all programs are in the
    # past of the last one, and its signals release them all.
    if il.arrive_last(counter, tl.program_id(0), tl.num_programs(0)):
        signal_end(turn, stamp, group)


@triton.jit
def signal_end(turn, stamp, group):
    """Tell every peer that this rank has ended what the peer must wait for before its next call."""
    mine = turn.me + tl.zeros_like(turn.peers)
    il.signal(turn.done + mine, stamp, turn.peers, group, turn.is_peer)


@triton.jit
def own_output(buffers, own_buffer, me, group, dtype: tl.constexpr):
    """Return a pointer to the buffer that this rank has granted."""
    offset = own_buffer.to(tl.int64) * buffers.nbytes
    return il.pointer(buffers.address + offset + me * tl.multiple_of(group[2], 16), dtype)


@triton.jit
def await_senders(turn, stamp, group):
    """Wait until all peers have sent everything, and return whether they have."""
    # A peer signals after its last put. Once this wait has ended, nobody writes to this rank's
    # memory for this call any more.
    return il.wait(turn.done + turn.peers, stamp, turn.peers, 0, group, turn.is_peer)
