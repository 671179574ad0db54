"""What must hold where an operator takes the place of a product and a collective; each raises
:class:`LeftAlone` if it does not.
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


def require_no_other_use(nodes: Collection[Node], collective: Collective, what: str) -> None:
    """Raise :class:`LeftAlone` if anything that does not lead to the collective uses one of
    ``nodes``, which do.
    """
    allowed = {collective.node, *nodes}
    for node in nodes:
        outside = [user for user in node.users if user not in allowed]
        if outside and not _reaches(node, allowed):
            raise LeftAlone(f"{outside[0].name} uses {what}, too")


def _reaches(node: Node, allowed: set[Node]) -> bool:
    """Whether every use of ``node`` is a part of the way to the collective, other parts of a split
    included.
    """
    pending = [user for user in node.users if user not in allowed]
    while pending:
        user = pending.pop()
        if not rows.moves_rows(user) or not user.users:
            return False
        pending += [after for after in user.users if after not in allowed]
    return True


def require_unchanged(first: Node, last: Node) -> None:
    """Raise :class:`LeftAlone` if anything between two nodes writes to memory: what a product reads
    must still be the same.
    """
    for node in between(first, last):
        if changes_memory(node):
            raise LeftAlone(f"{node.name} changes memory in between")


def require_even(collective: Collective, ranks: int) -> None:
    if value(collective.input).dim() < 2 or value(collective.input).shape[0] % ranks:
        raise LeftAlone(f"its first dimension does not divide evenly over {ranks} ranks")


def require_even_splits(collective: Collective, ranks: int) -> None:
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
    """Rows of a product; the ones it was traced with where they may change from call to call."""
    leading = value(product.x).shape[:-1]
    if is_static(*leading):
        return int(torch.Size(leading).numel())
    size: Any = leading[0]
    hint = size.node.hint if len(leading) == 1 else None
    if hint is None:
        raise LeftAlone("sizes change from call to call (dynamic shapes)")
    return int(hint)
