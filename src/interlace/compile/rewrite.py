"""The pass, which replaces each pair of product and collective in a graph by one operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import (
    casts,
    collectives,
    foreign,
    foreign_norms,
    normed,
    received,
    rows,
    siblings,
    sums,
)
from interlace.compile.choice import choose_in_group, overload, usable_ranks
from interlace.compile.collectives import Collective
from interlace.compile.findings import Finding, LeftAlone, module_of, record
from interlace.compile.graph import (
    Writer,
    are_equal,
    argument,
    aten,
    erase_unused,
    is_cast,
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
from interlace.gemm import invariance
from interlace.registry import operator_matching, operators

_FEW_TOKENS = 128
"""Below this many tokens a product takes the time of reading its weight, and another collective
costs more than an operator saves (measured on H200s).
"""


def fuse(graph: Graph, *, autotune: bool = True, merge_products: bool = True) -> list[Finding]:
    """Replace each pair of product and collective by a fused operator if it is known to be faster.

    Nothing is computed or sent.

    Args:
        graph: A graph of ATen operators after autograd, forward or backward, as AOTAutograd passes
            it to a compiler. It is changed in place; pairs that are left alone stay unchanged.
        autotune: Whether operators measure their implementations at the first call of a kind that
            is not captured in a CUDA graph (see :func:`interlace.autotune`), where they can.
        merge_products: Whether products of up to 64 rows with the same input become one kernel.

    Returns:
        A finding for every collective of the graph, and for all products that became one kernel.
    """
    direction = (
        "backward"
        if any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))
        else "forward"
    )
    replace_copies(graph)
    spelled, refused = foreign.spell_out(graph)
    norms = foreign_norms.spell_out(graph, {spelling.wait for spelling in spelled})
    try:
        findings = _fuse_all(graph, direction)
    finally:
        for norm in norms:
            norm.finish()
        for spelling in spelled:
            spelling.finish()
    findings += [
        Finding(**_description(node, direction), operator=None, reason=reason)
        for node, reason in refused
    ]
    if merge_products:
        findings += siblings.merge(graph, direction)
    if any(finding.operator for finding in findings):
        if autotune:
            _let_measure(graph)
        graph.lint()
    record(findings)
    return findings


def _fuse_all(graph: Graph, direction: str) -> list[Finding]:
    """Try to fuse every collective of ``torch.distributed``, and return a finding for each."""
    # Collectives are described before any is rewritten: later their operands may be gone.
    descriptions = {
        node: _description(node, direction)
        for node in graph.nodes
        if collectives.is_collective(node)
    }
    merged = sums.merge_all_reduces(graph)
    return [
        Finding(
            **description,
            operator=operator_matching("gemm", "all_reduce").name,
            reason=f"added to {merged[node]} before it is reduced",
        )
        if node in merged
        else _consider(node, description)
        for node, description in descriptions.items()
    ]


def _let_measure(graph: Graph) -> None:
    """Let the operators of a graph measure, where they would go by predictions."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") != "interlace":
            continue
        declaration = operators().get(str(node.target).split(".")[1])
        # The last two arguments are impl and config.
        if declaration is not None and "measured" in declaration.choosers:
            *arguments, impl, config = node.args
            if impl == "auto":
                node.args = (*arguments, "measured", config)


def replace_copies(graph: Graph) -> None:
    """Replace the copy with which an in-place collective ends, by the collective's result.

    ``dist.all_reduce(y)`` is traced as a collective of y, a wait, and ``copy(y, waited)``, the new
    y. The copy takes of y only its shape, strides and dtype, which the result has as well; but it
    is another use of the product. So is a new tensor that a collective's result is copied to, such
    as ``product.new_empty(shape)``: it is erased together with the copy.

    If the program goes on using the result beside the copy, the copy becomes a clone of the result:
    the program may write to either, and the other must not change.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        target, source = (argument(node, 0, "self"), argument(node, 1, "src"))
        if not isinstance(source, Node) or source.target is not collectives.WAIT:
            continue
        with contextlib.suppress(LeftAlone):
            layout = value(target)
            if not _has_layout_of(layout, value(source)):
                continue
            result = source
            if not collectives.is_only_use(node, source):
                result = Writer(node, node).call(aten.clone.default, source)
            if not _has_layout_of(layout, value(result)):
                graph.erase_node(result)
                continue
            node.replace_all_uses_with(result)
            graph.erase_node(node)
            if not target.is_impure():
                erase_unused([target])


def _has_layout_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    kinds = [(each.dtype, each.device) for each in (tensor, other)]
    layouts = [(*each.shape, *each.stride()) for each in (tensor, other)]
    return kinds[0] == kinds[1] and are_equal(*layouts)


def _description(node: Node, direction: str) -> dict[str, Any]:
    """Return the finding's fields that are known before the rewrite is tried."""
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    shape = getattr(source.meta.get("val"), "shape", ())
    return {
        "graph": direction,
        "collective": str(node.target).split(".")[1],
        "node": node.name,
        "shape": tuple(size if isinstance(size, int) else str(size) for size in shape),
        "module": module_of(node),
    }


def _consider(node: Node, description: dict[str, Any]) -> Finding:
    """Fuse a collective with its product if possible, and return the finding."""
    try:
        collective = collectives.read(node)
        name, reason = _FUSE[collective.target](collective)
    except LeftAlone as refusal:
        return Finding(**description, operator=None, reason=str(refusal))
    return Finding(**description, operator=name, reason=reason)


# Pairs in which the product comes first: its result goes into the collective


def _product_before(collective: Collective, batches: bool = False) -> Product:
    """Return the product whose result goes into a collective and nowhere else.

    The rows of the result may be moved in between.

    Args:
        collective: The collective that takes the result.
        batches: Whether a batch of several products is accepted.

    Raises:
        LeftAlone: There is no such product, or no operator can compute it here.
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


def _all_reduce(collective: Collective) -> tuple[str, str]:
    """Fuse an all-reduce with the product, or sum of products, before it; and with residual and
    norm after it.
    """
    collective.require_sum()
    if sums.is_sum(collective.input):
        return sums.all_reduce(collective)
    product = _product_before(collective)
    moves = list(rows.upstream(collective.input))[:-1]
    casts_between = [node for node in moves if is_cast(node)]
    for node in moves:
        if node.target not in rows.MOVES and node not in casts_between:
            raise LeftAlone(f"{node.name} takes parts of the product")
    dtype = casts.sent_dtype(product, moves, collective)
    ranks = usable_ranks(collective.group_name, product.device)
    note = ""
    try:
        tail = normed.tail_of(collective)
        if tail is not None and casts_between:
            raise LeftAlone(f"{casts_between[0].name} casts the product to {dtype} before the sum")
        if tail is not None:
            return normed.fuse(collective, product, tail, ranks)
    except LeftAlone as refusal:
        note = f"; the norm that follows is not part of it: {refusal}"
    tokens = rows_of(product)
    writer = Writer(product.node, collective.node)
    operator = operator_matching("gemm", "all_reduce")
    is_free = dtype == product.dtype and not invariance.is_enabled()
    if product.bias is not None and tokens < _FEW_TOKENS and is_free:
        raise LeftAlone(
            "a bias is added before the sum, which for few tokens costs a collective of its own"
        )
    reason = choose_in_group(operator, product, tokens, ranks, collective.group_name, dtype)
    x = product.rows(writer)
    bias = _summed_bias(product, dtype, collective.group_name, writer)
    y = writer.call(
        overload(operator.name), x, product.weight(writer), bias, None, None, dtype,
        collective.group_name, "auto", "",
    )  # fmt: skip
    if value(y).dim() != value(product.node).dim():
        y = writer.reshape(y, value(product.node).shape)
    product.node.replace_all_uses_with(writer.laid_out_as(y, value(product.node)))
    erase_unused([product.node])
    if casts_between:
        casts.remove(casts_between, moves)
    # ``y`` stands at the product's position and already holds the sum over ranks; the nodes that
    # moved the product now move the sum, so the collective is replaced by its own operand.
    after = Writer(collective.node, collective.node)
    collective.replace(after.laid_out_as(argument(collective.node, 0, "input"), collective.result))
    return operator.name, reason + casts.note_of(product, dtype) + note


def _moved(collective: Collective, product: Product, writer: Writer, nodes: list[Node]) -> Node:
    """Return x as ``[M, K]``, its rows in the order in which the collective takes the product's."""
    kept = collective.input in rows.in_order(product.node, nodes)
    x = product.x if kept else rows.replay(writer, nodes, product.node, product.x)
    return writer.reshape(x, [rows_of(product), product.inner])


def _rows_before(
    collective: Collective, batches: bool = False
) -> tuple[Product, list[Node], int, Writer]:
    """Return the parts of the pair for a collective that splits rows by rank.

    Returns:
        The product, the nodes that move its rows, the number of ranks, and a writer at the
        collective's position.
    """
    product = _product_before(collective, batches)
    nodes = rows.region(product.node, collective.input)
    ranks = usable_ranks(collective.group_name, product.device)
    require_even(collective, ranks)
    return product, nodes, ranks, Writer(collective.node, collective.node)


def _reduce_scatter(collective: Collective) -> tuple[str, str]:
    """Fuse a reduce-scatter with the product, or sum of products, before it."""
    collective.require_sum()
    if sums.is_sum(collective.input):
        return sums.reduce_scatter(collective)
    product, nodes, ranks, writer = _rows_before(collective)
    dtype = casts.sent_dtype(product, nodes, collective)
    operator = operator_matching("gemm", "reduce_scatter")
    reason = choose_in_group(
        operator, product, rows_of(product), ranks, collective.group_name, dtype
    )
    x = _moved(collective, product, writer, nodes)
    bias = _summed_bias(product, dtype, collective.group_name, writer)
    y = writer.call(
        overload(operator.name),
        x,
        product.weight(writer),
        bias,
        *[None, None, None, dtype, collective.group_name, "auto", ""],
    )
    collective.become(y, writer, [*nodes, product.node])
    return operator.name, reason + casts.note_of(product, dtype)


def _all_to_all(collective: Collective) -> tuple[str, str]:
    """Fuse an all-to-all with the product before it or, failing that, with the one after it."""
    # A product between two all-to-alls can be fused with either; the first one is read first.
    try:
        return _all_to_all_of_product(collective)
    except LeftAlone as refusal:
        try:
            return received.all_to_all(collective)
        except LeftAlone as refusal_after:
            raise LeftAlone(f"{refusal}; {refusal_after}") from None


def _all_to_all_of_product(collective: Collective) -> tuple[str, str]:
    """Fuse an all-to-all with the product, batch, or sum of either whose rows it sends."""
    if sums.is_sum(collective.input):
        return sums.all_to_all(collective)
    product, nodes, ranks, writer = _rows_before(collective, batches=True)
    require_even_splits(collective, ranks)
    dtype = casts.sent_dtype(product, nodes, collective)
    if dtype.itemsize < product.dtype.itemsize:
        raise LeftAlone(
            f"the product is cast to {dtype} before it is sent, and would take more bytes as "
            f"{product.dtype}"
        )
    if product.batch > 1:
        return _all_to_all_of_batch(collective, product, nodes, ranks, writer)
    operator = operator_matching("gemm", "all_to_all")
    reason = choose_in_group(operator, product, rows_of(product), ranks, collective.group_name)
    x = _moved(collective, product, writer, nodes)
    y = writer.call(
        overload(operator.name),
        x,
        product.weight(writer),
        product.bias,
        *[None, None, None, None, product.dtype, collective.group_name, "auto", ""],
    )
    collective.become(casts.cast_to(dtype, y, writer), writer, [*nodes, product.node])
    return operator.name, reason


def _all_to_all_of_batch(
    collective: Collective, product: Product, nodes: list[Node], ranks: int, writer: Writer
) -> tuple[str, str]:
    """Fuse an all-to-all with the batch ``[B, R * share, N]`` before it.

    Each rank receives ``[R, B, share, N]``.
    """
    if not rows.is_by_ranks([(product.node, nodes)], ranks):
        raise LeftAlone(
            f"{product.node.name} is a batch of products, and its rows are not for one rank after "
            "the other"
        )
    operator = operator_matching("bmm", "all_to_all")
    reason = choose_in_group(operator, product, rows_of(product), ranks, collective.group_name)
    y = writer.call(
        overload(operator.name),
        product.x,
        product.w,
        collective.group_name,
        "auto",
    )
    # Elements only move, so a cast may come after the exchange as well, and fewer bytes are sent.
    y = casts.cast_to(value(collective.input).dtype, y, writer)
    collective.become(y, writer, [*nodes, product.node])
    return operator.name, f"a batch of {product.batch}: {reason}"


_FUSE: dict[Any, Callable[[Collective], tuple[str, str]]] = {
    collectives.ALL_REDUCE: _all_reduce,
    collectives.REDUCE_SCATTER: _reduce_scatter,
    collectives.ALL_TO_ALL: _all_to_all,
    collectives.ALL_GATHER: received.all_gather,
}
