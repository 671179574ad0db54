"""Lay out the int64 tensor that describes a group to a kernel, the kernel's ``ctx`` argument.

The host writes the tensor once per operator, and ``interlace.language`` reads it. It lies in device
memory and is not passed as arguments, so that captured graphs and compiled kernels do not depend on
the rank. The module also gives the layout of the record of the first failure.
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
