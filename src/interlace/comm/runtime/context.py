"""Lay out the int64 tensor that describes a group to a kernel, the kernel's ``ctx`` argument.

The host writes the tensor once per operator, and ``interlace.language`` reads it. It lies in device
memory and is not passed as arguments, so that captured graphs and compiled kernels do not depend on
the rank. The module also gives the layout of the record of the first failure, and that of the
events that kernels record for a trace.
"""

from __future__ import annotations

from typing import Final

RANK: Final = 0
WORLD_SIZE: Final = 1
STRIDE_BYTES: Final = 2
DEADLINE_NS: Final = 3
OPERATOR: Final = 4
BROKEN_ADDRESS: Final = 5  # int32 in this device's memory: 1 once this rank has failed
RECORD_ADDRESS: Final = 6  # int32[RECORD_LENGTH] that the host can read at any time
SCRATCH_ADDRESS: Final = 7  # int32 in this device's memory: written by fences, never read
LENGTH: Final = 8

# A context of uint64 instead of int64 makes kernels record events: Triton compiles a kernel for the
# dtype of its arguments, so a kernel that records nothing has no instruction for it. Such a context
# is longer by two fields.
RINGS_ADDRESS: Final = 8  # int64[programs, RING_LANES, 1 + RING_EVENTS, 2] in this device's memory
RING_PROGRAMS: Final = 9  # programs that there are rings for
RECORDING_LENGTH: Final = 10

# A program has rings of its own, one for each of its first threads: threads write what they record
# without waiting for one another. The first 16 bytes of a ring count its events; an event has two
# numbers, the time in ns and what happened: kind (bits 0 to 7), peer (8 to 15), SM (16 to 31), and
# a number that depends on the kind (32 to 63).
RING_LANES: Final = 8
RING_EVENTS: Final = 256  # a power of two; later events overwrite the first ones
EVENT_BYTES: Final = 16
RING_BYTES: Final = (1 + RING_EVENTS) * EVENT_BYTES

# Kinds of events, and what their number is.
BEGIN: Final = 1  # a program has joined the group: 0
TILE: Final = 2  # it begins to compute: the tile
COMPUTED: Final = 3  # it has computed: the tile
PUT: Final = 4  # it has stored to a peer: bytes
SIGNAL: Final = 5  # it has set a signal: the signal's address in rank 0's copy, in words of 4 bytes
WAIT: Final = 6  # it begins to wait: the slice
ARRIVED: Final = 7  # a wait for a signal is over: the signal's address, as of SIGNAL
UNPACKED: Final = 8  # a wait for words that need no signal is over: the slice
MARK: Final = 9  # what the kernel's author wants to see: any number
KINDS: Final = {"tile": TILE, "computed": COMPUTED, "mark": MARK}  # those of il.record

# In place of a peer's number.
SEVERAL: Final = 254  # the elements of a tile go to, or come from, different ranks
NOBODY: Final = 255

# The record of the first failure. A kernel writes CODE last, so that the host never reads a code
# whose other fields are missing; only OTHER_CALL may be added by waits that expire later.
RECORD_CODE: Final = 0  # LATE, MISCOUNTED or INTERRUPTED; 0 while nothing has failed
RECORD_OPERATOR: Final = 1
RECORD_PEER: Final = 2
RECORD_SLICE: Final = 3
RECORD_WANTED: Final = 4
RECORD_SEEN: Final = 5
RECORD_OTHER_CALL: Final = 6  # 1 if any wait of this rank saw the awaited epoch of another call
RECORD_LENGTH: Final = 8

LATE: Final = 1  # a wait has expired
# A kernel has counted a wrong number of tiles: SLICE is a piece; WANTED and SEEN count tiles.
MISCOUNTED: Final = 2
# The host was interrupted between agreeing on a call and launching all of it; no kernel writes it.
INTERRUPTED: Final = 3

EPOCH_BITS: Final = 24  # above them, an epoch carries the mark of its call
EPOCH_MASK: Final = (1 << EPOCH_BITS) - 1
