"""Collectives whose result goes into a product."""

from __future__ import annotations

import operator

from torch.fx import Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import rows
from interlace.compile.choice import choose, overload, usable_ranks
from interlace.compile.collectives import Collective
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import Writer, aten, erase_unused, evaluate, value, views_since
from interlace.compile.producers import Product, product_of, require_suitable
from interlace.compile.requirements import require_even_splits, require_unchanged, rows_of
from interlace.registry import operator_matching


def all_gather(collective: Collective) -> tuple[str, str]:
    """Put an operator in the place of an all-gather and the product that takes it; its name, and
    why it is faster.
    """
    product = _product_after(collective)
    collective.require_waiting()
    require_unchanged(collective.node, product.node)
    ranks = usable_ranks(collective.group_name, product.device)
    fused = operator_matching("all_gather", "gemm")
    reason = choose(fused, product, rows_of(product), ranks)
    writer = _writer_before_use(collective, product)
    x = writer.reshape(collective.input, [rows_of(product) // ranks, product.inner])
    pair = writer.call(
        overload(fused.name),
        x, product.weight(writer), product.bias, None, None, None, product.dtype, True,
        collective.group_name, "auto", "",
    )  # fmt: skip
    y, gathered = (writer.call(operator.getitem, pair, place) for place in (0, 1))
    _put_gathered(collective, product, writer, y, gathered)
    if len(pair.users) == 1:  # nothing else uses what is gathered
        pair.update_arg(7, False)
        evaluate(pair)
    return fused.name, reason


def _put_gathered(
    collective: Collective, product: Product, writer: Writer, y: Node, gathered: Node
) -> None:
    """Let ``y [M, N]`` take the place of the product, and ``gathered [M, K]`` of the collective for
    what else uses it.
    """
    wait = collective.waits[0]
    nodes = rows.region(wait, product.x)
    kept = rows.in_order(wait, nodes)
    if product.x not in kept:
        y = rows.replay(
            writer, nodes, wait, writer.reshape(y, [*value(wait).shape[:-1], product.columns])
        )
    _put_product(product, writer, y)
    _put_rows(kept, nodes, writer, gathered)
    # Before nodes go: the writer's place is at one of them
    whole = writer.reshape(gathered, value(wait).shape)
    erase_unused(nodes)
    collective.replace(whole)
    erase_unused([whole, gathered])


def all_to_all(collective: Collective) -> tuple[str, str]:
    """The same for an all-to-all that brings, from each rank, rows for each product of a batch, or
    for one product.
    """
    product = _product_after(collective, batches=True)
    collective.require_waiting()
    require_unchanged(collective.node, product.node)
    ranks = usable_ranks(collective.group_name, product.device)
    require_even_splits(collective, ranks)
    wait = collective.waits[0]
    nodes = rows.region(wait, product.x)
    by_products = rows.by_products(wait, nodes, product.batch, ranks)
    if product.x not in by_products:
        raise LeftAlone(
            f"the rows of {product.node.name} are not those from one rank after the other"
        )
    if product.bias is not None:
        raise LeftAlone(f"{product.node.name} adds a bias, which cuBLAS does not do for a batch")
    fused = operator_matching("all_to_all", "bmm")
    reason = choose(fused, product, rows_of(product), ranks)
    writer = _writer_before_use(collective, product)
    x = writer.reshape(collective.input, [rows_of(product), product.inner])
    pair = writer.call(
        overload(fused.name),
        x,
        product.weights(writer),
        collective.group_name,
        "auto",
    )
    y, received = (writer.call(operator.getitem, pair, place) for place in (0, 1))
    _put_product(product, writer, y)
    _put_rows(by_products, nodes, writer, received)
    apart = writer.reshape(received, [product.batch, ranks, -1, product.inner])
    turned = writer.call(aten.permute.default, apart, [1, 0, 2, 3])
    whole = writer.reshape(turned, value(wait).shape)  # as they came, for what else uses them
    erase_unused(nodes)
    collective.replace(whole)
    erase_unused([*rows.upstream(whole)][:-1])
    return fused.name, reason


def _product_after(collective: Collective, batches: bool = False) -> Product:
    """Of the products with the collective's rows the one with most columns, which hides most; a
    batch of them if ``batches``.
    """
    found: list[Product] = []
    refusals: list[str] = []
    first_use = min(user for wait in collective.waits for user in wait.users)
    for node in _downstream(collective.waits):
        product = product_of(node)
        if product is None:
            continue
        try:
            if collective.waits[0] not in rows.upstream(product.x):
                raise LeftAlone(f"it brings the weight of {node.name}, or a part of it")
            require_suitable(product, batches)
            rows.region(collective.waits[0], product.x)
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
            found.append(product)
        except LeftAlone as why:
            refusals.append(str(why))
    if not found:
        raise LeftAlone("; ".join(refusals) or "no product takes what it brings")
    return max(found, key=lambda product: product.columns)


def _downstream(waits: list[Node]) -> list[Node]:
    """Users of what waits return, moved or not."""
    found: list[Node] = []
    pending = [user for wait in waits for user in wait.users]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.append(node)
        if rows.moves_rows(node) or node.target in rows.MOVES:
            pending += node.users
    return sorted(found)


def _writer_before_use(collective: Collective, product: Product) -> Writer:
    """Before the first use of what a collective brings, where an operator in its place must stand;
    views of weights move there.
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
    """Let ``y``, of as many elements, take the place of a product."""
    product.node.replace_all_uses_with(
        writer.laid_out_as(writer.reshape(y, value(product.node).shape), value(product.node))
    )
    erase_unused([product.node])


def _put_rows(kept: list[Node], nodes: list[Node], writer: Writer, brought: Node) -> None:
    """Let what was ``brought`` take the place of one of ``kept``, which have all its rows in its
    order.

    Nodes other than ``nodes`` use that one.
    """
    used = [node for node in kept if any(user not in nodes for user in node.users)]
    if len(used) == 1:  # several may have been copies of each other, and must not become views
        used[0].replace_all_uses_with(writer.reshape(brought, value(used[0]).shape))
