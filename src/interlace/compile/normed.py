"""Fusion of a product and its all-reduce with the residual and the norm that follow.

This is the end of each half of a Transformer's layer: ``total = residual + all_reduce(x @ w.T)``,
and ``norm(total)``, the input of the next half.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import rows
from interlace.compile.choice import choose, nodes_of, overload
from interlace.compile.collectives import Collective
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import (
    Writer,
    are_equal,
    aten,
    between,
    cast_source,
    erase_unused,
    is_cast,
    is_static,
    move_before,
    value,
)
from interlace.compile.norms import Norm, norm_of
from interlace.compile.producers import Product
from interlace.compile.requirements import require_unchanged, rows_of
from interlace.gemm import invariance
from interlace.gemm.operands import FLOAT8
from interlace.operators.gemm_all_reduce.config import MOST_NORMED_ROWS
from interlace.operators.gemm_all_reduce.normed_launch import MOST_COLUMNS
from interlace.registry import operator_matching


@dataclasses.dataclass(frozen=True)
class Tail:
    """Describe what a graph computes from the sum that an all-reduce returns.

    Attributes:
        anchor: The first node that needs the total, or the one that adds the residual.
        totals: The nodes that hold the total: the sum over ranks, with bias and residual, rounded
            once to the sum's dtype.
        norm: The norm of the total.
        bias: The vector ``[N]`` that is added to the sum, or None.
        residual: The tensor that is added to the sum, or None.
    """

    anchor: Node
    totals: list[Node]
    norm: Norm
    bias: Node | None = None
    residual: Node | None = None

    def __str__(self) -> str:
        kind = {"rms": "RMSNorm", "layer": "LayerNorm"}[self.norm.kind]
        return (
            f"{kind} that follows" if self.residual is None else f"residual and {kind} that follow"
        )


def tail_of(collective: Collective) -> Tail | None:
    """Return what follows an all-reduce up to its norm, or None if no norm follows.

    Raises:
        LeftAlone: A norm follows, but the graph uses a value that a fused operator does not return.
    """
    first_use = min(user for wait in collective.waits for user in wait.users)
    tail = _tail(first_use, collective.waits, collective.result.dtype)
    if tail is not None and any(user not in collective.waits for user in collective.node.users):
        raise LeftAlone("the graph keeps the sum from before it is waited for")
    return tail


def _tail(
    anchor: Node,
    totals: list[Node],
    dtype: torch.dtype,
    earlier: tuple[Node, ...] = (),
    bias: Node | None = None,
) -> Tail | None:
    """Return the tail that begins with ``totals``, the sum or its views, or None if no norm does.

    Args:
        anchor: The first node that takes the sum.
        totals: The nodes that hold the sum; with ``bias`` if it is given.
        dtype: The sum's dtype.
        earlier: The nodes that hold the sum without the bias.
        bias: The vector that has been added.
    """
    sums = _with_views(totals)
    for node in sums:
        norm = norm_of(node, dtype)
        if norm is not None:
            _require_no_other_use(earlier, totals)
            return Tail(anchor, totals, norm, bias)
    # Some models add the residual in float32, and round the total for the next one.
    casts = [user for node in sums for user in node.users if cast_source(user) is node]
    wide = [cast for cast in casts if value(cast).dtype == torch.float32]
    for add, term in _additions([*sums, *wide]):
        is_vector = are_equal(value(term).shape, value(add).shape[-1:])
        if is_vector and bias is None and {value(term).dtype, value(add).dtype} == {dtype}:
            tail = _tail(add, [add], dtype, (*earlier, *sums), term)
            if tail is not None:
                return tail
        has_rows = are_equal(value(term).shape, value(add).shape)
        norm = norm_of(add, dtype) if has_rows else None
        if norm is None:
            continue
        source = cast_source(term)
        residual = term if source is None or value(term).dtype == dtype else source
        if value(residual).dtype != dtype:
            raise LeftAlone(f"the residual {residual.name} is {value(residual).dtype}")
        if residual is source:
            require_unchanged(term, add)
        _require_no_other_use((*earlier, *sums, *wide), [add])
        return Tail(add, _rounded(add, norm, dtype), norm, bias, residual)
    return None


def _with_views(nodes: list[Node]) -> list[Node]:
    """Return nodes and their views that have the same rows in the same order."""
    reached = list(nodes)
    for node in reached:
        reached += [user for user in node.users if rows.keeps_order(user) and user not in reached]
    return reached


def _additions(nodes: list[Node]) -> Iterator[tuple[Node, Node]]:
    """Yield the calls that add something to one of ``nodes``, and what they add."""
    for node in nodes:
        for user in node.users:
            if user.target is not aten.add.Tensor or user.kwargs:
                continue
            for term in user.args:
                if (
                    isinstance(term, Node)
                    and term not in nodes
                    and isinstance(term.meta.get("val"), torch.Tensor)
                    and are_equal(value(user).shape, value(node).shape)
                ):
                    yield user, term


def _rounded(add: Node, norm: Norm, dtype: torch.dtype) -> list[Node]:
    """Return the nodes that hold the total ``add``, rounded to ``dtype``.

    Raises:
        LeftAlone: The graph uses the total before it is rounded, beside the norm.
    """
    if value(add).dtype == dtype:
        return [add]
    users = [user for user in add.users if user not in norm.nodes]
    for user in users:
        if cast_source(user) is not add or value(user).dtype != dtype:
            raise LeftAlone(f"{user.name} uses the total before it is rounded")
    return users


def _require_no_other_use(nodes: tuple[Node, ...], totals: list[Node]) -> None:
    """Raise :class:`LeftAlone` if one of ``nodes`` has a use that does not lead to the total."""
    for node in nodes:
        for user in node.users:
            if user not in nodes and user not in totals:
                raise LeftAlone(f"{user.name} uses the sum without all that is added to it")


def fuse(collective: Collective, product: Product, tail: Tail, ranks: int) -> tuple[str, str]:
    """Replace a product, its all-reduce, and what follows by one operator.

    Returns:
        The operator's name, and why it is faster.

    Raises:
        LeftAlone: The operator cannot compute this, or is not faster.
    """
    fused = operator_matching("gemm", "all_reduce", "norm")
    tokens, norm, anchor = rows_of(product), tail.norm, tail.anchor
    # A row's roundings must not depend on the number of rows where calls are batch-invariant. And a
    # graph for any number of rows, which decodes as well, loses nothing by calls of more.
    if not is_static(*value(product.x).shape[:-1]):
        tokens = min(tokens, MOST_NORMED_ROWS)
    elif tokens > MOST_NORMED_ROWS and not invariance.is_enabled():
        raise LeftAlone(f"it has {tokens} rows; {fused.name} is for {MOST_NORMED_ROWS} or fewer")
    if product.columns > MOST_COLUMNS:
        raise LeftAlone(f"its rows are longer than {MOST_COLUMNS}")
    if product.bias is not None:
        raise LeftAlone("each rank adds a bias before the sum")
    moves = [node for node in rows.upstream(collective.input) if node is not product.node]
    for node in moves:
        if not rows.keeps_order(node):
            raise LeftAlone(f"{node.name} moves the product's rows")
    for node in (collective.waits[0], *tail.totals, norm.result):
        if sum(not is_static(size) for size in value(node).shape) > 1:
            raise LeftAlone("several sizes change from call to call (dynamic shapes)")
    require_unchanged(product.node, norm.result)
    vectors = [_narrow(vector, product.dtype, anchor) for vector in (norm.weight, norm.bias)]
    earlier = [operand for operand in (*vectors, norm.scale) if operand is not None]
    moves_before = [move_before(anchor, operand, collective.waits) for operand in earlier]
    if nodes_of(collective.group_name, product.device) > 1:
        raise LeftAlone(f"{fused.name} runs within a node")
    reason = choose(fused, product, tokens, ranks)
    for move in moves_before:
        move()
    in_between = [node for node in between(product.node.prev, norm.result.next) if node.users]
    writer = Writer(anchor, collective.node)
    triple = writer.call(
        overload(fused.name),
        product.rows(writer),
        product.weight(writer),
        tail.bias,
        None if tail.residual is None else writer.as_rows(tail.residual),
        *(operand and writer.reshape(operand, [product.columns]) for operand in vectors),
        *[norm.kind, norm.eps, *_scale(norm, writer), collective.group_name, "auto", ""],
    )
    y, total = (writer.call(operator.getitem, triple, index) for index in (0, 1))
    norm.result.replace_all_uses_with(writer.shaped_as(y, value(norm.result)))
    shaped = writer.shaped_as(total, value(tail.totals[0])) if tail.totals else total
    for number, node in enumerate(tail.totals):
        # Waits return the same memory, but the results of several casts are different memory.
        is_copy = number > 0 and is_cast(node)
        node.replace_all_uses_with(writer.call(aten.clone.default, shaped) if is_copy else shaped)
    wide = [
        operand for operand in (norm.weight, norm.bias) if operand and operand.op == "call_function"
    ]
    erase_unused([*in_between, *wide, y, total])
    return fused.name, f"with the {tail}: {reason}"


def _scale(norm: Norm, writer: Writer) -> tuple[Node | None, torch.dtype | None]:
    """Return the operator's scale, by which it divides, and the dtype of its norm."""
    if norm.scale is None:
        return None, None
    divisor = writer.call(aten.reciprocal.default, norm.scale) if norm.multiplies else norm.scale
    return divisor, FLOAT8


def _narrow(vector: Node | None, dtype: torch.dtype, anchor: Node) -> Node | None:
    """Return a norm's weight or bias as the program keeps it, before a cast to float32.

    Args:
        vector: The weight or bias.
        dtype: The product's dtype.
        anchor: The node before which it will be read.

    Raises:
        LeftAlone: It has another dtype than ``dtype`` and float32, or has changed since the cast.
    """
    if vector is None:
        return None
    if value(vector).dtype not in (dtype, torch.float32):
        raise LeftAlone(f"{vector.name} is {value(vector).dtype}")
    source = cast_source(vector)
    if source is None or value(source).dtype != dtype:
        return vector
    if vector < anchor:
        require_unchanged(vector, anchor)
    return source
