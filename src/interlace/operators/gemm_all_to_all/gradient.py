"""``torch.ops.interlace.gemm_all_to_all_gradient``: rows of a gradient, back where they came from.

It is an operator of its own, so that compilers see what the gradient of ``gemm_all_to_all`` sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm import process_group_named
from interlace.comm.groups.registration import OPERATOR_TAGS, entrance, register
from interlace.operators.gemm_all_to_all import reference

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    "gemm_all_to_all_gradient(Tensor grad, SymInt[]? input_splits, SymInt[]? output_splits, "
    "str group_name) -> Tensor",
    tags=OPERATOR_TAGS,
)

Lists = tuple[Sequence[int] | None, Sequence[int] | None]


def _run(
    grad: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group_name: str,
) -> torch.Tensor:
    """Send every row to the rank that it came from; the forward pass has checked the lists."""
    process_group = process_group_named(group_name)
    return reference.send_back(grad, input_splits, output_splits, process_group)


def _fake(
    grad: torch.Tensor,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    group_name: str,
) -> torch.Tensor:
    rows = grad.shape[0] if input_splits is None else sum(input_splits)
    return grad.new_empty([rows, grad.shape[1]])


def _set_up_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.input_splits, ctx.output_splits, ctx.group_name = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Send rows that came back from their owners to them once more."""
    # The transpose of the way back is the way there: the lists change places.
    rows = entrance("gemm_all_to_all_gradient")(
        grad, ctx.output_splits, ctx.input_splits, ctx.group_name
    )
    return rows, None, None, None


register(
    _library,
    "gemm_all_to_all_gradient",
    _run,
    _fake,
    backward=_backward,
    setup_context=_set_up_backward,
)
