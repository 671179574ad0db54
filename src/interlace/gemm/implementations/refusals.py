"""Refusals: the operands that an implementation cannot take, as sentences for
``Implementation.refusal``.
"""

from __future__ import annotations

from collections.abc import Callable

from interlace.gemm.terms import Terms


def needs(
    *, even_rows: bool = False, same_dtype: bool = False, no_bias: bool = False
) -> Callable[[Terms], str | None]:
    """Return a refusal of calls without these properties.

    Args:
        even_rows: Every rank must get as many rows from every rank.
        same_dtype: The result must have the dtype of x.
        no_bias: There must be no bias.
    """

    def refusal(terms: Terms) -> str | None:
        unmet = []
        if even_rows and not terms.is_even:
            unmet.append("rows that are split evenly")
        if same_dtype and terms.converts:
            unmet.append("a result of the dtype of x")
        if no_bias and terms.has_bias:
            unmet.append("no bias")
        return " and ".join(unmet) or None

    return refusal
