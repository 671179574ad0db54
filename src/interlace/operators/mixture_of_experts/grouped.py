"""This rank's experts by PyTorch's grouped products, of tokens of any ranks.

``impl="chunked"`` activates and adds up rows in kernels that read those of this rank's experts
alone; ``impl="unfused"`` uses several kernels of stock PyTorch for the rows of all ranks' experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from interlace.comm.launching.kernels import CPU_PROGRAMS, Launch, processors
from interlace.comm.runtime.interpreter import require
from interlace.operators.mixture_of_experts import layout
from interlace.operators.mixture_of_experts.call import LayerCall
from interlace.operators.mixture_of_experts.choice import ExpertTerms
from interlace.operators.mixture_of_experts.layout import ReadableParameters
from interlace.units import ceil_div, next_power_of_2

_PROGRAMS_OF_SM = 16
_MOST_COLUMNS = 2048
_LEAST_ROWS = 8
"""Rows of the products that sum the gradients of biases: fewer would not be aligned in memory."""


_ALIGNMENT_BYTES = 16
"""PyTorch's grouped product takes rows of weights that are a multiple of so many bytes."""

_MOST_BYTES = 1 << 32
"""Every rank permutes the rows of all ranks; beyond this size they may not fit."""


def rules(terms: ExpertTerms) -> tuple[tuple[bool, str], ...]:
    """Return what PyTorch's grouped products of all ranks' rows need, and whether it is so."""
    sizes, itemsize = terms.sizes, terms.dtype.itemsize
    widths = (sizes.hidden * itemsize, sizes.ffn * itemsize)
    is_bfloat16 = terms.device_type == "cpu" or terms.dtype == torch.bfloat16
    return (
        (is_bfloat16 and not terms.is_float8, "bfloat16 operands"),
        (
            not any(width % _ALIGNMENT_BYTES for width in widths),
            f"hidden and F that are multiples of {_ALIGNMENT_BYTES} bytes",
        ),
        (
            sizes.world_size
            * sizes.slots
            * ((sizes.gates + 1) * sizes.ffn + 2 * sizes.hidden)
            * itemsize
            <= _MOST_BYTES,
            f"at most {_MOST_BYTES >> 30} GiB of rows of all ranks",
        ),
    )


def routing_of(call: LayerCall) -> torch.Tensor:
    """Return the experts of this rank's tokens and then their weights, float32 ``[T, 2 k]``."""
    # A dropped slot's weight may be NaN, which a result of 0 would not hide.
    is_named = (call.experts >= 0) & (call.experts < call.sizes.experts)
    weights = torch.where(is_named, call.weights, 0.0)
    return torch.cat([call.experts.float(), weights], 1)


class ByExpert(NamedTuple):
    """The slots of some tokens, sorted by expert; those of other ranks' experts come last.

    Attributes:
        experts: int64 ``[M * top_k]``, the number of each row's expert among this rank's; the
            number of experts stands for another rank's.
        order: int64 ``[M * top_k]``, the slot of each row.
        ends: int32 ``[experts of this rank]``, the row behind each expert's last one.
    """

    experts: torch.Tensor
    order: torch.Tensor
    ends: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        """The row of each slot."""
        positions = torch.empty_like(self.order)
        positions[self.order] = torch.arange(len(self.order), device=positions.device)
        return positions


def by_expert(call: LayerCall, routing: torch.Tensor) -> ByExpert:
    """Sort the slots of tokens, whose experts and weights ``routing`` has."""
    top_k, local = call.sizes.top_k, call.sizes.local
    expert = routing[:, :top_k].flatten().to(torch.int64) - call.group.rank * local
    expert = torch.where((expert >= 0) & (expert < local), expert, local)
    experts, order = expert.sort(stable=True)
    return ByExpert(experts, order, ends_of(experts, local))


def ends_of(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Return the row behind the last one of each of ``count`` experts; ``experts`` ascend."""
    numbers = torch.arange(count, device=experts.device)
    return torch.searchsorted(experts, numbers, right=True).to(torch.int32)


class Passed(NamedTuple):
    """What the gradients of weights need of the backward pass through all tokens' experts: part by
    part, and sorted by expert within each. Rows of other ranks' experts mean nothing.

    Attributes:
        inner: Gradients of gate and up, ``[slots of all ranks, gates * F]``.
        scaled: The activation times the slot's weight, ``[slots of all ranks, F]``.
        rows: The slots of each part in the order of their experts.
    """

    inner: torch.Tensor
    scaled: torch.Tensor
    rows: list[ByExpert]

    @staticmethod
    def of(call: LayerCall) -> Passed:
        """Return memory for a call's parts, none of which has been computed."""
        sizes = call.sizes
        slots = sizes.world_size * sizes.slots
        widths = sizes.gates * sizes.ffn, sizes.ffn
        inner, scaled = (call.x.new_empty(slots, width) for width in widths)
        return Passed(inner, scaled, [])

    def add(self, rows: ByExpert) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a part, and return its memory in ``inner`` and ``scaled``."""
        start = sum(len(part.order) for part in self.rows)
        self.rows.append(rows)
        end = start + len(rows.order)
        return self.inner[start:end], self.scaled[start:end]


def sum_experts(
    call: LayerCall, x: torch.Tensor, routing: torch.Tensor, sums: torch.Tensor
) -> None:
    """Compute the parts of tokens' sums that are of this rank's experts, into ``sums [M, hidden]``.

    Within ``Group.running``. The products and the activation are rounded to the dtype of x; biases
    are added, and rows summed, in float32.

    Args:
        x: Tokens of any ranks, ``[M, hidden]``.
        routing: Their experts and weights, as :func:`routing_of` returns them.
        sums: Contiguous.
    """
    sizes, rows = call.sizes, by_expert(call, routing)
    parameters = call.parameters.readable()
    w_in, w_out = parameters.right_operands
    products = torch._grouped_mm(x[rows.order // sizes.top_k], w_in, offs=rows.ends)
    active = products.new_empty(len(products), sizes.ffn)
    arguments, constants = _activation_of(call, parameters, products, rows)
    _launch(
        call,
        "activate_rows",
        ceil_div(len(products), constants["ROWS"]) * ceil_div(sizes.ffn, constants["COLS"]),
        arguments | {"active": active},
        constants,
    )
    results = torch._grouped_mm(active, w_out, offs=rows.ends)
    _sum_rows(call, results, rows, routing, sums, parameters.b_out, is_weighted=True)


def sum_gradients(
    call: LayerCall,
    passed: Passed,
    x: torch.Tensor,
    grad: torch.Tensor,
    routing: torch.Tensor,
    sums: torch.Tensor,
    of_weights: torch.Tensor,
) -> None:
    """Compute the parts of tokens' gradients that come through this rank's experts, into ``sums [M,
    hidden]``, and the gradients of their slots' weights.

    The forward pass is computed anew up to the activation. Precisions are those of
    :func:`sum_experts`.

    Args:
        passed: Gets one part more.
        x: Tokens of any ranks, ``[M, hidden]``.
        grad: The gradients of their sums, ``[M, hidden]``.
        routing: Their experts and weights, as :func:`routing_of` returns them.
        sums: Contiguous.
        of_weights: float32 ``[M, top_k]``; becomes zero for slots of other ranks' experts.
    """
    sizes, rows = call.sizes, by_expert(call, routing)
    parameters = call.parameters.readable()
    w_in, w_out = parameters.right_operands
    tokens = rows.order // sizes.top_k
    products = torch._grouped_mm(x[tokens], w_in, offs=rows.ends)
    gradients = grad[tokens]
    incoming = torch._grouped_mm(gradients, w_out.transpose(1, 2), offs=rows.ends)
    inner, scaled = passed.add(rows)
    of_weights.zero_()
    arguments, constants = _activation_of(call, parameters, products, rows)
    _launch(
        call,
        "activate_rows_backward",
        ceil_div(len(products), constants["ROWS"]),
        arguments
        | {
            "order": rows.order,
            "routing": routing,
            "incoming": incoming,
            "gradients": None if call.b_out is None else gradients,
            "out_bias": parameters.b_out,
            "inner": inner,
            "scaled": scaled,
            "of_weights": of_weights,
            "hidden": sizes.hidden,
        },
        constants | {"TOP_K": sizes.top_k},
    )
    results = torch._grouped_mm(inner, w_in.transpose(1, 2), offs=rows.ends)
    # The gradients have their slots' weights already.
    _sum_rows(call, results, rows, routing, sums, None, is_weighted=False)


def gradients_of_parameters(
    call: LayerCall,
    passed: Passed,
    needed: Sequence[bool],
    x: torch.Tensor,
    grad: torch.Tensor,
    routing: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of w_in, w_out, b_in and b_out, empty unless they are ``needed``.

    An expert's rows are summed in float32, in the order of the tokens given, and rounded once.

    Args:
        passed: What :func:`sum_gradients` has left of all parts.
        x, grad, routing: Tokens, gradients and routing of all ranks, part after part. They may hold
            NaN where nothing arrived, and so do the gradients then.
    """
    sizes, local = call.sizes, call.sizes.local
    starts = itertools.accumulate((len(part.order) for part in passed.rows), initial=0)
    experts = torch.cat([part.experts for part in passed.rows])
    slots = torch.cat(
        [part.order + start for part, start in zip(passed.rows, starts, strict=False)]
    )
    experts, order = experts.sort(stable=True)
    ends = ends_of(experts, local)
    slots = slots[order]
    tokens = slots // sizes.top_k
    # Rows that did not arrive are no expert's.
    nan_if_missing = 0 * routing.sum()

    def grouped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return each expert's ``left.T @ right``."""
        return torch._grouped_mm(left.T, right, offs=ends)

    gradients = [call.x.new_empty(0) for _ in call.parameters]
    wants_in, wants_out, wants_b_in, wants_b_out = needed
    if wants_in or wants_b_in:
        inner = passed.inner[order]
    if wants_in:
        rows = x[tokens].add_(nan_if_missing)
        pair = (inner, rows) if layout.order_of(call.w_in).along_k else (rows, inner)
        gradients[0] = call.parameters.arranged(0, grouped(*pair))
    if wants_b_in:
        ones = inner.new_ones(len(inner), _LEAST_ROWS).add_(nan_if_missing)
        gradients[2] = call.parameters.arranged(2, grouped(ones, inner)[:, 0].contiguous())
    if wants_out or wants_b_out:
        upstream = grad[tokens].add_(nan_if_missing)
    if wants_out:
        scaled = passed.scaled[order]
        pair = (upstream, scaled) if layout.order_of(call.w_out).along_k else (scaled, upstream)
        gradients[1] = call.parameters.arranged(1, grouped(*pair))
    if wants_b_out:
        weights = routing[:, sizes.top_k :].flatten()[slots].to(upstream.dtype)
        columns = weights[:, None].expand(-1, _LEAST_ROWS).contiguous()
        gradients[3] = grouped(columns, upstream)[:, 0].contiguous()
    return tuple(gradients)


def _activation_of(
    call: LayerCall, parameters: ReadableParameters, products: torch.Tensor, rows: ByExpert
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments and constants by which kernels read gate and up."""
    sizes = call.sizes
    block_rows, columns = layout.activation_tile(sizes.ffn)
    return {
        "products": products,
        "bias": parameters.b_in,
        "owners": rows.experts,
        "ends": rows.ends,
        "L": sizes.local,
        "width": sizes.ffn,
    }, {
        "FORM": call.form,
        "ROWS": block_rows,
        "COLS": columns,
        "num_warps": 4,
    }


def _sum_rows(
    call: LayerCall,
    results: torch.Tensor,
    rows: ByExpert,
    routing: torch.Tensor,
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_weighted: bool,
) -> None:
    """Sum the rows of each token, with their weights and the bias."""
    sizes = call.sizes
    _launch(
        call,
        "sum_rows_of_tokens",
        len(sums),
        {
            "results": results,
            "places": rows.places,
            "routing": routing,
            "bias": bias,
            "sums": sums,
            "tokens": len(sums),
            "first": call.group.rank * sizes.local,
            "L": sizes.local,
            "hidden": sizes.hidden,
        },
        {
            "WEIGHTED": is_weighted,
            "TOP_K": sizes.top_k,
            "COLS": min(next_power_of_2(max(sizes.hidden, 16)), _MOST_COLUMNS),
            "num_warps": 4,
        },
    )


def _launch(
    call: LayerCall, kernel: str, items: int, arguments: dict[str, Any], constants: dict[str, Any]
) -> None:
    """Launch a kernel whose programs take so many items in turn."""
    require(call.group.backend)
    from interlace.operators.mixture_of_experts.kernels import grouped as kernels

    programs = (
        CPU_PROGRAMS
        if call.group.backend == "cpu"
        else _PROGRAMS_OF_SM * processors(call.group.device)
    )
    Launch(getattr(kernels, kernel), (min(items, programs),), arguments, constants)()
