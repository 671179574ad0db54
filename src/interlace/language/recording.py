"""Record what a program does and when, for a trace (``interlace.trace``).

Kernels record events if the context that they are launched with asks for it, which is known when
they are compiled (``interlace.comm.runtime.context``): without a trace nothing here becomes an instruction.
"""

import triton
import triton.language as tl

from interlace.comm.runtime import context
from interlace.comm.runtime.interpreter import interpreting
from interlace.language._instructions import (
    clock_ns, is_tile, kind_of_event, processor, records, tile_bytes,
)

_RINGS_ADDRESS = tl.constexpr(context.RINGS_ADDRESS)
_RING_PROGRAMS = tl.constexpr(context.RING_PROGRAMS)
WAIT, ARRIVED, UNPACKED = (
    tl.constexpr(context.WAIT), tl.constexpr(context.ARRIVED), tl.constexpr(context.UNPACKED)
)
NOBODY, SEVERAL = tl.constexpr(context.NOBODY), tl.constexpr(context.SEVERAL)
BEGIN = tl.constexpr(context.BEGIN)
_PUT, _SIGNAL = tl.constexpr(context.PUT), tl.constexpr(context.SIGNAL)
_RING_LANES, _EVENTS = tl.constexpr(context.RING_LANES), tl.constexpr(context.RING_EVENTS)
_EVENT_BYTES, _RING_BYTES = tl.constexpr(context.EVENT_BYTES), tl.constexpr(context.RING_BYTES)
# A put is recorded after its store was issued, which a GPU does not do before the values are
# computed. In the interpreter they are, and a peer may read what is stored before the next line.
STORES_AT_ONCE = tl.constexpr(interpreting())
_LOW_32_BITS = tl.constexpr(0xFFFFFFFF)


@triton.jit
def record(KIND: tl.constexpr, number, group):
    """Record that this program has come to a point of its work; a trace shows when.

    Without a trace it is no instruction. Puts, signals and waits record themselves; without any
    call of this function a trace knows when they happened, and nothing else.

    Args:
        KIND: ``"tile"``: the program begins to compute tile ``number``. ``"computed"``: it has
            computed it. ``"mark"``: anything else; the trace shows ``number``.
        number: int32 scalar.
        group: The value of :func:`join`.
    """
    tl.static_assert(
        KIND == "tile" or KIND == "computed" or KIND == "mark",
        "record: the kind of an event must be tile, computed or mark",
    )
    if records(group):
        append(tl.zeros([], tl.int32), kind_of_event(KIND), NOBODY, number, group)


@triton.jit
def append(lane, kind: tl.constexpr, peer, number, group):
    """Append an event to a ring of this program; see ``interlace.comm.runtime.context`` for the fields.

    Args:
        lane: int32: 0, or a tile that counts from 0: one event for each element, of which those
            below ``RING_LANES`` are recorded.
        peer, number: int32 scalars, or tiles of the shape of ``lane``.
    """
    # Each element of a tile belongs to one thread, which alone writes its ring. So a thread reads
    # the count that it wrote itself: from the first-level cache, and without an atomic operation.
    mask = lane < _RING_LANES
    ring = group[3] + lane.to(tl.int64) * _RING_BYTES
    counter = ring.to(tl.pointer_type(tl.int32))
    count = tl.load(counter, mask=mask, other=0)
    slot = 1 + (count & (_EVENTS - 1)).to(tl.int64)
    event = (ring + slot * _EVENT_BYTES).to(tl.pointer_type(tl.int64))
    low_bits = (lane * 0 + number).to(tl.int64) & _LOW_32_BITS
    peers = (lane * 0 + peer).to(tl.int64)
    tl.store(event, clock_ns(lane), mask=mask)
    tl.store(event + 1, (low_bits << 32) | (processor(lane) << 16) | (peers << 8) | kind, mask=mask)
    tl.store(counter, count + 1, mask=mask)


@triton.jit
def rings_of_program(ctx):
    """Return the address of this program's rings (int64 scalar), of a context that asks for them.
    """
    rings = tl.load(ctx + _RINGS_ADDRESS).to(tl.int64)
    # A kernel that is launched without ``comm.kernels.Launch`` may have more programs than rings.
    program = tl.program_id(0) % tl.load(ctx + _RING_PROGRAMS).to(tl.int32)
    return rings + program.to(tl.int64) * (_RING_LANES * _RING_BYTES)


@triton.jit
def append_put(value, peer, group):
    """Record that the tile ``value`` has been stored at ``peer``; masked elements count, too."""
    here = tl.zeros([], tl.int32)
    # A tile of peers would be an event per element.
    append(here, _PUT, SEVERAL if is_tile(peer) else peer, tile_bytes(value), group)


@triton.jit
def append_signal(ptr, peer, mask, group):
    """Record that the signals ``ptr`` have been set at ``peer``."""
    if is_tile(ptr):
        # Signals to all peers: one event for each.
        lanes = tl.arange(0, ptr.shape[0])
        to = lanes * 0 + peer
        if mask is not None:
            to = tl.where(mask, to, NOBODY)
        append(lanes, _SIGNAL, to, (ptr.to(tl.int64) >> 2).to(tl.int32), group)
    else:
        append(tl.zeros([], tl.int32), _SIGNAL, peer, (ptr.to(tl.int64) >> 2).to(tl.int32), group)


@triton.jit
def append_wait(kind: tl.constexpr, peer, number, mask, group):
    """Record that a wait for several peers begins or is over: an event for each that is awaited.

    Args:
        peer, number: int32 tiles, or scalars.
        mask: 1-D tile: the peers that are awaited.
    """
    lanes = tl.arange(0, mask.shape[0])
    append(lanes, kind, tl.where(mask, lanes * 0 + peer, NOBODY), number, group)
