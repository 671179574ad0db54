"""What stands around the library's grouped products: the activation, and the sums of tokens' rows.

Rows are sorted by their expert. Those of this rank's experts come first, and only they are read:
how many there are is known on the device alone. Neither kernel reaches a peer.
"""

import triton
import triton.language as tl

from interlace.operators.mixture_of_experts.kernels.activation import activate


@triton.jit(do_not_specialize=["L"])
def activate_rows(
    products, bias, owners, ends, active, L, width, HALVES: tl.constexpr, FORM: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """Compute the activation of the rows of this rank's experts: ``active [M, width]``.

    Args:
        products: ``[M, gates * width]``, the first product: with ``HALVES`` all gates of a row and
            then all ups, otherwise gate and up in turn.
        bias: ``[L, gates * width]`` in the same order; or None.
        owners: int64 ``[M]``, the expert of each row, ascending.
        ends: int32 ``[L]``, the row behind each expert's last one.
    """
    rows = tl.load(ends + L - 1)
    blocks_of_row = tl.cdiv(width, COLS)
    lines = FORM.gates * width
    for item in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks_of_row, tl.num_programs(0)):
        row = item // blocks_of_row * ROWS + tl.arange(0, ROWS)
        start = item % blocks_of_row * COLS
        column = start + tl.arange(0, COLS)[None, :]
        is_row = (row < rows)[:, None]
        row = row.to(tl.int64)[:, None]
        added = None
        if bias is not None:
            added = bias + tl.load(owners + row, mask=is_row, other=0) * lines
        first = products + row * lines
        if FORM.gates == 2 and not HALVES:
            in_turn = 2 * start + tl.arange(0, 2 * COLS)[None, :]
            both = _biased(first + in_turn, added, in_turn, is_row & (in_turn < lines))
            gate, up = tl.split(tl.reshape(both, [ROWS, COLS, 2]))
        else:
            mask = is_row & (column < width)
            gate = _biased(first + column, added, column, mask)
            up = None
            if FORM.gates == 2:
                up = _biased(first + width + column, added, width + column, mask)
        value = activate(gate, up, FORM).to(active.dtype.element_ty)
        tl.store(active + row * width + column, value, mask=is_row & (column < width))


@triton.jit
def _biased(pointers, bias, column, mask):
    """Return float32 products plus the bias of their columns, if there is one."""
    value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["tokens", "first", "L"])
def sum_rows_of_tokens(
    results, places, routing, bias, sums, tokens, first, L, hidden, TOP_K: tl.constexpr,
    COLS: tl.constexpr,
):
    """Sum each token's rows of this rank's experts with their weights: ``sums [tokens, hidden]``.

    The sum is float32, in the order of the token's slots, and rounded once.

    Args:
        results: ``[M, hidden]``, the second product.
        places: int64 ``[tokens, TOP_K]``, the row of each slot.
        routing: float32 ``[tokens, 2 * TOP_K]``, a token's experts and then their weights.
        bias: ``[L, hidden]``, of the second product; or None.
        first: the number of this rank's first expert.
    """
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        for start in range(0, hidden, COLS):
            column = start + tl.arange(0, COLS)
            mask = column < hidden
            total = tl.zeros([COLS], tl.float32)
            for j in tl.static_range(TOP_K):
                slot = routing + token * 2 * TOP_K + j
                # A number that does not arrive is NaN, and of no rank.
                expert = tl.load(slot) - first
                if (expert >= 0) & (expert < L):
                    row = tl.load(places + token * TOP_K + j)
                    value = tl.load(results + row * hidden + column, mask=mask, other=0.0)
                    value = value.to(tl.float32)
                    if bias is not None:
                        pointers = bias + expert.to(tl.int32) * hidden + column
                        value += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
                    total += tl.load(slot + TOP_K) * value
            pointers = sums + hidden.to(tl.int64) * token + column
            tl.store(pointers, total.to(sums.dtype.element_ty), mask=mask)
