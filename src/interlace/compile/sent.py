"""Fusion of collectives that take a product, or a sum of products: all-reduce, reduce-scatter and
all-to-all.

Sums of products are the gradient of several column-parallel layers that have one input.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import casts, collectives, norms, rows
from interlace.compile.choice import (
    choose_in_group,
    choose_sum,
    nodes_of,
    overload,
    usable_ranks,
)
from interlace.compile.collectives import Collective
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import (
    Writer,
    are_equal,
    argument,
    aten,
    erase_unused,
    is_cast,
    is_static,
    require_unchanged,
    value,
)
from interlace.compile.producers import Product, product_of, require_suitable, rows_of
from interlace.gemm import invariance
from interlace.gemm.operands import contiguous_dimension
from interlace.registry import Operator, operator_matching

_FEW_TOKENS = 128
"""Below this many tokens a product takes the time of reading its weight, and another collective
costs more than an operator saves (measured on H200s).
"""


@dataclasses.dataclass(frozen=True)
class _Term:
    """A product before a collective, or a term of a sum of products.

    Attributes:
        product: The term's product.
        steps: The ways of its rows: from the product to the first sum, from there to the next one,
            and so on to the collective. A step is the nodes at which it begins and ends.
    """

    product: Product
    steps: list[tuple[Node, Node]]

    @functools.cached_property
    def moves(self) -> list[tuple[Node, list[Node]]]:
        """The node at which each step begins, and the calls that move its rows.

        Raises:
            LeftAlone: A call does more than move rows.
        """
        return [(start, rows.region(start, end)) for start, end in self.steps]

    def x(self, writer: Writer) -> Node:
        """Return x as ``[M, K]``, its rows in the order in which the collective takes the sum's."""
        x, inner = self.product.x, self.product.inner
        for start, nodes in self.moves:
            x = writer.reshape(x, [*value(start).shape[:-1], inner])
            if nodes and nodes[-1] not in rows.in_order(start, nodes):
                x = rows.replay(writer, nodes, start, x)
        return writer.reshape(x, [rows_of(self.product), inner])

    def scales(self, writer: Writer) -> list[Node | None]:
        """Return the scales of a product of float8, else None twice.

        Raises:
            LeftAlone: Rows are moved that have scales of their own.
        """
        x_scale = self.product.x_scale
        for start, nodes in self.moves:
            is_moved = bool(nodes) and nodes[-1] not in rows.in_order(start, nodes)
            if x_scale is not None and value(x_scale).numel() > 1 and is_moved:
                raise LeftAlone(f"{nodes[-1].name} moves rows that have scales of their own")
        return self.product.scales(writer)


def all_reduce(collective: Collective) -> tuple[str, str]:
    """Replace a product or a sum of products, its all-reduce, and the residual and the norm that
    follow, by a fused operator.

    Returns:
        The operator's name, and why it is faster.
    """
    collective.require_sum()
    terms = _terms_of(collective)
    if len(terms) == 1:
        return _all_reduce_of_product(collective, terms[0].product)
    nodes, ranks = _way(collective, terms)
    fused = operator_matching("gemm", "all_reduce")
    dtype = casts.sent_dtype(terms[0].product, nodes, collective)
    _, reason = _choose(fused, terms, ranks, collective, dtype)
    writer = Writer(collective.node, collective.node)
    x, w = _side_by_side(terms, writer)
    options = [None, None, None, dtype, collective.group_name, "auto", ""]
    y = writer.call(overload(fused.name), x, w, *options)
    collective.become(y, writer, nodes)
    return fused.name, reason + casts.note_of(terms[0].product, dtype)


def _all_reduce_of_product(collective: Collective, product: Product) -> tuple[str, str]:
    """Replace a single product, of any number of rows; the operator comes in its place."""
    moves = list(rows.upstream(collective.input))[:-1]
    casts_between = [node for node in moves if is_cast(node)]
    for node in moves:
        if node.target not in rows.MOVES and node not in casts_between:
            raise LeftAlone(f"{node.name} takes parts of the product")
    dtype = casts.sent_dtype(product, moves, collective)
    ranks = usable_ranks(collective.group_name, product.device)
    note = ""
    try:
        tail = norms.tail_of(collective)
        if tail is not None and casts_between:
            raise LeftAlone(f"{casts_between[0].name} casts the product to {dtype} before the sum")
        if tail is not None:
            return norms.fuse(collective, product, tail, ranks)
    except LeftAlone as refusal:
        note = f"; the norm that follows is not part of it: {refusal}"
    tokens = rows_of(product)
    writer = Writer(product.node, collective.node)
    fused = operator_matching("gemm", "all_reduce")
    is_free = dtype == product.dtype and not invariance.is_enabled()
    if product.bias is not None and tokens < _FEW_TOKENS and is_free:
        raise LeftAlone(
            "a bias is added before the sum, which for few tokens costs a collective of its own"
        )
    reason = choose_in_group(fused, product, tokens, ranks, collective.group_name, dtype)
    x = product.rows(writer)
    bias = _summed_bias(product, dtype, collective.group_name, writer)
    options = [bias, *product.scales(writer), dtype, collective.group_name, "auto", ""]
    y = writer.call(overload(fused.name), x, product.weight(writer), *options)
    product.node.replace_all_uses_with(writer.shaped_as(y, value(product.node)))
    erase_unused([product.node])
    if casts_between:
        casts.remove(casts_between, moves)
    # ``y`` stands at the product's position and already holds the sum over ranks; the nodes that
    # moved the product now move the sum, so the collective is replaced by its own operand.
    after = Writer(collective.node, collective.node)
    collective.replace(after.laid_out_as(argument(collective.node, "input"), collective.result))
    return fused.name, reason + casts.note_of(product, dtype) + note


def reduce_scatter(collective: Collective) -> tuple[str, str]:
    """Replace a product or a sum of products and its reduce-scatter by a fused operator.

    Returns:
        The operator's name, and why it is faster.
    """
    collective.require_sum()
    terms = _terms_of(collective)
    nodes, ranks = _way(collective, terms)
    collective.require_even(ranks)
    fused, product = operator_matching("gemm", "reduce_scatter"), terms[0].product
    dtype = casts.sent_dtype(product, nodes, collective)
    is_one_product, reason = _choose(fused, terms, ranks, collective, dtype)
    writer = Writer(collective.node, collective.node)
    if is_one_product:
        name, (x, w) = fused.name, _side_by_side(terms, writer)
        bias = _summed_bias(product, dtype, collective.group_name, writer)
        scales = terms[0].scales(writer)
        options = [bias, *scales, None, dtype, collective.group_name, "auto", ""]
        y = writer.call(overload(name), x, w, *options)
    else:
        name = fused.sum_name
        xs, ws = [term.x(writer) for term in terms], [term.product.weight(writer) for term in terms]
        y = writer.call(overload(name), xs, ws, collective.group_name)
    collective.become(y, writer, nodes)
    return name, reason + casts.note_of(product, dtype)


def all_to_all(collective: Collective) -> tuple[str, str]:
    """Replace a product and its all-to-all by a fused operator.

    Returns:
        The operator's name, and why it is faster.
    """
    terms = _terms_of(collective)
    if len(terms) > 1:
        raise LeftAlone("it is a sum of products, which no operator sends by an all-to-all")
    nodes, ranks = _way(collective, terms)
    collective.require_even_splits(ranks)
    product = terms[0].product
    dtype = casts.sent_dtype(product, nodes, collective)
    if dtype.itemsize < product.dtype.itemsize:
        raise LeftAlone(
            f"the product is cast to {dtype} before it is sent, and would take more bytes as "
            f"{product.dtype}"
        )
    fused = operator_matching("gemm", "all_to_all")
    reason = choose_in_group(fused, product, rows_of(product), ranks, collective.group_name)
    writer = Writer(collective.node, collective.node)
    options = [product.bias, *terms[0].scales(writer), None, None, product.dtype]
    y = writer.call(
        overload(fused.name),
        terms[0].x(writer),
        product.weight(writer),
        *options,
        collective.group_name,
        "auto",
        "",
    )
    # Elements only move, so a cast may come after the exchange as well, and fewer bytes are sent.
    collective.become(casts.cast_to(dtype, y, writer), writer, nodes)
    return fused.name, reason


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
        terms = _terms_of(collective, is_part=True)
        nodes, ranks = _way(collective, terms, is_part=True)
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


def _terms_of(collective: Collective, *, is_part: bool = False) -> list[_Term]:
    """Return the product that a collective takes, or the terms of the sum, checked.

    Args:
        collective: The collective.
        is_part: Whether it is to become a part of a sum.

    Returns:
        The terms, that with the largest K first. Nobody else uses what lies between their products
        and the collective.

    Raises:
        LeftAlone: There is no such product, or no operator can compute it, or the sum.
    """
    *_, first = rows.upstream(collective.input)
    if not _adds_products(first):
        raise LeftAlone(f"what goes into it is {first.name}, not a product")
    # The largest product comes first because it is the one that a kernel computes in parts.
    terms = sorted(_terms(collective.input, []), key=lambda term: -term.product.inner)
    products = [term.product for term in terms]
    is_sum = is_part or len(terms) > 1
    nodes = {node for term in terms for _, end in term.steps for node in rows.upstream(end)}
    collective.require_no_other_use(sorted(nodes), "a part of the sum" if is_sum else "the product")
    for product in products:
        require_suitable(product)
        if is_sum and product.bias is not None:
            raise LeftAlone(f"{product.node.name} adds a bias to a part of the sum")
        if is_sum and product.x_scale is not None:
            raise LeftAlone(f"{product.node.name} is a part of a sum, and has scales of its own")
        if is_sum and not is_static(*value(product.x).shape):
            raise LeftAlone("sizes change from call to call (dynamic shapes)")
    if len({product.dtype for product in products}) > 1:
        raise LeftAlone("it is a sum of products of several dtypes")
    collective.require_waiting()
    require_unchanged(min(product.node for product in products), collective.node)
    return terms


def _adds_products(node: Node) -> bool:
    """Return whether ``node`` is a product or a sum of products, whose rows may be moved."""
    *_, node = rows.upstream(node)
    if node.target is aten.add.Tensor:
        return all(isinstance(term, Node) and _adds_products(term) for term in node.args)
    return product_of(node, scaled=True) is not None


def _terms(end: Node, later: list[tuple[Node, Node]]) -> Iterator[_Term]:
    """Yield the terms of the sum ``end``; ``later`` are the steps of the sum's rows."""
    *_, first = rows.upstream(end)
    steps = [(first, end), *later]
    product = product_of(first, scaled=True)
    if product is not None:
        yield _Term(product, steps)
        return
    for term in first.args[:2]:
        assert isinstance(term, Node)  # a sum of products, all of them nodes
        has_all_rows = are_equal(value(term).shape, value(first).shape)
        if first.kwargs.get("alpha", 1) != 1 or not has_all_rows:
            raise LeftAlone(f"{first.name} scales or repeats what it adds")
        yield from _terms(term, steps)


def _way(
    collective: Collective, terms: list[_Term], *, is_part: bool = False
) -> tuple[list[Node], int]:
    """Return the products and the nodes between them and a collective, and the number of ranks.

    Raises:
        LeftAlone: Something else than moves of rows lies between them, or operators cannot run on
            the group.
    """
    nodes = {node for term in terms for start, moved in term.moves for node in (start, *moved)}
    device = terms[0].product.device
    ranks = usable_ranks(collective.group_name, device)
    if (is_part or len(terms) > 1) and nodes_of(collective.group_name, device) > 1:
        raise LeftAlone("it is a sum of products, which operators compute within a node")
    return sorted(nodes), ranks


def _choose(
    fused: Operator,
    terms: list[_Term],
    ranks: int,
    collective: Collective,
    dtype: torch.dtype,
) -> tuple[bool, str]:
    """Return whether an operator takes the terms as one product, and why it is faster.

    Raises:
        LeftAlone: The pair is faster, or nothing is known.
    """
    products = [term.product for term in terms]
    count = rows_of(products[0])
    if len(products) > 1:
        return choose_sum(fused, products, count, ranks, dtype)
    return True, choose_in_group(fused, products[0], count, ranks, collective.group_name, dtype)


def _summed_bias(
    product: Product, dtype: torch.dtype, group_name: str, writer: Writer
) -> Node | None:
    """Add an all-reduce of the product's bias in a dtype, and return its result; None without a
    bias.
    """
    # Each rank adds its own bias before the sum, so the sum over ranks contains all of them. The
    # operators add a bias once, after the sum: it must be the sum of all ranks' biases.
    if product.bias is None:
        return None
    bias = casts.cast_to(dtype, product.bias, writer)
    total = writer.call(collectives.ALL_REDUCE, bias, "sum", group_name)
    return writer.call(collectives.WAIT, total)


def _side_by_side(terms: list[_Term], writer: Writer) -> tuple[Node, Node]:
    """Return x ``[M, K]`` and w ``[N, K]`` of one product that equals the sum; K is the total."""
    xs = [term.x(writer) for term in terms]
    weights = [term.product.weight(writer) for term in terms]
    if len(terms) == 1:
        return xs[0], weights[0]
    x = writer.call(aten.cat.default, xs, 1)
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
