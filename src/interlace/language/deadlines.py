"""Deadlines: waits that end when a peer does not come, and the record that they leave for the host.

The first wait of a rank that expires sets the group's broken flag and writes a record. Other waits
of the rank see the flag and end, too; the host reads the record and raises ``PeerTimeoutError``.
"""

import triton
import triton.language as tl

from interlace.comm.runtime import context
from interlace.comm.runtime.interpreter import interpreting
from interlace.language._instructions import clock_ns, num_threads, pause
from interlace.language.addresses import rank

# Looks at a signal between two looks at the clock and at the broken flag, which cost more.
LOOKS_PER_CHECK = tl.constexpr(4 if interpreting() else 128)
LATE = tl.constexpr(context.LATE)
# Greater than every rank: the start of a minimum over late ranks.
NO_RANK = tl.constexpr(1 << 30)
HIGHEST_INT32 = tl.constexpr(2147483647)
# Whether a wait for values may name its own rank as late. On a GPU, the program that owes them may
# be waiting for a peer, and that peer is late. The interpreter runs programs one after another.
NAMES_ITSELF = tl.constexpr(interpreting())

_DEADLINE_NS = tl.constexpr(context.DEADLINE_NS)
_OPERATOR = tl.constexpr(context.OPERATOR)
_BROKEN_ADDRESS = tl.constexpr(context.BROKEN_ADDRESS)
_RECORD_ADDRESS = tl.constexpr(context.RECORD_ADDRESS)
_RECORD_CODE = tl.constexpr(context.RECORD_CODE)
_RECORD_OPERATOR = tl.constexpr(context.RECORD_OPERATOR)
_RECORD_PEER = tl.constexpr(context.RECORD_PEER)
_RECORD_SLICE = tl.constexpr(context.RECORD_SLICE)
_RECORD_WANTED = tl.constexpr(context.RECORD_WANTED)
_RECORD_SEEN = tl.constexpr(context.RECORD_SEEN)
_RECORD_OTHER_CALL = tl.constexpr(context.RECORD_OTHER_CALL)
_EPOCH_MASK = tl.constexpr(context.EPOCH_MASK)
_MISCOUNTED = tl.constexpr(context.MISCOUNTED)


@triton.jit
def _thread_lanes():
    """Make an int32 tile with one element for each thread of the program."""
    return tl.arange(0, num_threads())


@triton.jit
def start_of_wait(start):
    """Return the time at which a wait began, in ns: ``start``, or the time now if ``start`` is 0.

    A wait asks the first time that it checks its deadline, so a wait that is soon over reads no
    clock.
    """
    return tl.where(start == 0, tl.max(clock_ns(_thread_lanes()), 0), start)


@triton.jit
def has_expired(start, group):
    """Tell if a wait that began at ``start`` (ns) must end: 1 if so, else 0 (int32 scalar).

    A wait ends when its deadline has passed, and when another wait of this rank has expired.
    """
    # Each thread reads clock and flag at its own time, and threads that disagree would take
    # different branches. The maximum over all threads gives each of them the same answer.
    lanes = _thread_lanes()
    flag = tl.load(group[0] + _BROKEN_ADDRESS).to(tl.pointer_type(tl.int32))
    broken = tl.load(flag + lanes * 0, volatile=True)
    deadline = tl.load(group[0] + _DEADLINE_NS + lanes * 0, volatile=True).to(tl.int64)
    return tl.max(((broken != 0) | (clock_ns(lanes) - start > deadline)).to(tl.int32), 0)


@triton.jit
def after_look(absent_count, looks, start, expired, group):
    """End a look at what a wait awaits: pause if something is absent, and see now and then whether
    the wait must end.

    Args:
        absent_count: Number of elements that were absent (int32 scalar).
        looks: Number of looks before this one.
        start, expired: As the last call has returned them; 0 at first.
        group: The value of :func:`join`.

    Returns:
        The same four for the next look; ``absent_count`` is 0 if there is to be none.
    """
    looks += 1
    if absent_count > 0:
        pause(looks)
    if (absent_count > 0) & (looks % LOOKS_PER_CHECK == 0):
        start = start_of_wait(start)
        expired = has_expired(start, group)
    return absent_count * (1 - expired), looks, start, expired


@triton.jit
def report(group, peer, slice, awaited, seen, CODE: tl.constexpr):
    """Record a failure if it is the first: a flag for this rank's programs, a record for the host.

    Args:
        group: The value of :func:`join`.
        peer: int32 scalar: the rank that did not do its part.
        slice: int32 scalar: the slice that was awaited.
        awaited: int32 scalar: the awaited stamp or number.
        seen: int32 scalar: the stamp or number that was there instead.
        CODE: Kind of failure, of ``interlace.comm.runtime.context``.
    """
    broken = tl.load(group[0] + _BROKEN_ADDRESS).to(tl.pointer_type(tl.int32))
    record = tl.load(group[0] + _RECORD_ADDRESS).to(tl.pointer_type(tl.int32))
    # The first program to report may have waited for something that the peer never sends, while
    # only another program's wait shows that the peer made a different call.
    if (CODE == LATE) & (seen != awaited) & (((seen ^ awaited) & _EPOCH_MASK) == 0):
        tl.store(record + _RECORD_OTHER_CALL, 1)
    # One program wins the flag, so one program writes the rest of the record.
    if tl.atomic_cas(broken, 0, 1, sem="relaxed", scope="gpu") == 0:
        tl.store(record + _RECORD_OPERATOR, tl.load(group[0] + _OPERATOR).to(tl.int32))
        tl.store(record + _RECORD_PEER, peer)
        tl.store(record + _RECORD_SLICE, slice)
        tl.store(record + _RECORD_WANTED, awaited)
        tl.store(record + _RECORD_SEEN, seen)
        # The code says that the record is complete, so it is written last, with release order. The
        # barrier makes the stores of the other threads part of what that thread releases.
        tl.debug_barrier()
        tl.atomic_xchg(record + _RECORD_CODE, CODE, sem="release", scope="sys")


@triton.jit
def is_broken(group):
    """Return 1 if a wait of this rank has expired, or the host has broken the group; else 0.

    All threads of the program have the same answer (int32 scalar).
    """
    flag = tl.load(group[0] + _BROKEN_ADDRESS).to(tl.pointer_type(tl.int32))
    return tl.max((tl.load(flag + _thread_lanes() * 0, volatile=True) != 0).to(tl.int32), 0)


@triton.jit
def report_late(group, peer, slice, awaited, seen):
    """Record for the host that a peer's data are of another call; breaks the group.

    Args:
        group: The value of :func:`join`.
        peer: int32 scalar: the rank that sent them.
        slice: int32 scalar: the slice that was awaited.
        awaited: int32 scalar: the stamp that the data should carry.
        seen: int32 scalar: the stamp that they carry.
    """
    report(group, peer, slice, awaited, seen, LATE)


@triton.jit
def report_miscount(group, piece, wanted, seen):
    """Record for the host that a kernel has counted a wrong number of tiles; breaks the group.

    Args:
        group: The value of :func:`join`.
        piece: int32 scalar: the piece of the output.
        wanted: int32 scalar: the number of tiles that the piece has.
        seen: int32 scalar: the number of tiles that were counted.
    """
    report(group, rank(group), piece, wanted, seen, _MISCOUNTED)


@triton.jit
def nan_unless(arrived, value):
    """Return ``value`` if ``arrived`` is 1, and NaN if it is 0: a failed wait must yield no number.

    Args:
        arrived: int32 scalar.
        value: Tile of a floating-point dtype.
    """
    # By way of float32, because the interpreter of Triton 3.6 has no constants of bfloat16.
    nan = tl.full(value.shape, float("nan"), tl.float32).to(value.dtype)
    return tl.where(arrived + tl.zeros(value.shape, tl.int32) > 0, value, nan)


@triton.jit
def fill_nan(target, count):
    """Fill memory of this rank with NaN: a result that could not be computed.

    Args:
        target: Pointer to the first element, of a floating-point dtype.
        count: Number of elements (int scalar).
    """
    lanes = tl.arange(0, 1024)
    for start in range(0, count, 1024):
        nan = tl.full([1024], float("nan"), tl.float32).to(target.dtype.element_ty)
        tl.store(target + start + lanes, nan, mask=start + lanes < count)
