"""One-sided transfers and their order: put, get, fence, signal, wait and barrier.

Every primitive works on the group's memory: ``ptr`` addresses rank 0's copy, and ``peer`` chooses
whose copy is meant. ``group`` is the value of :func:`interlace.language.join`. The memory model is
in ``README.md``.
"""

import triton
import triton.language as tl

from interlace.comm.runtime import context
from interlace.language._instructions import (
    fence_system, load_acquire, num_threads, pause, records, require_memory, require_peers,
    signal_peer, store_to_peer,
)
from interlace.language.addresses import peer_pointer, rank, require_pointer
from interlace.language.deadlines import (
    HIGHEST_INT32, LATE, LOOKS_PER_CHECK, NO_RANK, has_expired, report, start_of_wait,
)
from interlace.language.epochs import EPOCH_MASK, in_turn, unmarked
from interlace.language.recording import (
    ARRIVED, STORES_AT_ONCE, WAIT, append_put, append_signal, append_wait,
)
from interlace.language.sizes import ceil_div, next_power_of_2

_SCRATCH_ADDRESS = tl.constexpr(context.SCRATCH_ADDRESS)
# A signal may be a call or two ahead of the rank that waits for it. Where epochs wrap, the next one
# is three more, so a signal has arrived if its number is 0 to 3 above the awaited one.
_ACCEPTED_EPOCHS = tl.constexpr(4)
_RELEASE = tl.constexpr("release")


# One-sided transfers


@triton.jit
def put(ptr, value, peer, group, mask=None):
    """Store a tile in ``peer``'s copy of ``ptr``.

    The store is relaxed: it may arrive after later stores, unless a :func:`signal` or a
    :func:`fence` orders it. The program does not wait for it.

    Args:
        ptr: Tile of pointers (rank 0's copy).
        value: Tile of the shape of ``ptr``.
        peer: int32 scalar, or a tile: then each element goes to its own peer.
        group: The value of :func:`join`.
        mask: Elements outside it are not stored.
    """
    require_peers("put", peer, mask, group)
    target = peer_pointer(ptr, peer, group)
    require_memory("put", target, peer, mask, group)
    if records(group) and STORES_AT_ONCE:
        append_put(value, peer, group)
    store_to_peer(target, value, peer, rank(group), mask)
    if records(group) and not STORES_AT_ONCE:
        append_put(value, peer, group)


@triton.jit
def get(ptr, peer, group, mask=None, other=None):
    """Load a tile from ``peer``'s copy of ``ptr``.

    The load is relaxed, and usually comes after a :func:`wait` for the data.

    Args:
        ptr: Tile of pointers (rank 0's copy).
        peer: int32 scalar, or a tile that broadcasts with ``ptr``.
        group: The value of :func:`join`.
        mask: Elements outside it are ``other``.
        other: Value of the elements outside the mask.
    """
    require_peers("get", peer, mask, group)
    source = peer_pointer(ptr, peer, group)
    require_memory("get", source, peer, mask, group)
    # The first-level cache is not coherent: it may hold the memory as it was before the peer's put.
    return tl.load(source, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def fence(group):
    """Order all earlier puts of this program before all its later ones.

    The order is acquire-release at system scope, for all threads of the program.
    """
    # A fence orders one thread's stores. The barrier before it brings every thread's puts into the
    # past of each fence, and the barrier after it keeps any thread from putting before all fences.
    tl.debug_barrier()
    fence_system(tl.load(group[0] + _SCRATCH_ADDRESS).to(tl.pointer_type(tl.int32)))
    tl.debug_barrier()


# Signals


@triton.jit
def signal(ptr, epoch, peer, group, mask=None, ORDER: tl.constexpr = _RELEASE):
    """Set the int32 signal ``ptr`` on ``peer`` to ``epoch``.

    A signal has one writer, which sets it again only once its reader has seen it; signals that are
    set in every call therefore come in two sets (:func:`in_turn`).

    Args:
        ptr: Pointer (rank 0's copy), or a tile of them: several signals at once.
        epoch: int32 scalar: the stamp or the number that the peer waits for.
        peer: int32 scalar, or a tile that broadcasts with ``ptr``.
        group: The value of :func:`join`.
        mask: Signals outside it are not set.
        ORDER: ``"release"`` (system scope): a rank that has waited for the signal sees every
            earlier put of this program, by any of its threads. ``"relaxed"``: no order.
    """
    _require_signals(ptr)
    require_peers("signal", peer, mask, group)
    target = peer_pointer(ptr, peer, group)
    require_memory("signal", target, peer, mask, group)
    # Recorded first: a peer could see the signal before the record of it had a time.
    if records(group):
        append_signal(ptr, peer, mask, group)
    signal_peer(target, epoch, peer, rank(group), mask, ORDER)


@triton.jit
def put_signal(ptr, value, signal_ptr, epoch, peer, group, mask=None):
    """Store a tile in ``peer``'s copy of ``ptr``, and then set a signal there with release order.

    Args:
        ptr, value, mask: As :func:`put` takes them.
        signal_ptr: Pointer to one int32 signal (rank 0's copy).
        epoch: int32 scalar: the stamp or the number that the peer waits for.
        peer: int32 scalar.
        group: The value of :func:`join`.
    """
    put(ptr, value, peer, group, mask)
    # The signal must follow the put: its release covers only stores that this program has made
    # before, and a peer that sees the signal reads the data at once.
    signal(signal_ptr, epoch, peer, group)


@triton.jit
def wait(ptr, epoch, peer, slice, group, mask=None):
    """Wait until this rank's signals ``ptr`` have reached ``epoch``: acquire, system scope.

    A signal has reached ``epoch`` if its mark is that of ``epoch`` and its number is that of
    ``epoch`` or of one of the next calls. All threads of the program may then load what the peers
    have put before they signalled.

    Args:
        ptr: 1-D int32 tile of signals (rank 0's copy, as always).
        epoch: int32 scalar: the stamp or the number that is awaited.
        peer: int32 scalar, if one rank sets all the signals, or a tile of the shape of ``ptr``, the
            rank that sets each signal. Only the error needs it: the signals are always this rank's.
        slice: int32 scalar: number of the awaited slice, for the error.
        group: The value of :func:`join`.
        mask: bool scalar, or a tile of the shape of ``ptr``; signals outside it are not awaited.

    Returns:
        True once the signals have arrived (bool scalar). False after the deadline, or once the
        group is broken: the program must not use the awaited data, and should end.
    """
    require_tile_of_signals(ptr)
    lanes = tl.arange(0, ptr.shape[0])
    peer = peer + lanes * 0
    # A scalar becomes a tile first: the interpreter turns it into integers when it meets a tile.
    mask = lanes >= 0 if mask is None else (mask + lanes * 0) != 0
    require_peers("wait", peer, mask, group)
    # A tile that is smaller than the program is held several times over, each copy loaded by
    # another thread, and while signals arrive the copies differ. Copies get a dimension of their
    # own: the sum over it decides, so that every thread has the same answer (packed.py does so,
    # too).
    COPIES: tl.constexpr = ceil_div(num_threads(), ptr.shape[0])
    copy = tl.zeros([ptr.shape[0], COPIES], tl.int32) + tl.arange(0, COPIES)[None, :]
    own = peer_pointer(ptr, rank(group), group)
    require_memory("wait", own, rank(group), mask, group)
    signals = own[:, None] + copy * 0
    awaited = mask[:, None] & (copy >= 0)
    if records(group):
        append_wait(WAIT, peer, slice, mask, group)
    late = awaited & is_behind(load_acquire(signals, awaited), epoch)
    behind = tl.sum(tl.ravel(late.to(tl.int32)))
    arrived = 1
    looks = 0
    start = tl.zeros([], tl.int64)
    while behind > 0:
        pause(looks)
        # A load with acquire order empties the first-level cache, under the programs that still
        # compute. So looks are volatile loads, and one acquire follows when the signals are there.
        seen = tl.load(signals, mask=awaited, other=0, volatile=True)
        late = awaited & is_behind(seen, epoch)
        behind = tl.sum(tl.ravel(late.to(tl.int32)))
        if behind == 0:
            load_acquire(signals, awaited)
        looks += 1
        if (behind > 0) & (looks % LOOKS_PER_CHECK == 0):
            start = start_of_wait(start)
            if has_expired(start, group) > 0:
                first = tl.min(tl.ravel(tl.where(late, peer[:, None] + copy * 0, NO_RANK)))
                of_first = late & (peer[:, None] + copy * 0 == first)
                earliest = tl.min(tl.ravel(tl.where(of_first, seen, HIGHEST_INT32)))
                report(group, first, slice, epoch, earliest, LATE)
                arrived = 0
                behind = 0
    # Each thread has acquired for itself. After the barrier, any thread may load what any other
    # thread's signal has announced.
    tl.debug_barrier()
    if records(group):
        append_wait(ARRIVED, peer, (ptr.to(tl.int64) >> 2).to(tl.int32), mask, group)
    return arrived > 0


@triton.jit
def require_tile_of_signals(ptr):
    """Refuse what is no 1-D tile of pointers to signals, which :func:`wait` takes."""
    tl.static_assert(
        len(ptr.shape) == 1,
        "wait: ptr must be a 1-D tile of signals; of a single signal, ptr + tl.arange(0, 1)",
    )
    _require_signals(ptr)


@triton.jit
def _require_signals(ptr):
    """Refuse pointers to another type: a word of another size would hold no signal."""
    require_pointer(ptr)
    tl.static_assert(
        ptr.dtype.element_ty == tl.int32,
        "signal, wait: ptr must point to int32 signals; see il.pointer",
    )


@triton.jit
def is_behind(seen, epoch):
    """Tell if a signal ``seen`` does not end a wait for ``epoch`` (bool tile).

    A signal that ends the wait has the mark of ``epoch``, and its number or one of the next three.
    Numbers wrap; marks do not.
    """
    differs_in_number = ((seen - epoch) & EPOCH_MASK) >= _ACCEPTED_EPOCHS
    differs_in_mark = unmarked(seen ^ epoch) != (seen ^ epoch)
    return differs_in_number | differs_in_mark


@triton.jit
def barrier(ptr, epoch, group, WORLD_SIZE: tl.constexpr):
    """Wait until the programs of this index on all ranks have come to this barrier.

    Puts that any of these programs made before are then visible to all of them.

    Args:
        ptr: ``2 * WORLD_SIZE`` int32 signals of this program index alone: two sets, which take
            turns by the epoch's parity, because a rank may be one barrier ahead of another.
        epoch: int32 scalar: the stamp or the number of this barrier; consecutive ones differ in
            parity.
        group: The value of :func:`join`.
        WORLD_SIZE: Number of ranks.

    Returns:
        True once all ranks have come; False after the deadline (bool scalar, as :func:`wait`).
    """
    peers = tl.arange(0, next_power_of_2(WORLD_SIZE))
    me = rank(group)
    is_peer = (peers < WORLD_SIZE) & (peers != me)
    ptr = in_turn(ptr, epoch, WORLD_SIZE)
    # Signal before waiting: if every rank waited first, none would ever signal.
    signal(ptr + me + tl.zeros_like(peers), epoch, peers, group, is_peer)
    return wait(ptr + peers, epoch, peers, tl.program_id(0), group, is_peer)
