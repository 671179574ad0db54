"""The backward pass between its two exchanges, and the gradients of the weights."""

import triton
import triton.language as tl

import interlace.language as il
from interlace.gemm.kernels.tiles import add_product, tile_place
from interlace.operators.mixture_of_experts.kernels.activation import (
    activated_rows, store_gradients, times_up,
)
from interlace.operators.mixture_of_experts.kernels.plan import (
    ArrivalPlan, completeness, local_experts, pick, sources_of, way_back,
)
from interlace.operators.mixture_of_experts.kernels.tiles import as_operand, store_rows


@triton.jit(do_not_specialize=["E", "L"])
def activation_backward(
    plan, met, kept, product_gradient, inner_gradient, scaled, received, bias, factors, gradients,
    ctx, scale_bytes, arrivals, E, L, width, hidden, WORLD_SIZE: tl.constexpr,
    DTYPE: tl.constexpr, L_LANES: tl.constexpr, FORM: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """Compute each row's gradients of gate and up, in the weight's order, and its activation times
    its weight.

    The gradient of the row's weight goes to the row's source. With ``p = grad_y @ w_out``
    (``product_gradient``), slot weight s, a the activation of gate and up: the gradient of a is ``s
    p``, that of s is ``p . a``, and that of w_out is ``grad_y.T @ (s a)``. Other kernels compute
    the last of these products. With the ``bias [L, hidden]`` of the second product, the gradient of
    s has ``grad_y . bias`` as well; ``factors [arrivals]`` becomes s then, or NaN where the row did
    not arrive.

    **Protocol.** The weights' gradients are put to ``gradients`` of their sources, which the grants
    of :func:`dispatch_grouped_gemm_backward` allow; if a rank was missing there (``met``), nothing
    is put. This kernel neither signals nor waits: :func:`grouped_gemm_combine` follows on the same
    stream, and its signals release these puts too.

    **Example.** Two ranks; rank 1's expert has a row of rank 0. Rank 1 computes ``p . a`` of this
    row and puts it to the row's place in rank 0's ``gradients``.
    """
    group = il.join(ctx)
    rank = il.rank(group)
    lanes = tl.arange(0, L_LANES)
    arrival_plan = ArrivalPlan(plan, E, L)
    complete = completeness(plan, met, E, WORLD_SIZE)
    rows, begin = local_experts(arrival_plan, rank, WORLD_SIZE, L_LANES)
    blocks = (rows + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    scales = il.pointer(received + scale_bytes, tl.float32)
    gates, products = il.pointer(kept, DTYPE), il.pointer(product_gradient, DTYPE)
    inner, weighted = il.pointer(inner_gradient, DTYPE), il.pointer(scaled, DTYPE)
    for item in range(tl.program_id(0), tl.sum(blocks), tl.num_programs(0)):
        expert = tl.sum((ends <= item).to(tl.int32))
        first = pick(begin, lanes, expert)
        end = first + pick(rows, lanes, expert)
        block = item - pick(ends, lanes, expert) + pick(blocks, lanes, expert)
        row = first + block * ROWS + tl.arange(0, ROWS)
        scale = tl.load(scales + row, mask=row < end, other=0.0)
        number = tl.zeros([ROWS], tl.float32)
        for start in range(0, width, COLS):
            column = start + tl.arange(0, COLS)[None, :]
            offsets = row.to(tl.int64)[:, None] * width + column
            mask = (row < end)[:, None] & (column < width)
            gate = tl.load(gates + offsets, mask=mask, other=0.0).to(tl.float32)
            up = gate
            if FORM.gates == 2:
                ups = gates + arrivals.to(tl.int64) * width
                up = tl.load(ups + offsets, mask=mask, other=0.0).to(tl.float32)
            incoming = tl.load(products + offsets, mask=mask, other=0.0).to(tl.float32)
            activated = activated_rows(gate, up, FORM)
            number += tl.sum(times_up(incoming * activated.value, activated, FORM), 1)
            active = times_up(activated.value, activated, FORM) * scale[:, None]
            # Rows that did not arrive left NaN in the product; factors of the rows themselves must
            # be NaN as well.
            active = tl.where(incoming == incoming, active, incoming)
            incoming *= scale[:, None]
            store_gradients(inner, incoming, activated, row, end, start, width, FORM, ROWS, COLS)
            tl.store(weighted + offsets, active.to(DTYPE), mask=mask)
        if bias is not None:
            rows_of_y = il.pointer(received, DTYPE)
            for start in range(0, hidden, COLS):
                column = start + tl.arange(0, COLS)[None, :]
                offsets = row.to(tl.int64)[:, None] * hidden + column
                mask = (row < end)[:, None] & (column < hidden)
                upstream = tl.load(rows_of_y + offsets, mask=mask, other=0.0).to(tl.float32)
                added = tl.load(bias + expert * hidden + column, mask=column < hidden, other=0.0)
                number += tl.sum(upstream * added.to(tl.float32), 1)
            tl.store(factors + row, tl.where(number == number, scale, number), mask=row < end)
        counts, starts, backs = sources_of(arrival_plan, rank, expert, WORLD_SIZE)
        peer, back = way_back(row, counts, starts, backs, WORLD_SIZE)
        target = il.pointer(gradients, tl.float32) + back
        valid = (row < end) & (complete + row * 0 > 0)
        il.put(target, number, peer, group, valid)


@triton.jit(do_not_specialize=["E", "L", "rank"])
def grouped_gemm_gradient(
    plan, a, b, out, rank, E, L, wide, narrow, WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr,
    EVEN: tl.constexpr, TILING: tl.constexpr, L_LANES: tl.constexpr,
):
    """Compute each expert's ``a.T @ b`` over its rows.

    ``a [rows, wide]``, ``b [rows, narrow]`` -> ``out [L, wide, narrow]``; zero without rows.
    ``EVEN``: no tile of ``out`` runs into the next expert's, so ``out`` may be a descriptor.

    **Protocol.** No peer takes part. The kernel reads rows that :func:`dispatch_grouped_gemm` has
    waited for on the same stream, and runs while the peers' results arrive.

    **Example.** Two ranks with an expert each. Rank 0's expert has rows 0 and 1: its gradient is
    the sum over both of ``a[row].T @ b[row]``, whichever ranks they came from.
    """
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    BLOCK_K: tl.constexpr = TILING.block_k
    GROUP: tl.constexpr = TILING.group_m
    lanes = tl.arange(0, L_LANES)
    rows, begin = local_experts(ArrivalPlan(plan, E, L), rank, WORLD_SIZE, L_LANES)
    tiles_m, tiles_n = (wide + BLOCK_M - 1) // BLOCK_M, (narrow + BLOCK_N - 1) // BLOCK_N
    target = as_operand(out, DTYPE, EVEN)
    left = as_operand(a, DTYPE, TILING.descriptors)
    right = as_operand(b, DTYPE, TILING.descriptors)
    for item in range(tl.program_id(0), L * tiles_m * tiles_n, tl.num_programs(0)):
        expert, offset = item // (tiles_m * tiles_n), item % (tiles_m * tiles_n)
        m, n = tile_place(offset, tiles_m, tiles_n, GROUP)
        first, count = pick(begin, lanes, expert), pick(rows, lanes, expert)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        across, along = m * BLOCK_M, n * BLOCK_N
        if TILING.descriptors:
            full_blocks = count // BLOCK_K * BLOCK_K
            for k in range(0, full_blocks, BLOCK_K):
                x = left.load([first + k, across])
                acc = add_product(acc, x.T, right.load([first + k, along]))
            if full_blocks < count:
                # Behind an expert's rows memory is undefined, perhaps NaN.
                mask = (full_blocks + tl.arange(0, BLOCK_K))[:, None] < count
                x = tl.where(mask, left.load([first + full_blocks, across]), 0.0)
                z = tl.where(mask, right.load([first + full_blocks, along]), 0.0)
                acc = add_product(acc, x.T, z)
        else:
            x_column = across + tl.arange(0, BLOCK_M)[None, :]
            z_column = along + tl.arange(0, BLOCK_N)[None, :]
            for k in range(0, count, BLOCK_K):
                row = (k + tl.arange(0, BLOCK_K))[:, None]
                line = (first + row).to(tl.int64)
                x_mask = (row < count) & (x_column < wide)
                x = tl.load(left + line * wide + x_column, mask=x_mask, other=0.0)
                z_mask = (row < count) & (z_column < narrow)
                z = tl.load(right + line * narrow + z_column, mask=z_mask, other=0.0)
                acc = add_product(acc, x.T, z)
        row = expert * wide + across
        store_rows(target, row, (expert + 1) * wide, along, narrow, acc.to(DTYPE), EVEN)


@triton.jit(do_not_specialize=["E", "L", "rank"])
def bias_gradient(
    plan, rows_of, factors, out, rank, E, L, width, WORLD_SIZE: tl.constexpr,
    DTYPE: tl.constexpr, L_LANES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """Sum each expert's rows, ``rows_of [arrivals, width]`` -> ``out [L, width]``.

    With ``factors [arrivals]``, rows are multiplied by them. The sum is float32 and in a fixed
    order; it is zero without rows.

    **Protocol.** No peer takes part, as in :func:`grouped_gemm_gradient`.

    **Example.** Two ranks with an expert each. Rank 0's expert has rows 0 and 1: its gradient is
    the sum of both, whichever ranks they came from.
    """
    lanes = tl.arange(0, L_LANES)
    rows, begin = local_experts(ArrivalPlan(plan, E, L), rank, WORLD_SIZE, L_LANES)
    source = il.pointer(rows_of, DTYPE)
    blocks = (width + COLS - 1) // COLS
    for item in range(tl.program_id(0), L * blocks, tl.num_programs(0)):
        expert, column = item // blocks, item % blocks * COLS + tl.arange(0, COLS)
        first, count = pick(begin, lanes, expert), pick(rows, lanes, expert)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, count, ROWS):
            row = start + tl.arange(0, ROWS)
            offsets = (first + row).to(tl.int64)[:, None] * width + column[None, :]
            mask = (row < count)[:, None] & (column < width)[None, :]
            value = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
            if factors is not None:
                value *= tl.load(factors + first + row, mask=row < count, other=0.0)[:, None]
            acc += value
        sums = tl.sum(acc, 0).to(DTYPE)
        tl.store(out + expert * width + column, sums, mask=column < width)
