"""Casts between a product and a collective, which mixed precision puts there.

``torch.autocast`` casts a layer's input where the layer reads it. If the input was gathered first,
the graph gathers float32 and casts what it has gathered; in the backward pass, the gradient of that
cast turns the product back into float32 before ranks add it up.

A cast of every element commutes with a collective that only moves elements: to cast before an
all-gather gives the same bits and sends fewer bytes. It does not commute with a sum, whose parts
must be added in the dtype that the program has chosen; but operators return a sum in any float
dtype, and add it up in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import torch
from torch.fx import Node

from interlace.compile import rows
from interlace.compile.collectives import Collective
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import CAST, Writer, aten, evaluate, is_cast, value
from interlace.compile.producers import Product, product_of
from interlace.gemm.operands import FLOATS


def sent_dtype(product: Product, nodes: Iterable[Node], collective: Collective) -> torch.dtype:
    """Return the dtype in which a collective takes a product.

    Args:
        product: The product.
        nodes: The nodes between the product and the collective.
        collective: The collective that takes the product.

    Raises:
        LeftAlone: The product is cast several times in turn, or to a dtype that operators do not
            return.
    """
    dtype = value(collective.input).dtype
    for cast in filter(is_cast, nodes):
        if dtype not in FLOATS:
            raise LeftAlone(
                f"{cast.name} casts the product to {dtype}; operators return float16, bfloat16 and "
                "float32"
            )
        source = value(cast.all_input_nodes[0])
        if (source.dtype, value(cast).dtype) != (product.dtype, dtype):
            raise LeftAlone(
                f"{cast.name} casts the product from {source.dtype} to {value(cast).dtype}, but it "
                f"is computed in {product.dtype} and sent in {dtype}"
            )
    return dtype


def note_of(product: Product, dtype: torch.dtype) -> str:
    """Return a finding's note on the dtype of the sum; empty if it is that of the products."""
    return "" if dtype == product.dtype else f"; it returns {dtype}, to which the product is cast"


def cast_to(dtype: torch.dtype, node: Node, writer: Writer) -> Node:
    """Return ``node`` in a dtype; itself if it has this dtype already."""
    return node if value(node).dtype == dtype else writer.call(CAST, node, dtype)


def remove(casts: Collection[Node], nodes: Iterable[Node]) -> None:
    """Remove casts whose operands come in the right dtype by now.

    Args:
        casts: The casts to remove.
        nodes: These casts and all nodes that lead to them. The graph still says of these nodes that
            they have the former dtype.
    """
    for node in sorted(nodes):
        if node in casts:
            node.replace_all_uses_with(node.all_input_nodes[0])
            node.graph.erase_node(node)
        else:
            evaluate(node)


def require_movable(collective: Collective, product: Product) -> None:
    """Raise :class:`LeftAlone` if a cast of what a collective brings cannot come before it.

    There need not be a cast between the collective and the product.

    Args:
        collective: A collective that only moves elements.
        product: A product of what it brings.
    """
    nodes = rows.region(collective.waits[0], product.x)
    casts = [node for node in nodes if is_cast(node)]
    if not casts:
        return
    before, after = collective.result.dtype, product.dtype
    if after.itemsize > before.itemsize:
        raise LeftAlone(
            f"{casts[0].name} casts what it brings from {before} to {after}, which would be more "
            "bytes to send"
        )
    first_casts, uncast = _readers(collective, after)
    for node in casts:
        if node not in first_casts:
            raise LeftAlone(f"{node.name} casts what it brings to {value(node).dtype} in between")
    moved = {collective.node, *collective.waits, *uncast}
    for node in (collective.node, *collective.waits, *uncast):
        for user in node.users:
            if user not in moved and user not in first_casts:
                raise LeftAlone(
                    f"{user.name} uses what it brings before {casts[0].name} casts it to {after}"
                )
    for node in uncast:
        for source in node.all_input_nodes:
            if source not in moved:
                raise LeftAlone(
                    f"{node.name} mixes what it brings with {source.name} before the cast"
                )


def move_before(collective: Collective, product: Product) -> tuple[Collective, Product, str]:
    """Cast a collective's operand instead of what it brings, which gives the same bits.

    :func:`require_movable` must have found nothing against it.

    Returns:
        The collective and the product as they are now, and a note for the finding. Without a cast
        between the two, nothing is changed, and the note is empty.
    """
    dtype = product.dtype
    if collective.result.dtype == dtype:
        return collective, product, ""
    casts, uncast = _readers(collective, dtype)
    node = collective.node
    note = f"; it sends {dtype}, to which {casts[0].name} casts what it brings"
    cast = Writer(node, casts[0]).call(CAST, collective.input, dtype)
    node.replace_input_with(collective.input, cast)
    for sent in (node, *collective.waits):
        sent.meta["val"] = value(sent).to(dtype)
    # Results of several casts are different memory, and must not become views of one tensor.
    for further in casts[1:]:
        copy = Writer(further, further).call(aten.clone.default, further.all_input_nodes[0])
        further.replace_all_uses_with(copy)
        uncast.append(copy)
    remove(casts, [*casts, *uncast])
    narrowed = product_of(product.node)
    assert narrowed is not None
    return dataclasses.replace(collective, input=cast), narrowed, note


def _readers(collective: Collective, dtype: torch.dtype) -> tuple[list[Node], list[Node]]:
    """Return the first calls that cast what a collective brings to a dtype, in the graph's order;
    and the calls that move elements between the collective and these casts.
    """
    casts: set[Node] = set()
    uncast: set[Node] = set()
    pending = list(collective.waits)
    while pending:
        for user in pending.pop().users:
            if is_cast(user):
                if value(user).dtype == dtype:
                    casts.add(user)
            elif user not in uncast and (rows.moves_rows(user) or user.target in rows.MOVES):
                uncast.add(user)
                pending.append(user)
    return sorted(casts), sorted(uncast)
