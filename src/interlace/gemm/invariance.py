"""Batch invariance: a row's result has the same bits whatever else is in the batch.

Floating-point sums depend on their order, and fast implementations choose theirs by the number of
rows: libraries by tiles and by parts of K, kernels that sum over ranks by the rank that owns a row.
A call by ``impl="batch_invariant"`` runs an implementation that is declared to do nothing of the
kind (``Implementation.is_batch_invariant``). On GPUs that are known to add up a product in one way
in tiles of any size (:data:`ONE_ARITHMETIC`), implementations and tiles may follow the number of
rows; on others there is one implementation, with tiles chosen by everything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from interlace import environment
from interlace.comm.launching.kernels import capability
from interlace.errors import ArgumentError
from interlace.registry import BATCH_INVARIANT, Implementation, Operator
from interlace.tuning.choice import Choice

REFERENCE_ROWS = 64
"""Rows of a rank for which configurations are chosen, however many a call has, where tiles may
change bits.
"""

ONE_ARITHMETIC: frozenset[tuple[int, int]] = frozenset({(9, 0)})
"""Compute capabilities of the GPUs whose matrix unit is known to add up a product in the same way
in every tile, and with either operand first: all kernels of ours, which go along K in order, then
give an element the same bits, in the dtypes below. ``tests/gpu/test_batch_invariance_gpu.py`` says
whether a GPU belongs here.
"""

_TESTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Matrix units may add up float8 with fewer digits, and round it at other places."""

_asked: bool | None = None
"""What the innermost context says; None outside of any."""


@contextlib.contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Give every row the same bits within the context, whatever else is in the batch.

    The operators around a product then run as by ``impl="batch_invariant"``: a row's result depends
    on the row, the weight, bias and scales, the dtypes and the number of ranks, and not on how many
    rows there are, where among them the row is, or whether a CUDA graph runs the call. So a request
    gets the same answer alone and in a batch. The guarantee is for one model of GPU and one version
    of Interlace, PyTorch and Triton.

    What counts is when a call runs; for a CUDA graph, when it is captured. A function that
    ``torch.compile`` has compiled before runs invariant operators within the context, but pairs
    and products that the pass has left alone stay PyTorch's: compile within the context, too.

    ``INTERLACE_BATCH_INVARIANT=1`` in the environment is the same for the whole program.

    Args:
        enabled: False to go by speed within the context, whatever the environment says. It must be
            the same on every rank.

    Raises:
        ArgumentError: By a call within the context: it names an implementation that is not
            invariant, or its operator has none. Gradients of weights are sums over the batch, and
            products in backward passes are PyTorch's, so no backward pass is invariant.

    Example:
        >>> with interlace.batch_invariant():
        ...     logits = model(batch)
    """
    global _asked
    before, _asked = _asked, enabled
    try:
        yield
    finally:
        _asked = before


def is_enabled() -> bool:
    """Return whether calls must be batch-invariant: the context decides, else the environment."""
    return bool(environment.switch("INTERLACE_BATCH_INVARIANT")) if _asked is None else _asked


def effective_impl(operator: Operator, impl: str) -> str:
    """Return the word of ``impl`` that counts: the caller's, or the mode's where it is enabled.

    Where an operator has several invariant implementations and the caller names one, that is the
    mode's word with the name behind it; see :func:`name_in`.

    Raises:
        ArgumentError: The mode is enabled, and the implementation that was asked for is not
            invariant, or the operator has none.
    """
    if impl == BATCH_INVARIANT or not is_enabled():
        return impl
    if impl in operator.choosers:
        require_invariant(operator)
        return BATCH_INVARIANT
    names = [implementation.name for implementation in invariant_implementations(operator)]
    if operator.implementation(impl).is_batch_invariant:
        return BATCH_INVARIANT if len(names) == 1 else f"{BATCH_INVARIANT} {impl}"
    raise ArgumentError(
        f"{operator.name}: impl must be {' or '.join(map(repr, ['auto', *names]))} within "
        f"interlace.batch_invariant(); got {impl!r}, which may give a row other bits in another "
        "batch."
    )


def is_invariant(impl: str) -> bool:
    """Return whether a word of :func:`effective_impl` asks for batch invariance."""
    return impl.startswith(BATCH_INVARIANT)


def name_in(impl: str) -> str:
    """Return a word of :func:`effective_impl` without the mode's: what the caller has named, which
    is empty where the mode alone was asked for.
    """
    return impl.removeprefix(BATCH_INVARIANT).strip()


def has_one_arithmetic(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device adds up products in one way, by :data:`ONE_ARITHMETIC`.

    Args:
        device: The operands' device.
        dtype: The operands' dtype.
    """
    if device.type != "cuda" or dtype not in _TESTED_DTYPES:
        return False
    return capability(device) in ONE_ARITHMETIC


def invariant_implementations(operator: Operator) -> tuple[Implementation, ...]:
    """Return the implementations of an operator that are batch-invariant."""
    return tuple(
        implementation
        for implementation in operator.implementations
        if implementation.is_batch_invariant
    )


def invariant_implementation(
    operator: Operator,
    device: torch.device,
    dtype: torch.dtype,
    choice: Choice[Any],
    terms: Any,
    named: str = "",
) -> Implementation:
    """Return what runs a batch-invariant call: the invariant implementation that is predicted to be
    the fastest where all of them give the same bits, else the first one.

    Args:
        operator: The operator.
        device: The operands' device.
        dtype: The operands' dtype.
        choice: What a free call would run.
        terms: The properties by which an implementation may refuse the call.
        named: The implementation that the caller has named; empty if none.

    Raises:
        ArgumentError: There is none, or the one that was named is not known to give this GPU the
            same bits.
    """
    require_invariant(operator)
    first, *others = invariant_implementations(operator)
    if not has_one_arithmetic(device, dtype):
        if named in ("", first.name):
            return first
        raise ArgumentError(
            f"{operator.name}: impl={named!r} must run on a GPU that is known to add up products "
            f"in one way to be batch-invariant. Take impl='auto' or {first.name!r}."
        )
    if named:
        return operator.implementation(named)
    able = {each.name: each for each in (first, *others) if each.refusal(terms) is None}
    return next((able[name] for name in choice.candidates if name in able), first)


def require_invariant(operator: Operator) -> None:
    """Refuse an operator without a batch-invariant implementation.

    Raises:
        ArgumentError: It has none.
    """
    if not invariant_implementations(operator):
        refuse(operator.name)


def refuse(name: str) -> None:
    """Refuse a call of an operator that is not batch-invariant.

    Raises:
        ArgumentError: Always.
    """
    raise ArgumentError(
        f"{name}: a call within interlace.batch_invariant() must have a batch-invariant "
        "implementation; this operator has none. Call it outside of the context, or leave it to "
        "PyTorch."
    )
