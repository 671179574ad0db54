"""What a kernel must know of its group: an int64 tensor that every kernel gets as its ``ctx``
argument.

The host writes it once per operator; ``interlace.language`` reads it. Kept in device memory rather
than passed as arguments, so that captured graphs and compiled kernels do not depend on the rank.
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

# The record of the first failure. CODE is written last.
RECORD_CODE: Final = 0  # LATE, MISCOUNTED or INTERRUPTED; 0 while all is well
RECORD_OPERATOR: Final = 1
RECORD_PEER: Final = 2
RECORD_SLICE: Final = 3
RECORD_WANTED: Final = 4
RECORD_SEEN: Final = 5
RECORD_LENGTH: Final = 8

LATE: Final = 1  # a wait has expired
# A kernel has counted other than it should: SLICE is a piece; WANTED and SEEN are tiles
MISCOUNTED: Final = 2
# The host was interrupted between agreeing on a call and launching all of it; no kernel writes this
INTERRUPTED: Final = 3

EPOCH_BITS: Final = 24  # above them, an epoch carries the mark of its call
EPOCH_MASK: Final = (1 << EPOCH_BITS) - 1
