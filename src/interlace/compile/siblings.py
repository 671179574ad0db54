"""Products of a few rows with the same input become one kernel: queries, keys and values; gate and
up.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import rows
from interlace.compile.choice import overload, require_runnable
from interlace.compile.findings import PRODUCTS, Finding, LeftAlone, module_of
from interlace.compile.graph import Writer, erase_unused, is_static, move_before, value
from interlace.compile.producers import Product, product_of, require_suitable
from interlace.compile.requirements import require_unchanged, rows_of
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
    groups: dict[Any, list[Product]] = {}
    for node in graph.nodes:
        product = product_of(node)
        if product is not None and _is_suitable(product):
            key = _source(product.x), product.bias is None, product.dtype
            groups.setdefault(key, []).append(product)
    findings = []
    for products in groups.values():
        for first in range(0, len(products), MOST_WEIGHTS):
            group = products[first : first + MOST_WEIGHTS]
            if len(group) >= fewest:
                findings += _merge(group, direction)
    return findings


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
    w = value(product.w)
    along_k = (w.mT if product.by_columns else w).stride(-1) == 1
    return suits and along_k and product.dtype.itemsize == 2 and w.dim() == 2


def _source(x: Node) -> Node:
    """Return the node of which ``x`` is a view with the same rows in the same order."""
    while rows.keeps_order(x) and is_static(value(x).shape[-1]):
        assert isinstance(x.args[0], Node)
        x = x.args[0]
    return x


def _merge(products: list[Product], direction: str) -> list[Finding]:
    """Replace two or three products by one operator, and return the finding, if it is possible."""
    first, last = products[0].node, products[-1].node
    x = products[0].x
    try:
        require_unchanged(first, last)
        vectors = [product.bias for product in products if product.bias is not None]
        moving = [
            move_before(first, node, ())
            for node in [*(product.w for product in products), *vectors]
        ]
    except LeftAlone:
        return []
    for move in moving:
        move()
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
    return [finding]
