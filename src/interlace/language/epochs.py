"""Epochs: the numbers of calls, by which signals and packed words say which call they belong to.

An epoch has 24 bits, and a stamp is the epoch with the mark of its call in the 8 bits above. Two
numbers are never used: 0, which stands for memory that was never written, and ``2**24 - 1``, the
number before it.
"""

import triton
import triton.language as tl

from interlace.comm.runtime import context
from interlace.comm.groups.group import MAX_PROGRAMS
from interlace.comm.runtime.interpreter import interpreting
from interlace.language._instructions import require_grid
from interlace.language.addresses import join, peer_pointer, rank

EPOCH_MASK = tl.constexpr(context.EPOCH_MASK)

_MAX_PROGRAMS = tl.constexpr(MAX_PROGRAMS)
# Epoch cells, and signals to be cleared, that a program handles at a time: one per thread on a GPU,
# and all of them in the interpreter, where every step costs a step of Python.
_LANES = tl.constexpr(MAX_PROGRAMS if interpreting() else 128)
# Number of calls between two clearings of old signals, and the age in calls at which a signal is
# cleared. Both are far more than one rank can be behind another, and together far less than the
# number of calls after which an epoch comes again.
_CLEARING_PERIOD = tl.constexpr(1 << (context.EPOCH_BITS - 2))
_OLD_AGE = tl.constexpr(1 << (context.EPOCH_BITS - 4))


@triton.jit
def next_epoch(epochs):
    """Read the number of this call from this program's epoch cell.

    The load takes one trip to memory, as :func:`join` does. Call both once the kernel's first loads
    are under way; then they cost no time.

    The grid has one dimension and at most ``MAX_PROGRAMS`` programs, each of which has a cell; the
    CPU backend refuses another one.

    Args:
        epochs: int32 pointer to the operator's ``MAX_PROGRAMS`` epoch cells.

    Returns:
        The epoch (int32 scalar): 1 to ``2**24 - 2``, and then 1 again.
    """
    require_grid(_MAX_PROGRAMS)
    return tl.load(epochs + tl.program_id(0), volatile=True)


@triton.jit
def previous_epoch(epoch):
    """Return the number of the call before this one (int32 scalar).

    Before the first call comes 0, the value of a signal that was never set.
    """
    return (epoch - tl.where(((epoch - 1) & EPOCH_MASK) == 0, 3, 1)) & EPOCH_MASK


@triton.jit
def following_epoch(epoch):
    """Return the number of the call after this one (int32 scalar); 1 after an ``epoch`` of 0."""
    # Where numbers wrap, two are left out. A packed word of two values carries the number alone,
    # which must differ from 0, the content of memory that was never written. Leaving out a second
    # number keeps odd and even calls alternating, by which halves and sets of signals take turns.
    return (epoch + tl.where(((epoch + 2) & EPOCH_MASK) == 0, 3, 1)) & EPOCH_MASK


@triton.jit
def mark(epoch, call):
    """Make the stamp of a call: the epoch in the low 24 bits, the call's mark in the high 8.

    Signals and packed words carry the stamp. Ranks that make different calls then wait for each
    other until the deadline, instead of taking each other's data for their own.

    Args:
        epoch: int32 scalar, the number of the call.
        call: int32 scalar: the value of ``Group.agree`` for the call's arguments (its high 8 bits).

    Returns:
        The stamp (int32 scalar).
    """
    return (epoch & EPOCH_MASK) | call


@triton.jit
def enter(epochs, ctx, call):
    """Begin a call: what every kernel that signals and waits needs to know of it.

    Args:
        epochs: int32 pointer to the operator's ``MAX_PROGRAMS`` epoch cells.
        ctx: The group's context; see :func:`join`.
        call: int32 scalar: the value of ``Group.agree`` for the call's arguments.

    Returns:
        ``(epoch, stamp, group, rank)``, as :func:`next_epoch`, :func:`mark`, :func:`join` and
        :func:`rank` return them.
    """
    epoch = next_epoch(epochs)
    stamp = mark(epoch, call)
    group = join(ctx)
    return epoch, stamp, group, rank(group)


@triton.jit
def unmarked(stamp):
    """Return the epoch of a stamp without its mark; as a signal, it ends no call's wait."""
    return stamp & EPOCH_MASK


@triton.jit
def in_turn(ptr, epoch, count):
    """Return a pointer to this call's set of signals: the first of two sets in even calls.

    Args:
        ptr: Pointer to two sets of ``count`` signals (or numbers), one after the other.
        epoch: int32 scalar: the epoch or the stamp of this call.
        count: Number of signals in one set.
    """
    # A rank may be one call ahead of another, and then sets its signals of the next call before the
    # other rank has seen those of this call. With one set, it would overwrite them.
    return ptr + (epoch & 1) * count


@triton.jit
def advance_epoch(epochs, epoch):
    """Write the number of the next call to this program's epoch cells; the kernel's last action.

    Args:
        epochs: int32 pointer to the operator's ``MAX_PROGRAMS`` epoch cells.
        epoch: int32 scalar: the number of this call.
    """
    # The programs of a launch share out all cells, so that a later launch with any grid finds all
    # cells equal. A program writes only cells of its own index, modulo the number of programs, so
    # no program can see its cell change before it has read it: neither an atomic operation nor a
    # second launch is needed.
    following = following_epoch(epoch)
    programs = tl.num_programs(0)
    for first in range(tl.program_id(0), _MAX_PROGRAMS, programs * _LANES):
        cells = first + programs * tl.arange(0, _LANES)
        tl.store(epochs + cells, following, mask=cells < _MAX_PROGRAMS)


@triton.jit
def clear_old(ptr, count, epoch, group):
    """Set this rank's signals that are older than ``2**20`` calls to 0, once every ``2**22`` calls.

    Call it at the end of every kernel whose signals only some calls set. In all other calls it
    costs a comparison.

    Args:
        ptr: Pointer to int32 signals or int64 packed words (rank 0's copy, as always); no counters
            may be among them.
        count: Number of signals (int32 scalar); the programs of a launch share them out.
        epoch: int32 scalar: the number of this call.
        group: The value of :func:`join`.
    """
    # Epochs come again after 2**24 calls. A signal that was last set exactly as long ago would
    # then pass for a signal of this call.
    if (epoch & (_CLEARING_PERIOD - 1)) == _CLEARING_PERIOD - 2:
        local = peer_pointer(ptr, rank(group), group)
        lanes = tl.arange(0, _LANES)
        for first in range(tl.program_id(0) * _LANES, count, tl.num_programs(0) * _LANES):
            signals = local + tl.minimum(first + lanes, count - 1)
            seen = tl.load(signals, volatile=True)
            # A signal that is a call or two ahead of this one has nearly the highest age.
            age = (epoch - seen.to(tl.int32)) & EPOCH_MASK
            is_old = (age >= _OLD_AGE) & (age < EPOCH_MASK - _OLD_AGE)
            # Compare-and-swap keeps a signal that a peer sets between the load and this store.
            tl.atomic_cas(signals, seen, tl.where(is_old, 0, seen), sem="relaxed", scope="sys")
