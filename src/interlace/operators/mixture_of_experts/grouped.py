"""This rank's experts by the library's grouped products, and kernels that read their rows alone.

Stock PyTorch (:mod:`interlace.operators.mixture_of_experts.stock`) activates and adds up the rows
of all ranks' experts, in several kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from interlace.comm.interpreter import require
from interlace.comm.kernels import CPU_PROGRAMS, Launch, processors
from interlace.operators.mixture_of_experts import layout, stock
from interlace.units import ceil_div, next_power_of_2

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.call import Call

_PROGRAMS_OF_SM = 16
_MOST_COLUMNS = 2048


def sum_experts(call: Call, x: torch.Tensor, routing: torch.Tensor, sums: torch.Tensor) -> None:
    """Compute the parts of tokens' sums that are of this rank's experts, into ``sums [M, hidden]``.

    Within ``Group.running``. The products and the activation are rounded to the dtype of x; biases
    are added, and rows summed, in float32.

    Args:
        x: Tokens of any ranks, ``[M, hidden]``.
        routing: Their experts and weights, as :func:`stock.routing_of` returns them.
        sums: Contiguous.
    """
    require(call.group.backend)
    from interlace.operators.mixture_of_experts.kernels.grouped import (
        activate_rows,
        sum_rows_of_tokens,
    )

    sizes, rows = call.sizes, stock.by_expert(call, routing)
    w_in, in_order = stock.first_weight(call)
    products = torch._grouped_mm(x[rows.order // sizes.top_k], w_in, offs=rows.ends)
    active = products.new_empty(len(products), sizes.ffn)
    block_rows, columns = layout.activation_tile(sizes.ffn)
    tiles = ceil_div(len(products), block_rows) * ceil_div(sizes.ffn, columns)
    b_in = None if call.b_in is None else layout.bias_in_order(call.b_in, in_order)
    Launch(
        activate_rows,
        (_programs(call, tiles),),
        {
            "products": products,
            "bias": b_in,
            "owners": rows.experts,
            "ends": rows.ends,
            "active": active,
            "L": sizes.local,
            "width": sizes.ffn,
        },
        {
            "HALVES": in_order.halves,
            "FORM": call.form,
            "ROWS": block_rows,
            "COLS": columns,
            "num_warps": 4,
        },
    )()
    results = torch._grouped_mm(active, stock.second_weight(call), offs=rows.ends)
    Launch(
        sum_rows_of_tokens,
        (_programs(call, len(x)),),
        {
            "results": results,
            "places": rows.places,
            "routing": routing,
            "bias": None if call.b_out is None else call.b_out.contiguous(),
            "sums": sums,
            "tokens": len(x),
            "first": call.group.rank * sizes.local,
            "L": sizes.local,
            "hidden": sizes.hidden,
        },
        {
            "TOP_K": sizes.top_k,
            "COLS": min(next_power_of_2(max(sizes.hidden, 16)), _MOST_COLUMNS),
            "num_warps": 4,
        },
    )()


def _programs(call: Call, items: int) -> int:
    """Return the number of programs that take so many items in turn."""
    if call.group.backend == "cpu":
        return min(items, CPU_PROGRAMS)
    return min(items, _PROGRAMS_OF_SM * processors(call.group.device))
