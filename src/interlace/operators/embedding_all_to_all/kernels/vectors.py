"""Vectors of tables, outputs and gradients: their addresses, and the records that kernels read."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from interlace.operators.embedding_all_to_all import record

FIELDS = tl.constexpr(record.FIELDS)
ADDRESS = tl.constexpr(record.ADDRESS)
STRIDE = tl.constexpr(record.STRIDE)
TABLE_WIDTH = tl.constexpr(record.WIDTH)
COLUMN = tl.constexpr(record.COLUMN)
OWN_COLUMN = tl.constexpr(record.OWN_COLUMN)
FIRST_KEY = tl.constexpr(record.FIRST_KEY)
TARGET = tl.constexpr(record.TARGET)
TARGET_STRIDE = tl.constexpr(record.TARGET_STRIDE)
STATE = tl.constexpr(record.STATE)
MAX_RANKS = tl.constexpr(record.MAX_RANKS)
DONE = tl.constexpr(record.DONE)
COUNTER = tl.constexpr(record.COUNTER)
TICKETS = tl.constexpr(record.TICKETS)
HEADER = tl.constexpr(record.HEADER)
MAX_TABLES = tl.constexpr(record.MAX_TABLES)


class Vectors(NamedTuple):
    """The constants that say how kernels load and store vectors.

    Attributes:
        table_dtype: The element type of the tables.
        out_dtype: The element type of the output, and of the gradients that travel.
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
