"""Measure what batch invariance costs: equal calls by ``impl="auto"`` and ``"batch_invariant"``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from interlace.bench import products
from interlace.bench.benchmark import Way, relative_error
from interlace.comm import group_of
from interlace.registry import BATCH_INVARIANT, operator_named
from interlace.units import round_up

_WORDS = ("auto", BATCH_INVARIANT)


def bench(
    operator: str, tokens: int, columns: int, inner: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Check and time one call both ways; collective.

    Args:
        operator: The operator's name.
        tokens: Rows of the product; rounded up until ranks share them out evenly, where they do.
        columns, inner: N and K of one rank's weight ``[N, K]``.
        dtype: The operands' dtype.

    Returns:
        The result, whose ``times`` are those of the two words of ``impl``.

    Raises:
        InterlaceError: A result is wrong; nothing is timed then.
    """
    if operator_named(operator).collective != "all_reduce":
        tokens = round_up(tokens, group_of().world_size)
    case = products.TimedProduct(products.ProductShape(operator, tokens, columns, inner, dtype))
    ways = [_way(word, case.call) for word in _WORDS]
    expected = case.expected(0)
    worst = max(
        case.accept([relative_error(way.call(0), expected)], way.name)  # type: ignore[arg-type]
        for way in ways
    )
    times = case.time(ways)
    case.owner.release()
    return {
        "operator": operator,
        "tokens": tokens,
        "columns": columns,
        "inner": inner,
        "dtype": str(dtype).removeprefix("torch."),
        "world_size": case.owner.world_size,
        "relative_error": worst,
        "times": times,
    }


def _way(word: str, call: Any) -> Way:
    return Way(word, "ours", functools.partial(call, impl=word), word)
