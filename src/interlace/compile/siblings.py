"""Products of a few rows with the same input become one kernel: queries, keys and values; gate and
up.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import rows
from interlace.compile.choice import overload, require_runnable
from interlace.compile.findings import PRODUCTS, Finding, LeftAlone, module_of
from interlace.compile.graph import (
    Writer,
    erase_unused,
    is_static,
    move_before,
    require_unchanged,
    value,
)
from interlace.compile.producers import Product, product_of, require_suitable, rows_of
from interlace.gemm import invariance
from interlace.gemm.few_rows import MOST_WEIGHTS
from interlace.operators.linears import MOST_TOKENS, OPERATOR


def merge(graph: Graph, direction: str) -> list[Finding]:
    """Put one operator in the place of products with the same input, where it can compute them.

    Where calls must be batch-invariant it takes the place of every product that it can compute
    without its bits depending on the number of rows, also of those that are alone.

    Args:
        graph: The graph, in which collectives have been fused already.
        direction: ``"forward"`` or ``"backward"``, for the findings.

    Returns:
        A finding for each group of products that was merged.
    """
    is_invariant = invariance.is_enabled()
    # No backward pass is batch-invariant: gradients of weights are sums over the batch.
    if is_invariant and direction == "backward":
        return []
    fewest = 1 if is_invariant else 2
    inputs: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        product = product_of(node)
        if product is not None and _is_suitable(product):
            key = _source(product.x), product.bias is None, product.dtype
            inputs.setdefault(key, []).append(node)
    return [
        _merge(group, direction)
        for nodes in inputs.values()
        for group in _groups(nodes)
        if len(group) >= fewest
    ]


def _groups(nodes: list[Node]) -> Iterator[list[Product]]:
    """Yield products of one input that one operator can compute in the first one's place.

    What the later ones multiply by is moved before the first one.

    Args:
        nodes: The products. Merging others, those of the last group among them, may move these and
            change what they multiply, so each is read when its turn comes.
    """
    group: list[Product] = []
    for node in sorted(nodes):
        if group and not (len(group) < MOST_WEIGHTS and _joins(group, _read(node))):
            yield group
            group = []
        group.append(_read(node))
    yield group


def _read(node: Node) -> Product:
    product = product_of(node)
    assert product is not None
    return product


def _joins(group: list[Product], product: Product) -> bool:
    """Move what ``product`` multiplies by before a group of earlier products of its input.

    Returns:
        Whether it could be moved; if not, nothing was changed.
    """
    first, members = group[0].node, [sibling.node for sibling in group]
    # A copy of the input holds what the input was when it was copied.
    are_one = len({sibling.x for sibling in (*group, product)}) == 1
    operands = [product.w] if product.bias is None else [product.w, product.bias]
    try:
        require_unchanged(first if are_one else min(first, _source(product.x)), product.node)
        moves = [move_before(first, operand, members) for operand in operands]
    except LeftAlone:
        return False
    for move in moves:
        move()
    return True


def _is_suitable(product: Product) -> bool:
    """Return whether the operator can compute a product, in less time than PyTorch's or, where
    that is asked for, with the same bits in every batch.
    """
    try:
        require_suitable(product)
        require_runnable(product.device)
        suits = rows_of(product) <= MOST_TOKENS
        if invariance.is_enabled():
            suits = invariance.has_one_arithmetic(product.device, product.dtype)
    except LeftAlone:
        return False
    is_matrix = value(product.w).dim() == 2
    return suits and product.w_along_k and product.dtype.itemsize == 2 and is_matrix


def _source(x: Node) -> Node:
    """Return the node of which ``x`` is a view with the same rows in the same order."""
    while rows.keeps_order(x) and is_static(value(x).shape[-1]):
        assert isinstance(x.args[0], Node)
        x = x.args[0]
    return x


def _merge(products: list[Product], direction: str) -> Finding:
    """Replace up to three products by one operator, and return the finding."""
    first, x = products[0].node, products[0].x
    names = [product.node.name for product in products]
    finding = Finding(
        graph=direction,
        collective=PRODUCTS,
        node=", ".join(names),
        shape=tuple(size if isinstance(size, int) else str(size) for size in value(x).shape),
        module=module_of(first),
        operator=OPERATOR,
        reason=(
            "calls must be batch-invariant"
            if invariance.is_enabled()
            else f"{len(products)} products of one input in one kernel"
        ),
    )
    writer = Writer(first, first)
    results = writer.call(
        overload(OPERATOR),
        products[0].rows(writer),
        [product.weight(writer) for product in products],
        [product.bias for product in products],
    )
    for index, product in enumerate(products):
        y = writer.call(operator.getitem, results, index)
        product.node.replace_all_uses_with(writer.shaped_as(y, value(product.node)))
    operands = [node for product in products for node in (product.x, product.w)]
    leftovers = [node for node in operands if node.op == "call_function"]
    erase_unused([*(product.node for product in products), *leftovers])
    return finding
