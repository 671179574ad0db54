"""Fusion of sums of products with the collective that follows.

Such a sum is the gradient of several column-parallel layers that have one input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch.fx import Graph, Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import casts, collectives, rows
from interlace.compile.choice import choose_sum, nodes_of, overload, usable_ranks
from interlace.compile.collectives import Collective
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import (
    Writer,
    are_equal,
    aten,
    erase_unused,
    is_cast,
    is_static,
    value,
)
from interlace.compile.producers import Product, product_of, require_suitable
from interlace.compile.requirements import (
    require_even,
    require_even_splits,
    require_no_other_use,
    require_unchanged,
    rows_of,
)
from interlace.gemm.operands import contiguous_dimension
from interlace.registry import operator_matching


@dataclasses.dataclass(frozen=True)
class _Term:
    """A term of a sum of products before a collective.

    Attributes:
        product: The term's product.
        moves: Steps that move the product's rows: from the product to the first sum, from there to
            the next one, and so on. A step is the node at which rows start, and the calls.
    """

    product: Product
    moves: list[tuple[Node, list[Node]]]

    def x(self, writer: Writer) -> Node:
        """Return x as ``[M, K]``, its rows in the order in which the collective takes the sum's."""
        x, inner = self.product.x, self.product.inner
        for start, nodes in self.moves:
            x = writer.reshape(x, [*value(start).shape[:-1], inner])
            if nodes and nodes[-1] not in rows.in_order(start, nodes):
                x = rows.replay(writer, nodes, start, x)
        return writer.reshape(x, [rows_of(self.product), inner])


def is_sum(node: Node) -> bool:
    """Return whether ``node`` is a sum of products, whose rows may be moved."""
    *_, first = rows.upstream(node)
    return first.target is aten.add.Tensor and _adds_products(first)


def _adds_products(node: Node) -> bool:
    """Return whether ``node`` is a product or a sum of products, whose rows may be moved."""
    *_, node = rows.upstream(node)
    if node.target is aten.add.Tensor:
        return all(isinstance(term, Node) and _adds_products(term) for term in node.args)
    return product_of(node) is not None


def reduce_scatter(collective: Collective) -> tuple[str, str]:
    """Replace a sum of products and its reduce-scatter by a fused operator.

    Returns:
        The operator's name, and why it is faster.
    """
    terms, nodes, ranks = _read(collective)
    require_even(collective, ranks)
    operator = operator_matching("gemm", "reduce_scatter")
    products = [term.product for term in terms]
    dtype = casts.sent_dtype(products[0], nodes, collective)
    side_by_side, reason = choose_sum(operator, products, rows_of(products[0]), ranks, dtype)
    writer = Writer(collective.node, collective.node)
    if side_by_side:
        name, (x, w) = operator.name, _side_by_side(terms, writer)
        options = [None, None, None, None, dtype, collective.group_name, "auto", ""]
        y = writer.call(overload(name), x, w, *options)
    else:
        name = operator.sum_name
        xs, ws = [term.x(writer) for term in terms], [term.product.weight(writer) for term in terms]
        y = writer.call(overload(name), xs, ws, collective.group_name)
    collective.become(y, writer, nodes)
    return name, reason + casts.note_of(products[0], dtype)


def all_reduce(collective: Collective) -> tuple[str, str]:
    """Replace a sum of products and its all-reduce by a fused operator.

    Returns:
        The operator's name, and why it is faster.
    """
    terms, nodes, ranks = _read(collective)
    operator = operator_matching("gemm", "all_reduce")
    products = [term.product for term in terms]
    dtype = casts.sent_dtype(products[0], nodes, collective)
    _, reason = choose_sum(operator, products, rows_of(products[0]), ranks, dtype)
    writer = Writer(collective.node, collective.node)
    x, w = _side_by_side(terms, writer)
    options = [None, None, None, dtype, collective.group_name, "auto", ""]
    y = writer.call(overload(operator.name), x, w, *options)
    collective.become(y, writer, nodes)
    return operator.name, reason + casts.note_of(products[0], dtype)


def all_to_all(collective: Collective) -> tuple[str, str]:
    """Replace a sum of products or of batches and its all-to-all by a fused operator.

    Returns:
        The operator's name, and why it is faster.
    """
    terms, nodes, ranks = _read(collective, batches=True)
    products = [term.product for term in terms]
    require_even_splits(collective, ranks)
    for cast in filter(is_cast, nodes):
        raise LeftAlone(f"{cast.name} casts a part of the sum, which no operator does before it")
    if len({product.batch for product in products}) > 1:
        raise LeftAlone("it is a sum of batches of several sizes")
    batch = products[0].batch
    if batch > 1 and not all(rows.is_by_ranks(term.moves, ranks) for term in terms):
        raise LeftAlone("it is a sum of batches, and its rows are not for one rank after the other")
    operator = operator_matching("bmm", "all_to_all")
    _, reason = choose_sum(operator, products, rows_of(products[0]), ranks)
    writer = Writer(collective.node, collective.node)
    xs = [
        term.product.x if batch > 1 else writer.call(aten.unsqueeze.default, term.x(writer), 0)
        for term in terms
    ]
    ws = [product.weights(writer) for product in products]
    y = writer.call(overload(operator.sum_name), xs, ws, collective.group_name)
    collective.become(y, writer, nodes)
    return operator.sum_name, reason


def merge_all_reduces(graph: Graph) -> dict[Node, str]:
    """Merge all-reduces whose results are added into one all-reduce of the sum.

    This is done if an operator is faster for the sum of products. It saves the bytes of all
    all-reduces but one; for example, the gradient of queries, keys and values needs only one.

    Returns:
        The all-reduces that were erased, each with the name of the one that includes it now.
    """
    merged = {}
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        try:
            first, second = _merge(node)
        except LeftAlone:
            # Both all-reduces are considered separately later, and report their own reasons.
            continue
        merged[first] = second.name
    return merged


def _merge(add: Node) -> tuple[Node, Node]:
    """Merge two all-reduces whose results are added and not used otherwise.

    Returns:
        The all-reduce that was erased, and the one that is left.

    Raises:
        LeftAlone: ``add`` adds something else, or merging is not faster.
    """
    waits = [
        term for term in add.args[:2] if isinstance(term, Node) and term.target is collectives.WAIT
    ]
    if len(set(waits)) < 2 or add.kwargs.get("alpha", 1) != 1:
        raise LeftAlone("it adds something else")
    first, second = sorted(
        (collectives.read(wait.all_input_nodes[0]) for wait in waits),
        key=lambda collective: collective.node,
    )
    products: list[Product] = []
    for collective in (first, second):
        if collective.target is not collectives.ALL_REDUCE or not collectives.is_only_use(
            add, collective.waits[0]
        ):
            raise LeftAlone("it adds something else than all-reduces, or they have other uses")
        collective.require_sum()
        if not _adds_products(collective.input):
            raise LeftAlone(f"what goes into {collective.node.name} is no product")
        terms, nodes, ranks = _read(collective)
        products += [term.product for term in terms]
        dtype = casts.sent_dtype(products[0], nodes, collective)
    if len({product.dtype for product in products}) > 1:
        raise LeftAlone("they are sums of products of several dtypes")
    kinds = [(read.group_name, read.result.dtype, read.result.shape) for read in (first, second)]
    if kinds[0] != kinds[1]:
        raise LeftAlone("their groups, dtypes or shapes differ")
    require_unchanged(min(product.node for product in products), second.node)
    operator = operator_matching("gemm", "all_reduce")
    choose_sum(operator, products, rows_of(products[0]), ranks, dtype)
    total = Writer(second.node, add).call(aten.add.Tensor, first.input, second.input)
    second.node.update_arg(0, total)
    add.replace_all_uses_with(second.waits[0])
    erase_unused([add, first.waits[0], first.node])
    return first.node, second.node


def _read(collective: Collective, batches: bool = False) -> tuple[list[_Term], list[Node], int]:
    """Return the terms of the sum before a collective, checked.

    Args:
        collective: The collective that takes the sum.
        batches: Whether batches of several products are accepted.

    Returns:
        The terms, that with the largest K first; the nodes between products and collective; the
        number of ranks.

    Raises:
        LeftAlone: No operator can compute the sum.
    """
    # The largest product comes first because it is the one that a kernel computes in parts.
    terms = sorted(_terms(collective.input, []), key=lambda term: -term.product.inner)
    products = [term.product for term in terms]
    nodes = sorted(
        {node for term in terms for start, moved in term.moves for node in (start, *moved)}
    )
    require_no_other_use(nodes, collective, "a part of the sum")
    for product in products:
        require_suitable(product, batches)
        if product.bias is not None:
            raise LeftAlone(f"{product.node.name} adds a bias to a part of the sum")
        if not is_static(*value(product.x).shape):
            raise LeftAlone("sizes change from call to call (dynamic shapes)")
    if len({product.dtype for product in products}) > 1:
        raise LeftAlone("it is a sum of products of several dtypes")
    collective.require_waiting()
    require_unchanged(min(product.node for product in products), collective.node)
    ranks = usable_ranks(collective.group_name, products[0].device)
    if nodes_of(collective.group_name, products[0].device) > 1:
        raise LeftAlone("it is a sum of products, which operators compute within a node")
    return terms, nodes, ranks


def _terms(end: Node, later: list[tuple[Node, list[Node]]]) -> Iterator[_Term]:
    """Yield the terms of the sum ``end``; ``later`` are the steps that move the sum's rows."""
    *_, first = rows.upstream(end)
    moves = [(first, rows.region(first, end)), *later]
    if first.target is aten.add.Tensor:
        for term in first.args[:2]:
            assert isinstance(term, Node)  # a sum of products, all of them nodes
            has_all_rows = are_equal(value(term).shape, value(first).shape)
            if first.kwargs.get("alpha", 1) != 1 or not has_all_rows:
                raise LeftAlone(f"{first.name} scales or repeats what it adds")
            yield from _terms(term, moves)
        return
    product = product_of(first)
    assert product is not None
    yield _Term(product, moves)


def _side_by_side(terms: list[_Term], writer: Writer) -> tuple[Node, Node]:
    """Return x ``[M, K]`` and w ``[N, K]`` of one product that equals the sum; K is the total."""
    x = writer.call(aten.cat.default, [term.x(writer) for term in terms], 1)
    weights = [term.product.weight(writer) for term in terms]
    if contiguous_dimension(value(weights[0])) == 1:
        return x, writer.call(aten.cat.default, weights, 1)
    # Weights that are contiguous along N are concatenated as ``[K, N]`` and viewed as ``[N, K]``,
    # so that their layout stays: a concatenation along the other dimension would transpose them.
    stacked = writer.call(
        aten.cat.default,
        [writer.call(aten.permute.default, weight, [1, 0]) for weight in weights],
        0,
    )
    return x, writer.call(aten.permute.default, stacked, [1, 0])
