"""Vectors of tables, outputs and gradients: their addresses, and the records that kernels read."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from interlace.operators.embedding_all_to_all import layout

_NAMES = layout.TableRecord._fields
FIELDS = tl.constexpr(len(_NAMES))
ADDRESS = tl.constexpr(_NAMES.index("address"))
STRIDE = tl.constexpr(_NAMES.index("stride"))
TABLE_WIDTH = tl.constexpr(_NAMES.index("width"))
COLUMN = tl.constexpr(_NAMES.index("column"))
OWN_COLUMN = tl.constexpr(_NAMES.index("own_column"))
FIRST_KEY = tl.constexpr(_NAMES.index("first_key"))
TARGET = tl.constexpr(_NAMES.index("target"))
TARGET_STRIDE = tl.constexpr(_NAMES.index("target_stride"))
STATE = tl.constexpr(_NAMES.index("state"))
MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
DONE = tl.constexpr(layout.DONE)
COUNTER = tl.constexpr(layout.COUNTER)
TICKETS = tl.constexpr(layout.TICKETS)
HEADER = tl.constexpr(layout.HEADER)
MAX_TABLES = tl.constexpr(layout.MAX_TABLES)


class Vectors(NamedTuple):
    """The constants that say how kernels load and store vectors.

    Attributes:
        table_dtype: Triton's name of the tables' dtype, such as ``"bf16"``.
        out_dtype: That of the output's dtype, which is also that of the gradients that travel.
        width: The lanes of a vector, a power of two.
        full: Whether every table is as wide as that.
        align: The elements, a power of two, that all addresses and strides are multiples of.
    """

    table_dtype: Any
    out_dtype: Any
    width: Any
    full: Any
    align: Any


@triton.jit
def vectors_at(address, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Turn integer addresses into pointers; ``ALIGN`` elements from each one are aligned."""
    BYTES: tl.constexpr = ALIGN * (DTYPE.primitive_bitwidth // 8)
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(DTYPE)), BYTES)


@triton.jit
def samples_of(rank, B, chunk):
    """Return the number of samples of a rank: ``chunk``, or fewer for the last ranks."""
    return tl.minimum(chunk, tl.maximum(B - rank * chunk, 0))
