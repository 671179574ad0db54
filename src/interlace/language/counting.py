"""Local counters: they find the last program of a launch, and count the tiles of an output."""

import triton
import triton.language as tl

from interlace.comm.groups.group import MAX_PROGRAMS

_UNITS = tl.constexpr(MAX_PROGRAMS)


@triton.jit
def arrive_last(counter, member, members):
    """Count this program in, and tell if it is the last of ``members`` programs (bool scalar).

    Puts and stores that any member made before it arrived are in the past of the last one
    (acquire-release, system scope), which may then signal on behalf of all.

    Args:
        counter: Pointer to one int32 of this rank, zero at first, used by nothing else.
        member: int32 scalar: this program's number among the members, from 0.
        members: int32 scalar: number of members in this round, at most ``MAX_PROGRAMS``.
    """
    # The counter is never reset. The members share out the same number of units in every round, so
    # between rounds it stands at a multiple of that number, whatever number of members comes next.
    share = (_UNITS - member + members - 1) // members
    # One thread makes the atomic operation, which does not cover the other threads' stores: hence
    # the barrier before it. After the second barrier, every thread may load the data that the one
    # thread has acquired.
    tl.debug_barrier()
    before = tl.atomic_add(counter, share, sem="acq_rel", scope="sys")
    tl.debug_barrier()
    return ((before + share) & (_UNITS - 1)) == 0


@triton.jit
def count(counter):
    """Add 1 to a counter of this rank, with release order at system scope.

    A reader that sees the new value sees everything that this program has stored before. Copy
    engines wait for such counters (:class:`interlace.mapped.TriggeredTransfers`). Tiles that were
    stored through a descriptor must be complete (:func:`complete_tiles`) before they are counted.

    Args:
        counter: Pointer to one int32, plain memory of this rank.
    """
    # One thread makes the atomic operation; the barrier brings the other threads' stores into its
    # past.
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="sys")
