"""What stands around the library's grouped products: the activation and its derivative, and the
sums of tokens' rows.

Rows are sorted by their expert. Those of this rank's experts come first, and only they are read:
how many there are is known on the device alone. No kernel reaches a peer.
"""

import triton
import triton.language as tl

from interlace.operators.mixture_of_experts.kernels.activation import (
    activate, activated_rows, store_gradients, times_up,
)


@triton.jit(do_not_specialize=["L"])
def activate_rows(
    products, bias, owners, ends, active, L, width, FORM: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Compute the activation of the rows of this rank's experts: ``active [M, width]``.

    Args:
        products: ``[M, gates * width]``, the first product: with ``FORM.halves`` all gates of a row
            and then all ups, otherwise gate and up in turn.
        bias: ``[L, gates * width]`` in the same order; or None.
        owners: int64 ``[M]``, the expert of each row, ascending.
        ends: int32 ``[L]``, the row behind each expert's last one.
    """
    rows = tl.load(ends + L - 1)
    blocks_of_row = tl.cdiv(width, COLS)
    for item in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks_of_row, tl.num_programs(0)):
        row = item // blocks_of_row * ROWS + tl.arange(0, ROWS)
        start = item % blocks_of_row * COLS
        gate, up = _gate_and_up(
            products, bias, owners, row, rows, start, width, FORM, ROWS, COLS
        )
        value = activate(gate, up, FORM).to(active.dtype.element_ty)
        column = start + tl.arange(0, COLS)[None, :]
        pointers = active + row.to(tl.int64)[:, None] * width + column
        tl.store(pointers, value, mask=(row < rows)[:, None] & (column < width))


@triton.jit(do_not_specialize=["L"])
def activate_rows_backward(
    products, bias, owners, ends, order, routing, incoming, gradients, out_bias, inner, scaled,
    of_weights, L, width, hidden, TOP_K: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Compute each row's gradients of gate and up, its activation times its weight, and the
    gradient of this weight.

    With g the gradient of the token's sum, ``p = g @ w_out``, s the weight of the row's slot and a
    its activation: the gradient of a is ``s p``, that of s is ``p . a + g . out_bias``, and that of
    w_out is ``g.T @ (s a)``.

    Args:
        products, bias, owners, ends: Those of :func:`activate_rows`.
        order: int64 ``[M]``, the slot of each row.
        routing: float32 ``[tokens, 2 * TOP_K]``, a token's experts and then their weights.
        incoming: ``[M, width]``, the products p.
        gradients: ``[M, hidden]``, the gradients g; None without ``out_bias``.
        out_bias: ``[L, hidden]``, the bias of the second product; or None.
        inner: ``[M, gates * width]``, the gradients of gate and up, in the order of ``products``.
        scaled: ``[M, width]``, ``s a``.
        of_weights: float32 ``[tokens, TOP_K]``; slots of other ranks' experts are not written.
    """
    rows = tl.load(ends + L - 1)
    for item in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = item * ROWS + tl.arange(0, ROWS)
        is_row = row < rows
        place = row.to(tl.int64)[:, None]
        slot = tl.load(order + row, mask=is_row, other=0)
        weights = routing + slot // TOP_K * 2 * TOP_K + TOP_K + slot % TOP_K
        scale = tl.load(weights, mask=is_row, other=0.0)[:, None]
        number = tl.zeros([ROWS], tl.float32)
        for start in range(0, width, COLS):
            column = start + tl.arange(0, COLS)[None, :]
            mask = is_row[:, None] & (column < width)
            gate, up = _gate_and_up(
                products, bias, owners, row, rows, start, width, FORM, ROWS, COLS
            )
            upstream = tl.load(incoming + place * width + column, mask=mask, other=0.0)
            upstream = upstream.to(tl.float32)
            activated = activated_rows(gate, up, FORM)
            active = times_up(activated.value, activated, FORM)
            number += tl.sum(tl.where(mask, upstream * active, 0.0), 1)
            pointers = scaled + place * width + column
            tl.store(pointers, (active * scale).to(scaled.dtype.element_ty), mask=mask)
            upstream *= scale
            store_gradients(inner, upstream, activated, row, rows, start, width, FORM, ROWS, COLS)
        if out_bias is not None:
            owner = tl.load(owners + row, mask=is_row, other=0)[:, None]
            for start in range(0, hidden, COLS):
                column = start + tl.arange(0, COLS)[None, :]
                mask = is_row[:, None] & (column < hidden)
                upstream = tl.load(gradients + place * hidden + column, mask=mask, other=0.0)
                added = tl.load(out_bias + owner * hidden + column, mask=mask, other=0.0)
                number += tl.sum(upstream.to(tl.float32) * added.to(tl.float32), 1)
        tl.store(of_weights + slot, number, mask=is_row)


@triton.jit
def _gate_and_up(
    products, bias, owners, row, rows, start, width, FORM: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Return gate and up of some rows, float32 ``[ROWS, COLS]`` each, with their bias.

    Without a gate, both are up.
    """
    lines = FORM.gates * width
    is_row = (row < rows)[:, None]
    added = None
    if bias is not None:
        added = bias + tl.load(owners + row, mask=row < rows, other=0)[:, None] * lines
    first = products + row.to(tl.int64)[:, None] * lines
    column = start + tl.arange(0, COLS)[None, :]
    mask = is_row & (column < width)
    if FORM.gates == 1:
        gate = _biased(first + column, added, column, mask)
        up = gate
    elif FORM.halves:
        gate = _biased(first + column, added, column, mask)
        up = _biased(first + width + column, added, width + column, mask)
    else:
        in_turn = 2 * start + tl.arange(0, 2 * COLS)[None, :]
        both = _biased(first + in_turn, added, in_turn, is_row & (in_turn < lines))
        gate, up = tl.split(tl.reshape(both, [ROWS, COLS, 2]))
    return gate, up


@triton.jit
def _biased(pointers, bias, column, mask):
    """Return float32 products plus the bias of their columns, if there is one."""
    value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["tokens", "first", "L"])
def sum_rows_of_tokens(
    results, places, routing, bias, sums, tokens, first, L, hidden, WEIGHTED: tl.constexpr,
    TOP_K: tl.constexpr, COLS: tl.constexpr,
):
    """Sum each token's rows of this rank's experts into ``sums [tokens, hidden]``.

    Rows count with their weights if ``WEIGHTED``. The sum is float32, in the order of the token's
    slots, and rounded once.

    Args:
        results: ``[M, hidden]``, the second product.
        places: int64 ``[tokens, TOP_K]``, the row of each slot.
        routing: float32 ``[tokens, 2 * TOP_K]``, a token's experts and then their weights.
        bias: ``[L, hidden]``, of the second product; or None.
        first: The number of this rank's first expert.
    """
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        for start in range(0, hidden, COLS):
            column = start + tl.arange(0, COLS)
            mask = column < hidden
            acc = tl.zeros([COLS], tl.float32)
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
                    if WEIGHTED:
                        value *= tl.load(slot + TOP_K)
                    acc += value
            pointers = sums + hidden.to(tl.int64) * token + column
            tl.store(pointers, acc.to(sums.dtype.element_ty), mask=mask)
