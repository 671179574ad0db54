"""The pass: pairs of product and collective in a graph become one operator each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import collectives, received, rows, sums
from interlace.compile.choice import all_reduce_operator, choose, overload, usable_ranks
from interlace.compile.collectives import Collective
from interlace.compile.findings import Finding, LeftAlone, module_of, record
from interlace.compile.graph import Writer, argument, erase_unused, value
from interlace.compile.producers import Product, product_of, require_suitable
from interlace.compile.requirements import (
    require_even,
    require_even_splits,
    require_no_other_use,
    require_unchanged,
    rows_of,
)
from interlace.gemm.operator import GemmOperator
from interlace.registry import operator_matching


def fuse(graph: Graph) -> list[Finding]:
    """Replace each pair of product and collective by the fused operator that the tuned table says
    is faster.

    Args:
        graph: of ATen operators, after autograd: what AOTAutograd hands to a compiler, forward or
            backward. It is changed in place, and is as it was wherever a pair is left alone.
            Nothing is computed or sent.

    Returns:
        A finding for every collective in it.
    """
    direction = (
        "backward"
        if any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))
        else "forward"
    )
    found = {
        node: _said(node, direction) for node in graph.nodes if collectives.is_collective(node)
    }
    merged = sums.merge_all_reduces(graph)
    findings = [
        Finding(
            **said,
            operator=operator_matching("gemm", "all_reduce").name,
            reason=f"added to {merged[node]} before it is reduced",
        )
        if node in merged
        else _consider(node, said)
        for node, said in found.items()
    ]
    if any(finding.operator for finding in findings):
        graph.lint()
    record(findings)
    return findings


def _said(node: Node, direction: str) -> dict[str, Any]:
    """Of a finding, what does not depend on what becomes of the collective."""
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    shape = getattr(source.meta.get("val"), "shape", ())
    return {
        "graph": direction,
        "collective": str(node.target).split(".")[1],
        "node": node.name,
        "shape": tuple(size if isinstance(size, int) else str(size) for size in shape),
        "module": module_of(node),
    }


def _consider(node: Node, said: dict[str, Any]) -> Finding:
    """Fuse one collective with its product, or say why not."""
    try:
        collective = collectives.read(node)
        name, reason = _FUSE[collective.target](collective)
    except LeftAlone as why:
        return Finding(**said, operator=None, reason=str(why))
    return Finding(**said, operator=name, reason=reason)


# A product's result goes into the collective


def _product_before(collective: Collective, batches: bool = False) -> Product:
    """The product whose result, moved or not, goes into a collective and nowhere else; a batch of
    them if ``batches``.
    """
    *moves, first = rows.upstream(collective.input)
    product = product_of(first)
    if product is None:
        raise LeftAlone(f"what goes into it is {first.name}, not a product")
    require_no_other_use([first, *moves], collective, "the product")
    require_suitable(product, batches)
    collective.require_waiting()
    require_unchanged(first, collective.node)
    return product


def _summed_bias(product: Product, group_name: str, writer: Writer) -> Node | None:
    """What all ranks' biases add to a sum over ranks: each rank has added its own before."""
    if product.bias is None:
        return None
    total = writer.call(collectives.ALL_REDUCE, product.bias, "sum", group_name)
    return writer.call(collectives.WAIT, total)


def _all_reduce(collective: Collective) -> tuple[str, str]:
    collective.require_sum()
    if sums.is_sum(collective.input):
        return sums.all_reduce(collective)
    product = _product_before(collective)
    moves = list(rows.upstream(collective.input))[:-1]
    for node in moves:
        if node.target not in rows.MOVES:
            raise LeftAlone(f"{node.name} takes parts of the product")
    ranks = usable_ranks(collective.group_name, product.device)
    tokens = rows_of(product)
    writer = Writer(product.node, collective.node)
    weight = value(product.w)
    along_k = (weight if not product.by_columns else weight.mT).stride(-1) == 1
    operator = all_reduce_operator(tokens, along_k)
    is_gemm = isinstance(operator, GemmOperator)
    if product.bias is not None and not is_gemm:
        raise LeftAlone(
            "a bias is added before the sum, which for few tokens costs a collective of its own"
        )
    reason = choose(operator, product, tokens, ranks)
    x = _flat(writer, product)
    bias = _summed_bias(product, collective.group_name, writer)
    options = [None, None, product.dtype] if is_gemm else []
    target = overload(operator.name)
    y = writer.call(
        target, x, product.weight(writer), bias, *options, collective.group_name, "auto", ""
    )
    if value(y).dim() != value(product.node).dim():
        y = writer.reshape(y, value(product.node).shape)
    product.node.replace_all_uses_with(writer.laid_out_as(y, value(product.node)))
    erase_unused([product.node])
    after = Writer(collective.node, collective.node)
    collective.replace(after.laid_out_as(argument(collective.node, 0, "input"), collective.result))
    return operator.name, reason


def _flat(writer: Writer, product: Product) -> Node:
    """x as ``[M, K]``."""
    return (
        product.x
        if value(product.x).dim() == 2
        else writer.reshape(product.x, [rows_of(product), product.inner])
    )


def _moved(collective: Collective, product: Product, writer: Writer, nodes: list[Node]) -> Node:
    """x as ``[M, K]``, its rows in the order in which the product's go into the collective."""
    kept = collective.input in rows.in_order(product.node, nodes)
    x = product.x if kept else rows.replay(writer, nodes, product.node, product.x)
    return writer.reshape(x, [rows_of(product), product.inner])


def _rows_before(
    collective: Collective, batches: bool = False
) -> tuple[Product, list[Node], int, Writer]:
    """Of a collective that cuts rows: the product before it, what moves its rows, how many ranks
    there are.
    """
    product = _product_before(collective, batches)
    nodes = rows.region(product.node, collective.input)
    ranks = usable_ranks(collective.group_name, product.device)
    require_even(collective, ranks)
    return product, nodes, ranks, Writer(collective.node, collective.node)


def _reduce_scatter(collective: Collective) -> tuple[str, str]:
    collective.require_sum()
    if sums.is_sum(collective.input):
        return sums.reduce_scatter(collective)
    product, nodes, ranks, writer = _rows_before(collective)
    operator = operator_matching("gemm", "reduce_scatter")
    reason = choose(operator, product, rows_of(product), ranks)
    x = _moved(collective, product, writer, nodes)
    bias = _summed_bias(product, collective.group_name, writer)
    y = writer.call(
        overload(operator.name),
        x, product.weight(writer), bias, None, None, None, product.dtype, collective.group_name,
        "auto", "",
    )  # fmt: skip
    collective.become(y, writer, [*nodes, product.node])
    return operator.name, reason


def _all_to_all(collective: Collective) -> tuple[str, str]:
    """With the product before it or, where there is none or that is not faster, the one after it."""
    try:
        return _all_to_all_of_product(collective)
    except LeftAlone as why:
        try:
            return received.all_to_all(collective)
        except LeftAlone as other:
            raise LeftAlone(f"{why}; {other}") from None


def _all_to_all_of_product(collective: Collective) -> tuple[str, str]:
    """Rows of a product, of a batch of them, or of a sum of these, are sent."""
    if sums.is_sum(collective.input):
        return sums.all_to_all(collective)
    product, nodes, ranks, writer = _rows_before(collective, batches=True)
    require_even_splits(collective, ranks)
    if product.batch > 1:
        return _all_to_all_of_batch(collective, product, nodes, ranks, writer)
    operator = operator_matching("gemm", "all_to_all")
    reason = choose(operator, product, rows_of(product), ranks)
    x = _moved(collective, product, writer, nodes)
    y = writer.call(
        overload(operator.name),
        x, product.weight(writer), product.bias, None, None, None, None, product.dtype,
        collective.group_name, "auto", "",
    )  # fmt: skip
    collective.become(y, writer, [*nodes, product.node])
    return operator.name, reason


def _all_to_all_of_batch(
    collective: Collective, product: Product, nodes: list[Node], ranks: int, writer: Writer
) -> tuple[str, str]:
    """One operator for a batch ``[B, R * share, N]``; it receives ``[R, B, share, N]``."""
    if not rows.is_by_ranks([(product.node, nodes)], ranks):
        raise LeftAlone(
            f"{product.node.name} is a batch of products, and its rows are not for one rank after "
            "the other"
        )
    operator = operator_matching("bmm", "all_to_all")
    reason = choose(operator, product, rows_of(product), ranks)
    y = writer.call(
        overload(operator.name),
        product.x,
        product.w,
        collective.group_name,
        "auto",
    )
    collective.become(y, writer, [*nodes, product.node])
    return operator.name, f"a batch of {product.batch}: {reason}"


_FUSE: dict[Any, Callable[[Collective], tuple[str, str]]] = {
    collectives.ALL_REDUCE: _all_reduce,
    collectives.REDUCE_SCATTER: _reduce_scatter,
    collectives.ALL_TO_ALL: _all_to_all,
    collectives.ALL_GATHER: received.all_gather,
}
