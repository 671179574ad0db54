"""Where signals and routes lie in the kernels around a product: numbers that host and device must agree on."""

from __future__ import annotations

from typing import Final

MAX_RANKS: Final = 8

# int32 signals of a rank; what follows HEADER depends on the operator.
GRANTED: Final = 0  # [source]: the buffer of that rank may be written, or its rows read. Kernels leave out the 0
DONE: Final = MAX_RANKS  # [source]: everything of that rank is here
COUNTER: Final = 2 * MAX_RANKS  # programs that have sent all their tiles; local
GRANTS: Final = 3 * MAX_RANKS  # [source]: which of its buffers that rank has granted; no signals
HEADER: Final = 4 * MAX_RANKS

# A route, int64: rows that go to, or come from, one rank.
FIRST_ROW: Final = 0  # of the product
ROWS: Final = 1
PLACE: Final = 2  # of the first row, among that rank's rows
ROUTE: Final = 3
