"""Rows of tables: sums of their lookups' gradients, and their updates, without communication."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from interlace.operators.embedding_all_to_all.kernels.vectors import (
    COLUMN, OWN_COLUMN, STATE, TABLE_WIDTH, TARGET, TARGET_STRIDE, vectors_at,
)


class Rates(NamedTuple):
    """The numbers of an update: its learning rate and, for Adagrad, its epsilon."""

    learning_rate: Any
    epsilon: Any


@triton.jit
def _gradient_of(bag, mask, entry, gradients, VECTORS: tl.constexpr):
    """Load the pooled vectors' gradients of some bags.

    They are where they landed, or, for this rank's own samples, where autograd left them.
    """
    OUT: tl.constexpr = VECTORS.out_dtype
    ALIGN: tl.constexpr = VECTORS.align
    BYTES: tl.constexpr = OUT.primitive_bitwidth // 8
    column = tl.arange(0, VECTORS.width)
    rank, chunk = gradients.rank, gradients.chunk
    sample = bag % gradients.B
    local_row = (sample - rank * chunk).to(tl.int64) * gradients.columns
    local = gradients.local + (local_row + tl.load(entry + COLUMN)) * BYTES
    landed_row = sample.to(tl.int64) * gradients.landing_columns
    landed = gradients.landed + (landed_row + tl.load(entry + OWN_COLUMN)) * BYTES
    address = tl.where(sample // chunk == rank, local, landed)
    pointers = vectors_at(address, OUT, ALIGN)[:, None] + column[None, :]
    cells = mask[:, None] & (column >= 0)[None, :]
    if not VECTORS.full:
        width = tl.multiple_of(tl.load(entry + TABLE_WIDTH), ALIGN)
        cells = cells & (column[None, :] < width[:, None])
    return tl.load(pointers, mask=cells, other=0.0)


@triton.jit
def sum_runs(
    first_bag, entry, scale, bags, start, length, gradients, UNROLL: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Sum runs of lookups, each of one row, in their order: float32 ``[runs, width]``.

    The first lookup's bag is known beforehand: most rows are looked up once, and then nothing else
    must be waited for.
    """
    # The first lookup needs no load of its bag, so its gradient is requested at once.
    total = _gradient_of(first_bag, length > 0, entry, gradients, VECTORS).to(tl.float32)
    if scale is not None:
        total = total * tl.load(scale + start, mask=length > 0, other=0.0)[:, None]
    for step in range(1, tl.max(length, 0), UNROLL):
        # All loads of a step are issued before the first sum, so that they overlap.
        vectors = ()
        for ahead in tl.static_range(UNROLL):
            inside = step + ahead < length
            bag = tl.load(bags + start + step + ahead, mask=inside, other=0)
            vectors = vectors + (_gradient_of(bag, inside, entry, gradients, VECTORS),)
        for ahead in tl.static_range(UNROLL):
            if scale is None:
                total += vectors[ahead].to(tl.float32)
            else:
                inside = step + ahead < length
                factor = tl.load(scale + start + step + ahead, mask=inside, other=0.0)
                total += vectors[ahead].to(tl.float32) * factor[:, None]
    return total


@triton.jit
def load_rows(entry, row, mask, target, UPDATE: tl.constexpr, VECTORS: tl.constexpr):
    """Load what an update changes: rows, and Adagrad's state of each.

    They are asked for before the gradients arrive.
    """
    DTYPE: tl.constexpr = VECTORS.table_dtype
    WIDTH: tl.constexpr = VECTORS.width
    ALIGN: tl.constexpr = VECTORS.align
    column = tl.arange(0, WIDTH)
    width = tl.multiple_of(tl.load(entry + TABLE_WIDTH), ALIGN)
    stride = tl.multiple_of(tl.load(entry + TARGET_STRIDE), ALIGN)
    offset = tl.load(entry + TARGET)
    # A negative offset marks a table that is not trained.
    mask = mask & (offset >= 0)
    first = vectors_at(target + offset, DTYPE, ALIGN)[:, None]
    pointers = first + row[:, None] * stride[:, None] + column[None, :]
    states = tl.load(entry + STATE).to(tl.pointer_type(tl.float32)) + row
    cells = mask[:, None] & (column[None, :] < width[:, None])
    weight = tl.zeros([row.shape[0], WIDTH], tl.float32)
    state = tl.zeros(row.shape, tl.float32)
    if UPDATE != "store":
        weight = tl.load(pointers, mask=cells, other=0.0).to(tl.float32)
    if UPDATE == "adagrad":
        state = tl.load(states, mask=mask, other=0.0)
    return pointers, states, weight, state


@triton.jit
def update_rows(
    entry, loaded, total, mask, arrived, rates, UPDATE: tl.constexpr, VECTORS: tl.constexpr
):
    """Store rows' gradients, or update the rows with them; :func:`load_rows` has ``loaded`` them.

    If a peer's gradients have not ``arrived``, gradients are NaN, and rows stay as they are.
    """
    DTYPE: tl.constexpr = VECTORS.table_dtype
    ALIGN: tl.constexpr = VECTORS.align
    pointers, states, weight, state = loaded
    column = tl.arange(0, VECTORS.width)
    width = tl.multiple_of(tl.load(entry + TABLE_WIDTH), ALIGN)
    mask = mask & (tl.load(entry + TARGET) >= 0)
    if UPDATE == "store":
        value = tl.where((arrived + column * 0)[None, :] > 0, total, float("nan"))
        tl.store(pointers, value.to(DTYPE), mask=mask[:, None] & (column[None, :] < width[:, None]))
    else:
        mask = mask & (arrived + width * 0 > 0)
        cells = mask[:, None] & (column[None, :] < width[:, None])
        if UPDATE == "adagrad":
            new_state = state + tl.sum(total * total, 1) / width.to(tl.float32)
            tl.store(states, new_state, mask=mask)
            step = rates.learning_rate / (tl.sqrt_rn(new_state) + rates.epsilon)
        else:
            step = rates.learning_rate + tl.zeros(width.shape, tl.float32)
        tl.store(pointers, (weight - step[:, None] * total).to(DTYPE), mask=cells)
