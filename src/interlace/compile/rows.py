"""Calls that move a tensor's rows between a product and a collective, applied to other tensors.

A *row* is a vector along the last dimension. Views, permutations, splits and concatenations that
leave the last dimension alone only move rows. They may therefore move the rows of x before the
product instead of those of its result: if ``P`` is the permutation, ``P(x @ w.T) = P(x) @ w.T``.
DTensor spells gathers and scatters along any dimension but the first with such calls. Casts, as
mixed precision puts them between, leave every row in its place, so they count as such calls here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.node import map_arg

from interlace.compile.findings import LeftAlone
from interlace.compile.graph import (
    VIEWS,
    Writer,
    are_equal,
    arguments_of,
    aten,
    is_cast,
    is_static,
    value,
)

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SAME = (aten.clone.default, aten.alias.default, aten.detach.default)
_SQUEEZES = (aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)
_CUTS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.slice.Tensor,
    aten.cat.default,
)

# The arguments that name dimensions, for each further call that may move rows.
_DIMENSIONS: dict[Any, tuple[str, ...]] = {
    aten.transpose.int: ("dim0", "dim1"),
    **dict.fromkeys((*_SQUEEZES, *_CUTS), ("dim",)),
}

_MOVING = (*_RESHAPES, *_SAME, operator.getitem, aten.permute.default, *_DIMENSIONS)


def _keeps_columns(node: Node) -> bool:
    """Return whether one of the calls above leaves the last dimension alone."""
    if node.target in (*_SAME, operator.getitem):
        return True
    source = value(node.all_input_nodes[0])
    if node.target in _RESHAPES:
        before, after = source.shape, value(node).shape
        return len(before) > 1 and len(after) > 1 and are_equal(before[-1:], after[-1:])
    # A new dimension is named by its place in the result.
    count = source.dim() + (node.target is aten.unsqueeze.default)
    arguments = arguments_of(node)
    if node.target is aten.permute.default:
        return bool(arguments["dims"][-1] % count == count - 1)
    named = [arguments[name] for name in _DIMENSIONS[node.target]]
    dimensions = named[0] if isinstance(named[0], (list, tuple)) else named
    return count - 1 not in {dimension % count for dimension in dimensions}


_ORDERLY = (*_RESHAPES, *_SAME, *_SQUEEZES)

# Calls that move all elements and change none, so that a sum over ranks may come before them.
MOVES = (*VIEWS, *_RESHAPES, *_SAME)


def moves_rows(node: Node) -> bool:
    """Return whether a call is of a kind that can move rows, or a cast; its dimensions are not
    checked.
    """
    return node.op == "call_function" and (node.target in _MOVING or is_cast(node))


def keeps_order(node: Node) -> bool:
    """Return whether a call only changes the shape of its argument, and no row's place or length.

    It holds for any number of rows, also if their number changes from call to call.
    """
    return node.op == "call_function" and node.target in _ORDERLY and _keeps_columns(node)


def upstream(node: Node) -> Iterator[Node]:
    """Yield ``node``, the node that it was moved from, and so on; the last one was not moved."""
    yield node
    while moves_rows(node) or (node.op == "call_function" and node.target in MOVES):
        source = node.args[0]
        source = source[0] if isinstance(source, (list, tuple)) else source
        if not isinstance(source, Node):
            return
        node = source
        yield node


def region(start: Node, end: Node) -> list[Node]:
    """Return the calls that turn ``start`` into ``end`` by moving rows, and casts, in the graph's
    order.

    The last call is ``end``; ``start`` is not among them.

    Raises:
        LeftAlone: A call does more than move rows, or rows of another tensor are mixed in.
    """
    region_nodes: set[Node] = set()
    pending = [end]
    while pending:
        node = pending.pop()
        if node is start or node in region_nodes:
            continue
        if not moves_rows(node):
            raise LeftAlone(f"{node.name} comes between {start.name} and {end.name}")
        if not is_cast(node) and not _keeps_columns(node):
            raise LeftAlone(f"{node.name} cuts or reorders the columns of {start.name}")
        if not is_static(*_shape(node)):
            raise LeftAlone("sizes change from call to call (dynamic shapes)")
        region_nodes.add(node)
        pending += node.all_input_nodes
    if not is_static(*value(start).shape) or value(start).numel() != value(end).numel():
        raise LeftAlone(
            f"{end.name} has only some rows of {start.name}, or sizes change from call to call "
            "(dynamic shapes)"
        )
    return sorted(region_nodes)


def _shape(node: Node) -> tuple[Any, ...]:
    """Return the sizes of a node's tensor, or of all its tensors one after the other."""
    result = node.meta.get("val")
    return (
        tuple(size for part in result for size in part.shape)
        if isinstance(result, (list, tuple))
        else tuple(value(node).shape)
    )


def in_order(start: Node, nodes: list[Node]) -> list[Node]:
    """Return ``start`` and the nodes that have all its rows in its order.

    For example, a gather along the second dimension, spelled as split and concatenation, leaves
    rows in order if the first dimension is 1.
    """
    order = _order(start, nodes)
    with unset_fake_temporarily():
        return [node for node, rows in order.items() if torch.equal(rows, order[start])]


def _order(start: Node, nodes: list[Node]) -> dict[Node, torch.Tensor]:
    """Return, for ``start`` and each node, the row numbers of ``start`` that its rows have."""
    # The calls are run on a tensor of row numbers with a single column. Fake tensors hold no
    # values, so the fake mode of the compiler is left for this.
    leading = value(start).shape[:-1]
    with unset_fake_temporarily():
        index = torch.arange(leading.numel(), device="cpu")
        done: dict[Node, Any] = {start: index.view(*leading, 1)}
        for node in nodes:
            if is_cast(node):
                done[node] = done[node.all_input_nodes[0]]
            elif node.target in _RESHAPES:
                done[node] = done[node.all_input_nodes[0]].reshape(*value(node).shape[:-1], 1)
            else:
                target: Any = node.target
                args, kwargs = _mapped((node.args, node.kwargs), done)
                done[node] = target(*args, **kwargs)
        return {
            node: moved.flatten() for node, moved in done.items() if isinstance(moved, torch.Tensor)
        }


def replay(writer: Writer, nodes: list[Node], start: Node, replacement: Node) -> Node:
    """Apply to ``replacement`` the calls ``nodes``, which move the rows of ``start``, but no casts.

    Args:
        writer: Adds the new calls.
        nodes: The calls, as :func:`region` returns them.
        start: The node that they were applied to.
        replacement: A node with as many rows and another number of columns.

    Returns:
        The last new call, or ``replacement`` if there are none.
    """
    columns = int(value(replacement).shape[-1])
    done = {start: replacement}
    for node in nodes:
        if is_cast(node):
            done[node] = done[node.all_input_nodes[0]]
            continue
        if node.target in _RESHAPES:
            assert isinstance(node.args[0], Node)
            done[node] = writer.reshape(done[node.args[0]], [*value(node).shape[:-1], columns])
            continue
        args, kwargs = _mapped((node.args, node.kwargs), done)
        done[node] = writer.call(node.target, *args, **kwargs)
    return done[nodes[-1]] if nodes else replacement


def _mapped(arguments: Any, done: dict[Node, Any]) -> Any:
    """Return ``arguments`` with each node replaced by its entry in ``done``."""
    return map_arg(arguments, lambda node: done[node])
