"""Records of tables and the layout of signals: numbers that host and device must agree on."""

from __future__ import annotations

from typing import Final

# One record per table, int64 [tables, FIELDS] on the device.
ADDRESS: Final = 0  # address of the table's first row
STRIDE: Final = 1  # elements between two rows
WIDTH: Final = 2
COLUMN: Final = 3  # the column of the output at which the table's columns start
OWN_COLUMN: Final = 4  # the column at which they start among this rank's columns
# Rows of the tables before this one. Added to a row's index, it numbers all rows of this rank.
FIRST_KEY: Final = 5
# Bytes from the call's target (0 in updates) to the table's part that the backward pass writes; -1
# if the table is left alone.
TARGET: Final = 6
TARGET_STRIDE: Final = 7
STATE: Final = 8  # address of Adagrad's state
FIELDS: Final = 9

MAX_RANKS: Final = 8

# int32 signals of a rank, the same in all protocols; those after HEADER depend on the protocol.
# Sets take turns by the epoch's parity.
GRANTED: Final = 0  # [set][source]: the rank's buffer may be written; kernels omit the offset 0
DONE: Final = 2 * MAX_RANKS  # [set][source]: all data of the source have arrived
COUNTER: Final = 4 * MAX_RANKS  # number of programs that have finished their remote work; local
TICKETS: Final = 5 * MAX_RANKS  # [set]: tasks that programs have drawn; local
HEADER: Final = 8 * MAX_RANKS

MAX_TABLES: Final = 4096
"""Maximum number of tables per rank.

In the backward pass HEADER is followed by a local counter per table, then by a signal for each
table and source.
"""

# The backward pass's local counters: one of tickets, then two per run from here on. The distance
# puts them in another cache line, as well aligned.
ARRIVALS: Final = 32
