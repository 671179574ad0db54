"""The positions of signals and routes, as kernels read them; ``layout`` says what they are."""

import triton.language as tl

from interlace.gemm.kernels import layout

MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
DONE = tl.constexpr(layout.DONE)
GRANTS = tl.constexpr(layout.GRANTS)
COUNTER = tl.constexpr(layout.COUNTER)
TICKETS = tl.constexpr(layout.TICKETS)
HEADER = tl.constexpr(layout.HEADER)
FIRST_ROW = tl.constexpr(layout.FIRST_ROW)
ROWS_SENT = tl.constexpr(layout.ROWS)
PLACE = tl.constexpr(layout.PLACE)
ROUTE = tl.constexpr(layout.ROUTE)
