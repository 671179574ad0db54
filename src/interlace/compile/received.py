"""Fusion of all-gathers, whose result goes into a product."""

from __future__ import annotations

import operator

from torch.fx import Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import casts, rows
from interlace.compile.choice import choose_in_group, overload, usable_ranks
from interlace.compile.collectives import Collective
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import (
    Writer,
    erase_unused,
    evaluate,
    require_unchanged,
    value,
    views_since,
)
from interlace.compile.producers import Product, product_of, require_suitable, rows_of
from interlace.registry import operator_matching


def all_gather(collective: Collective) -> tuple[str, str]:
    """Replace an all-gather and the product of the gathered rows by a fused operator.

    Returns:
        The operator's name, and why it is faster.

    Raises:
        LeftAlone: The pair cannot be fused, or is faster.
    """
    product = _product_after(collective)
    collective.require_waiting()
    require_unchanged(collective.node, product.node)
    ranks = usable_ranks(collective.group_name, product.device)
    fused = operator_matching("all_gather", "gemm")
    reason = choose_in_group(fused, product, rows_of(product), ranks, collective.group_name)
    collective, product, note = casts.move_before(collective, product)
    writer = _writer_before_use(collective, product)
    x = writer.reshape(collective.input, [rows_of(product) // ranks, product.inner])
    pair = writer.call(
        overload(fused.name),
        x,
        product.weight(writer),
        product.bias,
        *[None, None, None, product.dtype, True, collective.group_name, "auto", ""],
    )
    y, gathered = (writer.call(operator.getitem, pair, index) for index in (0, 1))
    _put_gathered(collective, product, writer, y, gathered)
    if len(pair.users) == 1:
        # Only the product is used, so the operator need not return the gathered rows. This is
        # known only now that all uses have been rewritten.
        pair.update_arg(7, False)
        evaluate(pair)
    return fused.name, reason + note


def _put_gathered(
    collective: Collective, product: Product, writer: Writer, y: Node, gathered: Node
) -> None:
    """Replace the product by ``y [M, N]``, other uses of the collective by ``gathered [M, K]``."""
    # The program may have reordered the gathered rows before the product. ``y`` has them in the
    # order in which they were gathered, so the same moves are applied to it.
    wait = collective.waits[0]
    nodes = rows.region(wait, product.x)
    kept = rows.in_order(wait, nodes)
    if product.x not in kept:
        y = rows.replay(
            writer, nodes, wait, writer.reshape(y, [*value(wait).shape[:-1], product.columns])
        )
    _put_product(product, writer, y)
    _put_rows(collective, kept, nodes, writer, gathered)
    # The writer inserts before one of the nodes that are erased next, so this comes first.
    collected = writer.reshape(gathered, value(wait).shape)
    erase_unused(nodes)
    collective.replace(collected)
    erase_unused([collected, gathered])


def _product_after(collective: Collective) -> Product:
    """Return the product of the collective's rows that has most columns.

    Raises:
        LeftAlone: No product of these rows can be fused.
    """
    candidates: list[Product] = []
    refusals: list[str] = []
    first_use = min(user for wait in collective.waits for user in wait.users)
    for node in _downstream(collective.waits):
        product = product_of(node)
        if product is None:
            continue
        try:
            if collective.waits[0] not in rows.upstream(product.x):
                raise LeftAlone(f"it brings the weight of {node.name}, or a part of it")
            require_suitable(product)
            casts.require_movable(collective, product)
            # The operator takes the collective's position in the graph, so weight and bias must
            # be computed before the first use of the collective's result.
            origins = [views_since(source, first_use)[0] for source in product.sources]
            late = [
                origin.name
                for origin in origins
                if origin in collective.waits or not origin < first_use
            ]
            if late:
                raise LeftAlone(
                    f"{node.name} multiplies with {late[0]}, which comes after the collective's "
                    "first use"
                )
            candidates.append(product)
        except LeftAlone as why:
            refusals.append(str(why))
    if not candidates:
        raise LeftAlone("; ".join(refusals) or "no product takes what it brings")
    # The product with most columns takes longest, and so hides most of the communication.
    return max(candidates, key=lambda product: product.columns)


def _downstream(waits: list[Node]) -> list[Node]:
    """Return the nodes that use the waits' results, directly or after their rows were moved."""
    users: list[Node] = []
    pending = [user for wait in waits for user in wait.users]
    while pending:
        node = pending.pop()
        if node in users:
            continue
        users.append(node)
        if rows.moves_rows(node) or node.target in rows.MOVES:
            pending += node.users
    return sorted(users)


def _writer_before_use(collective: Collective, product: Product) -> Writer:
    """Return a writer that inserts before the first use of a collective's result.

    Views and casts of weight and bias that come later in the graph are moved before that point.
    """
    anchor = min(
        user
        for node in (collective.node, *collective.waits)
        for user in node.users
        if user not in collective.waits
    )
    for source in product.sources:
        for view in reversed(views_since(source, anchor)[1]):
            anchor.prepend(view)
    return Writer(anchor, product.node)


def _put_product(product: Product, writer: Writer, y: Node) -> None:
    """Replace a product by ``y``, which has as many elements."""
    product.node.replace_all_uses_with(writer.shaped_as(y, value(product.node)))
    erase_unused([product.node])


def _put_rows(
    collective: Collective, kept: list[Node], nodes: list[Node], writer: Writer, brought: Node
) -> None:
    """Replace the node of ``kept`` that has outside users by ``brought``, if no other node has any.

    Args:
        collective: The collective that brings the rows.
        kept: Nodes that have all rows of ``brought`` in its order.
        nodes: The nodes between collective and product; users among them do not count.
        writer: Adds the view that gives ``brought`` the node's shape.
        brought: The rows that the operator returns, gathered or received.
    """
    nodes_of_rows = [collective.node, *collective.waits, *nodes]
    used = [node for node in nodes_of_rows if any(user not in nodes_of_rows for user in node.users)]
    # Some of several nodes in use may be views of each other, and some copies. The program may
    # write to any, so they are left to be computed as they were.
    if len(used) == 1 and used[0] in kept:
        used[0].replace_all_uses_with(writer.reshape(brought, value(used[0]).shape))
