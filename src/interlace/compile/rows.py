"""What happens to a tensor's rows between a product and a collective, done to other rows instead.

A *row* is what lies along the last dimension. Views, permutations, splits and concatenations that
leave the last dimension alone only move rows, so they may as well move a product's rows before it
is computed: with ``P`` for what they do, ``P(x @ w.T) = P(x) @ w.T``. Gathers and scatters along
other dimensions than the first, as DTensor makes them, are this.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.node import map_arg

from interlace.compile.findings import LeftAlone
from interlace.compile.graph import VIEWS, Writer, argument, aten, evaluate, is_static, value

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SAME = (aten.clone.default, aten.alias.default, aten.detach.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


def _dimensions(node: Node) -> tuple[int, int]:
    """Dimensions before and after a call on one tensor."""
    assert isinstance(node.args[0], Node)
    return value(node.args[0]).dim(), value(node).dim()


def _keeps_view(node: Node) -> bool:
    assert isinstance(node.args[0], Node)
    before, after = value(node.args[0]).shape, value(node).shape
    return len(before) > 1 and len(after) > 1 and before[-1] == after[-1]


def _keeps_permute(node: Node) -> bool:
    return int(argument(node, 1, "dims")[-1]) % _dimensions(node)[0] == _dimensions(node)[0] - 1


def _keeps_transpose(node: Node) -> bool:
    last = _dimensions(node)[0] - 1
    return last not in {
        argument(node, 1, "dim0") % (last + 1),
        argument(node, 2, "dim1") % (last + 1),
    }


def _keeps_squeeze(node: Node) -> bool:
    before = _dimensions(node)[0]
    given = argument(node, 1, "dim")
    return before - 1 not in {
        d % before for d in (given if isinstance(given, (list, tuple)) else [given])
    }


def _keeps_unsqueeze(node: Node) -> bool:
    after = _dimensions(node)[1]
    return int(argument(node, 1, "dim")) % after != after - 1


def _keeps_cut(node: Node) -> bool:
    """Of a split: the dimension is not the last."""
    source = node.args[0]
    assert isinstance(source, Node)
    return int(argument(node, 2, "dim", 0)) % value(source).dim() != value(source).dim() - 1


def _keeps_slice(node: Node) -> bool:
    return int(argument(node, 1, "dim", 0)) % _dimensions(node)[0] != _dimensions(node)[0] - 1


def _keeps_cat(node: Node) -> bool:
    return int(argument(node, 1, "dim", 0)) % value(node).dim() != value(node).dim() - 1


_KEEPS: dict[Any, Callable[[Node], bool]] = {
    **dict.fromkeys(_RESHAPES, _keeps_view),
    **dict.fromkeys((*_SAME, operator.getitem), lambda _: True),
    **dict.fromkeys(_SPLITS, _keeps_cut),
    aten.permute.default: _keeps_permute,
    aten.transpose.int: _keeps_transpose,
    aten.squeeze.dim: _keeps_squeeze,
    aten.squeeze.dims: _keeps_squeeze,
    aten.unsqueeze.default: _keeps_unsqueeze,
    aten.slice.Tensor: _keeps_slice,
    aten.cat.default: _keeps_cat,
}

# What moves elements, all of them, and changes none: a sum over ranks may come before it.
MOVES = (*VIEWS, *_RESHAPES, *_SAME)


def moves_rows(node: Node) -> bool:
    """Whether a call may be one that moves rows; whether it is depends on its dimensions."""
    return node.op == "call_function" and node.target in _KEEPS


def upstream(node: Node) -> Iterator[Node]:
    """``node``, what it was moved from, and so on to the first one that was not moved."""
    yield node
    while moves_rows(node) or (node.op == "call_function" and node.target in MOVES):
        source = node.args[0]
        source = source[0] if isinstance(source, (list, tuple)) else source
        if not isinstance(source, Node):
            return
        node = source
        yield node


def region(start: Node, end: Node) -> list[Node]:
    """The calls that move ``start``'s rows until they are ``end``, in the graph's order; ``end`` is
    the last, ``start`` not in it.

    Raises:
        LeftAlone: something else happens to them, or other rows come in.
    """
    found: set[Node] = set()
    pending = [end]
    while pending:
        node = pending.pop()
        if node is start or node in found:
            continue
        if not moves_rows(node):
            raise LeftAlone(f"{node.name} comes between {start.name} and {end.name}")
        if not _KEEPS[node.target](node):
            raise LeftAlone(f"{node.name} cuts or reorders the columns of {start.name}")
        if not is_static(*_shape(node)):
            raise LeftAlone("sizes change from call to call (dynamic shapes)")
        found.add(node)
        pending += node.all_input_nodes
    if not is_static(*value(start).shape) or value(start).numel() != value(end).numel():
        raise LeftAlone(
            f"{end.name} has only some rows of {start.name}, or sizes change from call to call "
            "(dynamic shapes)"
        )
    return sorted(found)


def _shape(node: Node) -> tuple[Any, ...]:
    found = node.meta.get("val")
    return (
        tuple(size for part in found for size in part.shape)
        if isinstance(found, (list, tuple))
        else tuple(value(node).shape)
    )


def in_order(start: Node, nodes: list[Node]) -> list[Node]:
    """``start``, and those of ``nodes`` that have all its rows in its order.

    So have gathers along the second dimension, split and concatenated, where the first one is 1.
    """
    order = _order(start, nodes)
    with unset_fake_temporarily():
        return [node for node, rows in order.items() if torch.equal(rows, order[start])]


def is_by_ranks(moves: Sequence[tuple[Node, list[Node]]], ranks: int) -> bool:
    """Whether a batch is moved so that each rank in turn has an even share of the rows of each
    product, in order.

    ``[B, R * share, N]`` is then ``[R, B, share, N]``: what experts send back to the ranks of their
    tokens.

    Args:
        moves: where rows start, and the calls that move them from there, one after the other; the
            batch is the first.
    """
    batch, rows = value(moves[0][0]).shape[:2]
    if rows % ranks:
        return False
    with unset_fake_temporarily():
        found = torch.arange(batch * rows)
        for start, nodes in moves:
            if nodes:
                found = found[_order(start, nodes)[nodes[-1]]]
        return torch.equal(found, _turned(batch * rows, batch, ranks))


def by_products(start: Node, nodes: list[Node], batch: int, ranks: int) -> list[Node]:
    """Those of ``start`` and ``nodes`` that have, for each product of a batch in turn, an even
    share of each rank's rows, in order.

    ``start [R * B * share, K]`` is then ``[B, R * share, K]``: the tokens of each expert.
    """
    order = _order(start, nodes)
    if len(order[start]) % (batch * ranks):
        return []
    with unset_fake_temporarily():
        wanted = _turned(len(order[start]), ranks, batch)
        return [node for node, found in order.items() if torch.equal(found, wanted)]


def _turned(count: int, first: int, second: int) -> torch.Tensor:
    """The numbers of ``[first, second, share]`` rows as ``[second, first, share]``."""
    return torch.arange(count).view(first, second, -1).transpose(0, 1).flatten()


def _order(start: Node, nodes: list[Node]) -> dict[Node, torch.Tensor]:
    """The numbers of those rows of ``start`` that each tensor among it and ``nodes`` has."""
    leading = value(start).shape[:-1]
    with unset_fake_temporarily():
        index = torch.arange(leading.numel())
        done: dict[Node, Any] = {start: index.view(*leading, 1)}
        for node in nodes:
            if node.target in _RESHAPES:
                done[node] = done[node.all_input_nodes[0]].reshape(*value(node).shape[:-1], 1)
            else:
                target: Any = node.target
                done[node] = target(*_mapped(node.args, done), **_mapped(node.kwargs, done))
        return {
            node: moved.flatten() for node, moved in done.items() if isinstance(moved, torch.Tensor)
        }


def replay(writer: Writer, nodes: list[Node], start: Node, replacement: Node) -> Node:
    """Do to ``replacement``, which has other columns than ``start``, what ``nodes`` do to
    ``start``.
    """
    columns = int(value(replacement).shape[-1])
    done = {start: replacement}
    for node in nodes:
        if node.target in _RESHAPES:
            assert isinstance(node.args[0], Node)
            done[node] = writer.reshape(done[node.args[0]], [*value(node).shape[:-1], columns])
            continue
        copy = writer.call(node.target, *_mapped(node.args, done))
        if node.kwargs:
            copy.kwargs = _mapped(node.kwargs, done)
            evaluate(copy)
        done[node] = copy
    return done[nodes[-1]] if nodes else replacement


def _mapped(arguments: Any, done: dict[Node, Any]) -> Any:
    return map_arg(arguments, lambda node: done[node])
