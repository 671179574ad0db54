"""Conditions for the replacement of a product and a collective by a fused operator.

Each function raises :class:`LeftAlone` if its condition does not hold.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from interlace.compile import rows
from interlace.compile.collectives import Collective
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import between, changes_memory, is_static, value
from interlace.compile.producers import Product


def require_no_other_use(nodes: Collection[Node], collective: Collective, description: str) -> None:
    """Raise :class:`LeftAlone` if one of ``nodes`` has a use that does not lead to the collective.

    Args:
        nodes: The product and the nodes between it and the collective.
        collective: The collective that takes them.
        description: The word for ``nodes`` in the message, such as ``"the product"``.
    """
    allowed = {collective.node, *nodes}
    for node in nodes:
        outside = [user for user in node.users if user not in allowed]
        if outside and not _reaches(node, allowed):
            raise LeftAlone(f"{outside[0].name} uses {description}, too")


def _reaches(node: Node, allowed: set[Node]) -> bool:
    """Return whether every use of ``node`` leads to a node of ``allowed``."""
    # The parts of a split are all on the way to the collective if they are concatenated again, so
    # uses are followed downstream as long as they only move rows.
    pending = [user for user in node.users if user not in allowed]
    while pending:
        user = pending.pop()
        if not rows.moves_rows(user) or not user.users:
            return False
        pending += [after for after in user.users if after not in allowed]
    return True


def require_unchanged(first: Node, last: Node) -> None:
    """Raise :class:`LeftAlone` if a node between ``first`` and ``last`` writes to memory."""
    # The product moves to the collective's position (or the reverse), and must still read the same
    # values there. Aliasing is unknown, so any write counts.
    for node in between(first, last):
        if changes_memory(node):
            raise LeftAlone(f"{node.name} changes memory in between")


def require_even(collective: Collective, ranks: int) -> None:
    """Raise :class:`LeftAlone` unless the operand's first dimension divides evenly over ranks."""
    if value(collective.input).dim() < 2 or value(collective.input).shape[0] % ranks:
        raise LeftAlone(f"its first dimension does not divide evenly over {ranks} ranks")


def require_even_splits(collective: Collective, ranks: int) -> None:
    """Raise :class:`LeftAlone` unless an all-to-all's splits are even and known when compiling."""
    require_even(collective, ranks)
    share = value(collective.input).shape[0] // ranks
    if any(
        not isinstance(size, int) or size != share
        for splits in collective.splits
        for size in splits
    ):
        raise LeftAlone(
            "its splits are not even; the operator would compare them on the host in each call"
        )


def rows_of(product: Product) -> int:
    """Return the rows M of a product; if M is dynamic, the value that the graph was traced with.

    Raises:
        LeftAlone: Sizes are dynamic and the traced value is unknown.
    """
    leading = value(product.x).shape[:-1]
    if is_static(*leading):
        return int(torch.Size(leading).numel())
    size: Any = leading[0]
    hint = size.node.hint if len(leading) == 1 else None
    if hint is None:
        raise LeftAlone("sizes change from call to call (dynamic shapes)")
    return int(hint)
