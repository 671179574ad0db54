"""The positions of signals and routes in the kernels around a product, on which host and device
must agree.
"""

from __future__ import annotations

from typing import Final

MAX_RANKS: Final = 8

# int32 signals of a rank; what follows HEADER depends on the operator. Sets take turns by the
# epoch's parity.
# [set][source]: the buffer of that rank may be written, or its rows read. Kernels leave out the 0
GRANTED: Final = 0
DONE: Final = 2 * MAX_RANKS  # [set][source]: everything of that rank is here
# [set][source]: which of its buffers that rank has granted; no signals
GRANTS: Final = 4 * MAX_RANKS
COUNTER: Final = 6 * MAX_RANKS  # programs that have sent all their tiles; local
TICKETS: Final = 7 * MAX_RANKS  # [set]: tiles that programs have drawn; local
HEADER: Final = 8 * MAX_RANKS

# A route, int64: rows that go to, or come from, one rank.
FIRST_ROW: Final = 0  # of the product
ROWS: Final = 1
PLACE: Final = 2  # of the first row, among that rank's rows
ROUTE: Final = 3
