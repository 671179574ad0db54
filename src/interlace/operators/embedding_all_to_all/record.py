"""What kernels read about each table and where signals lie: numbers that host and device must agree
on.
"""

from __future__ import annotations

from typing import Final

# One record a table, int64 [tables, FIELDS] on the device.
ADDRESS: Final = 0  # of the table's first row
STRIDE: Final = 1  # elements between two rows
WIDTH: Final = 2
COLUMN: Final = 3  # of the output, where the table's columns start
OWN_COLUMN: Final = 4  # the same among this rank's columns
# Rows of the tables before this one: a row's number among all rows of this rank
FIRST_KEY: Final = 5
# Bytes from the call's target (0 in updates) to what the backward pass writes; -1 for nothing
TARGET: Final = 6
TARGET_STRIDE: Final = 7
STATE: Final = 8  # address of Adagrad's state
FIELDS: Final = 9

MAX_RANKS: Final = 8

# int32 signals of a rank, the same at all protocols; what follows HEADER depends on the protocol.
# Sets take turns by the epoch's parity.
GRANTED: Final = 0  # [set][source]: the buffer of that rank may be written. Kernels leave out the 0
DONE: Final = 2 * MAX_RANKS  # [set][source]: everything of that rank is here
COUNTER: Final = 4 * MAX_RANKS  # programs that have finished their remote work; local
HEADER: Final = 8 * MAX_RANKS

MAX_TABLES: Final = 4096
"""Tables of a rank, at most. Under the backward pass HEADER is followed by a local counter a table,
then by a signal for each table and source.
"""

# The backward pass's local counters: one of tickets, then two per run from here on. The distance
# puts them in another cache line, as well aligned.
ARRIVALS: Final = 32
