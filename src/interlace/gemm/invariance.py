"""Batch invariance: a row's result has the same bits whatever else is in the batch, and if that is
asked for, with any number of ranks.

Floating-point sums depend on their order, and fast implementations choose theirs by the number of
rows: libraries by tiles and by parts of K, kernels that sum over ranks by the rank that owns a row.
A call by ``impl="batch_invariant"`` runs an implementation that is declared to do nothing of the
kind (``Implementation.is_batch_invariant``). On GPUs that are known to add up a product in one way
in tiles of any size (:data:`ONE_ARITHMETIC`), implementations and tiles may follow the number of
rows; on others there is one implementation, with tiles chosen by everything else.

A sum over ranks has the same bits for any number of them if K is added in a fixed tree of pairs, of
which each rank has a subtree: see :func:`batch_invariant`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from interlace import environment
from interlace.comm.launching.kernels import capability
from interlace.comm.replay import tapes
from interlace.comm.runtime.conditions import Condition, has, is_in_environment
from interlace.errors import ArgumentError
from interlace.registry import BATCH_INVARIANT, Implementation, Operator
from interlace.tuning.choice import Choice

REFERENCE_ROWS = 64
"""Rows of a rank for which configurations are chosen, however many a call has, where tiles may
change bits.
"""

REFERENCE_SIZE = 4096
"""Columns, and K, for which configurations are chosen where tiles may change bits and neither may
depend on the number of ranks.
"""

ONE_ARITHMETIC: frozenset[tuple[int, int]] = frozenset({(9, 0)})
"""Compute capabilities of the GPUs whose matrix unit is known to add up a product in the same way
in every tile, and with either operand first: all kernels of ours, which go along K in order, then
give an element the same bits, in the dtypes below. ``tests/gpu/test_batch_invariance_gpu.py`` says
whether a GPU belongs here.
"""

_TESTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Matrix units may add up float8 with fewer digits, and round it at other places."""

MOST_RANKS = 8
"""Leaves of the tree, which are parts of K, where a caller names no number of ranks."""

LEAST_LEAF = 16
"""A leaf's columns of K are a multiple of this: a step of the matrix unit."""

_VARIABLE, _TREES = "INTERLACE_BATCH_INVARIANT", (2, 4, MOST_RANKS)

_asked: int | None = None
"""What the innermost context says, as :func:`mode` returns it; None outside of any."""


@contextlib.contextmanager
def batch_invariant(enabled: bool = True, *, ranks: bool | int = False) -> Iterator[None]:
    """Give every row the same bits within the context, whatever else is in the batch.

    The operators around a product then run as by ``impl="batch_invariant"``: a row's result depends
    on the row, the weight, bias and scales, the dtypes and the number of ranks, and not on how many
    rows there are, where among them the row is, or whether a CUDA graph runs the call. So a request
    gets the same answer alone and in a batch. The guarantee is for one model of GPU and one version
    of Interlace, PyTorch and Triton.

    What counts is when a call runs; for a CUDA graph, when it is captured. A function that
    ``torch.compile`` has compiled before runs invariant operators within the context, but pairs
    and products that the pass has left alone stay PyTorch's: compile within the context, too.

    With ``ranks=8``, results do not depend on the number of ranks either: 1, 2, 4 and 8 ranks give
    equal bits. K of the whole layer, which ranks share, is cut into eight leaves. A leaf's products
    are added along K in float32; leaves, and then ranks, are added in pairs, ``((l0+l1) + (l2+l3))
    + ((l4+l5) + (l6+l7))``, and each of these sums is rounded to the result's dtype before it is
    added to another one, so ranks send as many bytes as without.

    ``INTERLACE_BATCH_INVARIANT=1`` in the environment is the same for the whole program, and
    ``INTERLACE_BATCH_INVARIANT=8`` is ``ranks=8``.

    Args:
        enabled: False to go by speed within the context, whatever the environment says. It must be
            the same on every rank.
        ranks: The largest number of ranks that is to give the same bits, 2, 4 or 8; True for 8.
            Numbers of ranks that divide it give the same bits as one another. It must be the same
            on every rank, and in all programs whose bits are compared.

    Raises:
        ArgumentError: ``ranks`` is another number. By a call within the context: it names an
            implementation that is not invariant, or its operator has none; or its ranks or its K
            cannot be cut into the leaves. Gradients of weights are sums over the batch, and
            products in backward passes are PyTorch's, so no backward pass is invariant.

    Example:
        >>> with interlace.batch_invariant():
        ...     logits = model(batch)
    """
    global _asked
    most_ranks = MOST_RANKS if ranks is True else int(ranks)
    if most_ranks not in (0, 1, *_TREES):
        raise ArgumentError(
            f"batch_invariant: ranks must be 2, 4 or 8, or True for 8; got {most_ranks}."
        )
    before, _asked = _asked, max(most_ranks, 1) if enabled else 0
    try:
        yield
    finally:
        _asked = before


def _conditions() -> Iterable[Condition]:
    """Return the conditions that :func:`mode` returns what it does now."""
    yield has(sys.modules[__name__], "_asked")
    yield is_in_environment(_VARIABLE)


tapes.depend_on(_conditions)


def mode() -> int:
    """Return what calls must be, by the context, else by the environment: 0 for nothing, 1 for
    batch-invariant, and the largest number of ranks if their number must not matter either.
    """
    if _asked is not None:
        return _asked
    text = environment.text_of(_VARIABLE)
    if not text:
        return 0
    if text in map(str, _TREES):
        return int(text)
    try:
        return int(bool(environment.switch(_VARIABLE)))
    except ArgumentError:
        raise ArgumentError(
            f"{_VARIABLE} must be 1 or 0, or 2, 4 or 8 ranks; got {text!r}. Change it, or unset it."
        ) from None


def is_enabled() -> bool:
    """Return whether calls must be batch-invariant: the context decides, else the environment."""
    return mode() > 0


def effective_impl(operator: Operator, impl: str) -> str:
    """Return the word of ``impl`` that counts: the caller's, or the mode's where it is enabled.

    Where an operator has several invariant implementations and the caller names one, that is the
    mode's word with the name behind it; see :func:`name_in`. If the number of ranks must not
    matter, the word has it; see :func:`most_ranks_in`.

    Raises:
        ArgumentError: The mode is enabled, and the implementation that was asked for is not
            invariant, or the operator has none.
    """
    asked = mode()
    if not asked or (impl == BATCH_INVARIANT and asked == 1):
        return impl
    word = BATCH_INVARIANT if asked == 1 else f"{BATCH_INVARIANT} {_RANKS}{asked}"
    if impl in operator.choosers:
        require_invariant(operator)
        return word
    names = [implementation.name for implementation in invariant_implementations(operator)]
    if operator.implementation(impl).is_batch_invariant:
        return word if len(names) == 1 else f"{word} {impl}"
    raise ArgumentError(
        f"{operator.name}: impl must be {' or '.join(map(repr, ['auto', *names]))} within "
        f"interlace.batch_invariant(); got {impl!r}, which may give a row other bits in another "
        "batch."
    )


_RANKS = "ranks="


def is_invariant(impl: str) -> bool:
    """Return whether a word of :func:`effective_impl` asks for batch invariance."""
    return impl.startswith(BATCH_INVARIANT)


def name_in(impl: str) -> str:
    """Return a word of :func:`effective_impl` without the mode's: what the caller has named, which
    is empty where the mode alone was asked for.
    """
    *_, last = impl.removeprefix(BATCH_INVARIANT).split(" ")
    return "" if last.startswith(_RANKS) else last


def most_ranks_in(impl: str) -> int:
    """Return the largest number of ranks that a word of :func:`effective_impl` names, which must
    all give the same bits; 1 if it names none.
    """
    numbers = [word.removeprefix(_RANKS) for word in impl.split(" ") if word.startswith(_RANKS)]
    return int(numbers[0]) if numbers else 1


def leaves_of(name: str, most_ranks: int, world_size: int, inner: int, dtype: torch.dtype) -> int:
    """Return the leaves that a rank has of the tree in which K is added; see
    :func:`batch_invariant`.

    Args:
        name: The operator's name.
        most_ranks: The leaves of all ranks.
        world_size: The number of ranks.
        inner: The rank's columns of K.
        dtype: The operands' dtype.

    Raises:
        ArgumentError: The ranks do not divide the leaves, a leaf is no whole steps, or operands
            have scales, which follow the ranks' parts of K.
    """
    context = f"within interlace.batch_invariant(ranks={most_ranks})"
    if most_ranks % world_size:
        raise ArgumentError(
            f"{name}: the number of ranks must divide {most_ranks} {context}; got {world_size}. "
            "Use 1, 2, 4 or 8 ranks, or interlace.batch_invariant() without ranks."
        )
    if dtype not in _TESTED_DTYPES:
        raise ArgumentError(
            f"{name}: operands must be float16, bfloat16 or float32 {context}; got {dtype}, whose "
            "scales depend on the number of ranks. Call it outside of the context."
        )
    leaves = most_ranks // world_size
    if inner < 1 or inner % (LEAST_LEAF * leaves):
        raise ArgumentError(
            f"{name}: K of all ranks must be a multiple of {LEAST_LEAF * most_ranks} {context}; "
            f"got {inner * world_size}. Pad K with zeros, or take fewer ranks."
        )
    return leaves


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
    first, *later = invariant_implementations(operator)
    if not has_one_arithmetic(device, dtype):
        if named in ("", first.name):
            return first
        raise ArgumentError(
            f"{operator.name}: impl={named!r} must run on a GPU that is known to add up products "
            f"in one way to be batch-invariant. Take impl='auto' or {first.name!r}."
        )
    if named:
        return operator.implementation(named)
    able = {
        implementation.name: implementation
        for implementation in (first, *later)
        if implementation.refusal(terms) is None
    }
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
