"""Local counters: which program of a launch comes last, and how many tiles of an output are there.
"""

import triton
import triton.language as tl

from interlace.comm.group import MAX_PROGRAMS

_UNITS = tl.constexpr(MAX_PROGRAMS)


@triton.jit
def arrive_last(counter, member, members):
    """Count this program in; true for the last of ``members`` programs that do (bool scalar).

    What any of them put or stored before it arrived is in the past of the last one
    (acquire-release, system scope), which may then signal on behalf of all.

    Nothing is reset: the members share out the same number of units in every round, so the counter
    stands at a multiple of that number between rounds, however many members the next one has.

    Args:
        counter: int32 in this rank's memory, zero at first, used by nothing else.
        member: this program's number among the members, from 0.
        members: how many there are in this round, at most ``MAX_PROGRAMS``.
    """
    share = (_UNITS - member + members - 1) // members
    tl.debug_barrier()  # an atomic by one thread does not cover the other threads' stores
    before = tl.atomic_add(counter, share, sem="acq_rel", scope="sys")
    tl.debug_barrier()
    return ((before + share) & (_UNITS - 1)) == 0


@triton.jit
def count(counter):
    """Add 1 to a counter of this rank: whoever sees it sees what this program has stored before
    (release, system scope).

    What copy engines wait for, once a tile of :class:`interlace.mapped.TriggeredTransfers` is
    complete. Tiles that were stored through a descriptor must be complete (:func:`complete_tiles`)
    before they are counted.

    Args:
        counter: pointer to one int32, plain memory of this rank.
    """
    tl.debug_barrier()  # an atomic by one thread does not cover the other threads' stores
    tl.atomic_add(counter, 1, sem="release", scope="sys")
