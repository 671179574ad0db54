"""Fusion of a product and its all-reduce with the residual and the norm that follow.

This is the end of each half of a Transformer's layer: ``total = residual + all_reduce(x @ w.T)``,
and ``norm(total)``, the input of the next half. A norm, RMSNorm or LayerNorm over the last
dimension, is one call of PyTorch's or of another program's, or the calls that Inductor's
decompositions and the models themselves spell it with: upcast to float32, mean of squares,
reciprocal root, product with the input, weight, cast.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

import interlace.operators  # noqa: F401  # registers torch.ops.interlace
from interlace.compile import foreign, rows
from interlace.compile.choice import choose, nodes_of, overload
from interlace.compile.collectives import Collective
from interlace.compile.findings import LeftAlone
from interlace.compile.foreign import ForeignNorm
from interlace.compile.graph import (
    Writer,
    are_equal,
    argument,
    arguments_of,
    aten,
    between,
    cast_source,
    erase_unused,
    is_cast,
    is_static,
    move_before,
    require_unchanged,
    schema_of,
    value,
)
from interlace.compile.producers import Product, rows_of
from interlace.gemm import invariance
from interlace.gemm.operands import FLOAT8
from interlace.operators.gemm_all_reduce.config import MOST_NORMED_ROWS
from interlace.operators.gemm_all_reduce.normed_launch import MOST_COLUMNS, expect_any_tokens
from interlace.registry import operator_matching

_LARGEST = torch.finfo(FLOAT8).max
_CALLS: dict[object, str] = {
    aten.native_layer_norm.default: "layer", aten._fused_rms_norm.default: "rms"
}  # fmt: skip
_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm over the last dimension of a graph's tensor ``[..., N]``.

    Attributes:
        kind: ``"rms"`` or ``"layer"``.
        eps: The number that is added to the mean square or the variance.
        nodes: All calls of the norm, in the graph's order; the last one has its result.
        weight: The vector of N elements that the normalised rows are multiplied by, or None.
        bias: The vector of N elements that is added at the end, or None.
        scale: The float32 element that the norm is divided by before it is cast to float8, or None
            if it is not.
        multiplies: Whether the norm is multiplied by ``scale`` instead.
    """

    kind: str
    eps: float
    nodes: list[Node]
    weight: Node | None = None
    bias: Node | None = None
    scale: Node | None = None
    multiplies: bool = False

    @property
    def result(self) -> Node:
        """The call that returns the norm; a view of its rows if they are cast to float8."""
        return self.nodes[-1]


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
        norm = _norm_of(node, dtype)
        if norm is not None:
            _require_no_other_use(earlier, totals)
            return Tail(anchor, totals, norm, bias)
    for node in sums:
        for call, norm in _foreign_norms_of(node, has_residual=True):
            residual = call.args[1]
            assert isinstance(residual, Node)
            if value(residual).dtype != dtype:
                raise LeftAlone(f"the residual {residual.name} is {value(residual).dtype}")
            _require_no_other_use((*earlier, *sums), [call])
            total = [item for item in call.users if item not in norm.nodes]
            return Tail(call, total, norm, bias, residual)
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
        norm = _norm_of(add, dtype) if has_rows else None
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
    if not is_static(*value(product.x).shape[:-1]) and product.x_scale is None:
        expect_any_tokens(product.columns, product.inner, product.dtype)
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
        *[norm.kind, norm.eps, *_scale(norm, writer), False, *product.scales(writer)],
        *[collective.group_name, "auto", ""],
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
    erase_unused([*in_between, *norm.nodes, *tail.totals, *wide, y, total])
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


def _norm_of(node: Node, dtype: torch.dtype) -> Norm | None:
    """Return the norm of a node's result, or None if the graph has none.

    Args:
        node: The norm's input ``[..., N]``, of ``dtype`` or float32.
        dtype: The dtype that the norm's result must have, before a cast to float8.

    Raises:
        LeftAlone: The graph uses a value from within the norm, such as the reciprocal root, which a
            backward pass takes.
    """
    foreign_norms = (norm for _, norm in _foreign_norms_of(node, has_residual=False))
    for norm in (*_library_calls(node), *foreign_norms, *_spelled_out(node, dtype)):
        if value(norm.result).dtype != dtype:
            continue
        for part in norm.nodes[:-1]:
            for user in part.users:
                if user not in norm.nodes:
                    raise LeftAlone(f"{user.name} uses {part.name}, a part of the norm")
        return _quantised(norm)
    return None


def _library_calls(node: Node) -> Iterator[Norm]:
    """Yield the norms of a node that are a single call of PyTorch's."""
    for call in node.users:
        if not _is(call, *_CALLS):
            continue
        arguments = arguments_of(call)
        is_last = are_equal(arguments["normalized_shape"], value(node).shape[-1:])
        if arguments["input"] is not node or not is_last:
            continue
        eps = torch.finfo(torch.float32).eps if arguments["eps"] is None else arguments["eps"]
        # Further items are the mean and the reciprocal root, for a backward pass.
        for item in call.users:
            if item.target is operator.getitem and item.args[1] == 0:
                yield Norm(
                    _CALLS[call.target],
                    float(eps),
                    [call, item],
                    arguments["weight"],
                    arguments.get("bias"),
                )


def _foreign_norms_of(node: Node, *, has_residual: bool) -> Iterator[tuple[Node, Norm]]:
    """Yield the calls of other programs' norms of a node, and the norms.

    Args:
        node: The first operand of the norms.
        has_residual: Whether to yield norms of a total with a residual, the call's second operand,
            or those of the node alone. A total is no part of the norm if anything uses it.
    """
    for call in node.users:
        known = foreign.called(call)
        if not isinstance(known, ForeignNorm) or known.has_residual != has_residual:
            continue
        first, *_, weight, eps, variance_size = arguments_of(call).values()
        if first is not node or variance_size is not None or schema_of(call).is_mutable:
            continue
        nodes = [call]
        if has_residual:
            items = {user.args[1]: user for user in call.users}
            if not items.keys() <= {0, 1} or len(items) < len(call.users) or 0 not in items:
                continue
            unused = [item for item in items.values() if not item.users]
            nodes += [item for item in unused if item is not items[0]] + [items[0]]
        yield call, _quantised(Norm("rms", eps, nodes, weight))


def _spelled_out(node: Node, dtype: torch.dtype) -> Iterator[Norm]:
    """Yield the norms of a node that are computed in float32 and cast afterwards."""
    if value(node).dtype == torch.float32:
        wide = [node]
    else:
        casts = [user for user in node.users if cast_source(user) is node]
        wide = [cast for cast in casts if value(cast).dtype == torch.float32]
    # T5's norm multiplies the rows as they are by a float32 root, which casts them exactly.
    same = [*wide, node]
    for each in wide:
        norms = [norm for call in each.users for norm in _spelled_from(call, same)]
        for norm in (*_library_calls(each), *norms):
            yield _with_weight(norm, dtype)


def _spelled_from(call: Node, wide: list[Node]) -> Iterator[Norm]:
    """Yield the norms that begin with a call of x, before their weight; ``wide`` are the x."""
    yield from _rms(call, wide)
    yield from _layer(call, wide)
    yield from _layer_of_means(call, wide)


def _rms(square: Node, wide: list[Node]) -> Iterator[Norm]:
    """Yield ``x * rsqrt(mean(x * x) + eps)`` that begins with a square; ``wide`` are the x."""
    is_square = _is(square, aten.pow.Tensor_Scalar) and square.args[1] == 2
    is_product = _is(square, aten.mul.Tensor) and all(factor in wide for factor in square.args)
    if not (is_square or is_product):
        return
    for mean in square.users:
        if not _is(mean, aten.mean.dim) or value(mean).dtype != torch.float32:
            continue
        if argument(mean, "keepdim") and _is_last(mean):
            for eps, nodes in _divided(mean, wide):
                yield Norm("rms", eps, [square, mean, *nodes])


def _layer(moments: Node, wide: list[Node]) -> Iterator[Norm]:
    """Yield ``(x - mean) * rsqrt(variance + eps)`` that begins with the moments of x."""
    if (
        not _is(moments, aten.var_mean.correction)
        or not _is_last(moments)
        or moments.kwargs.get("correction", 1) != 0
        or not moments.kwargs.get("keepdim", False)
    ):
        return
    items = {item.args[1]: item for item in moments.users if item.target is operator.getitem}
    for centred in items[1].users if set(items) == {0, 1} else ():
        if _is(centred, aten.sub.Tensor) and centred.args[0] in wide and not centred.kwargs:
            for eps, nodes in _divided(items[0], [centred]):
                yield Norm("layer", eps, [*sorted([moments, *items.values(), centred, *nodes])])


def _layer_of_means(mean: Node, wide: list[Node]) -> Iterator[Norm]:
    """Yield a LayerNorm that begins with the mean of x, as Cohere's models spell it: the RMSNorm
    of ``x - mean``, which they may compute twice.
    """
    if not _is(mean, aten.mean.dim) or value(mean).dtype != torch.float32:
        return
    if not (argument(mean, "keepdim") and _is_last(mean)):
        return
    centred = [
        user
        for user in mean.users
        if _is(user, aten.sub.Tensor)
        and user.args[0] in wide
        and user.args[1] is mean
        and not user.kwargs
    ]
    for square in [user for node in centred for user in node.users]:
        for norm in _rms(square, centred):
            nodes = sorted({mean, *centred, *norm.nodes})
            yield dataclasses.replace(norm, kind="layer", nodes=nodes)


def _divided(square: Node, factors: list[Node]) -> Iterator[tuple[float, list[Node]]]:
    """Yield eps and the calls of ``factor * rsqrt(square + eps)``, for any of ``factors``."""
    for total in square.users:
        if not _is(total, aten.add.Tensor, aten.add.Scalar):
            continue
        # Neither may scale what it adds.
        if total.kwargs or len(total.args) != 2:
            continue
        eps = total.args[1]
        if total.args[0] is not square or not isinstance(eps, (int, float)):
            continue
        for root in total.users:
            is_power = _is(root, aten.pow.Tensor_Scalar) and root.args[1] == -0.5
            if not (is_power or _is(root, aten.rsqrt.default)):
                continue
            for product in root.users:
                if _is(product, aten.mul.Tensor) and _other(product, root) in factors:
                    yield float(eps), [total, root, product]


def _with_weight(norm: Norm, dtype: torch.dtype) -> Norm:
    """Return the norm with the casts, the weight and the bias that follow it.

    It ends with the last of these calls that has a result of ``dtype``, if there is one.
    """
    longest = norm
    while len(norm.result.users) == 1:
        (user,) = norm.result.users
        nodes = [*norm.nodes, user]
        factor = _other(user, norm.result)
        if cast_source(user) is norm.result:
            # A cast to anything else rounds to what the operator does not round to.
            if value(user).dtype not in (dtype, torch.float32):
                break
            norm = dataclasses.replace(norm, nodes=nodes)
        elif factor is None or not _is_vector(factor, value(user)) or norm.bias is not None:
            break
        elif _is(user, aten.mul.Tensor) and norm.weight is None:
            norm = dataclasses.replace(norm, nodes=nodes, weight=factor)
        elif _is(user, aten.add.Tensor) and not user.kwargs:
            norm = dataclasses.replace(norm, nodes=nodes, bias=factor)
        else:
            break
        has_all_rows = are_equal(value(user).shape, value(longest.result).shape)
        if has_all_rows and value(user).dtype == dtype:
            longest = norm
    return longest


def _quantised(norm: Norm) -> Norm:
    """Return the norm with the scale and the saturating cast to float8 that follow it, if any."""
    quantised, lowest, highest = norm, -math.inf, math.inf
    dtypes = (value(norm.result).dtype, torch.float32)
    while len(quantised.result.users) == 1:
        node = quantised.result
        (user,) = node.users
        quantised = dataclasses.replace(quantised, nodes=[*quantised.nodes, user])
        operand = _other(user, node)
        if cast_source(user) is node and value(user).dtype == FLOAT8:
            is_saturated = (lowest, highest) == (-_LARGEST, _LARGEST)
            return quantised if quantised.scale is not None and is_saturated else norm
        if cast_source(user) is node or rows.keeps_order(user):
            if value(user).dtype not in dtypes:
                break
            continue
        if quantised.scale is None and operand is not None and _is_scale(operand):
            is_quotient = _is(user, aten.div.Tensor) and user.args[0] is node
            if not (is_quotient or _is(user, aten.mul.Tensor)):
                break
            quantised = dataclasses.replace(quantised, scale=operand, multiplies=not is_quotient)
            continue
        bounds = _bounds(user) if quantised.scale is not None else None
        if bounds is None:
            break
        # Clamps in turn let through what the tightest of their bounds do.
        lowest, highest = max(lowest, bounds[0]), min(highest, bounds[1])
    return norm


def _bounds(node: Node) -> tuple[float, float] | None:
    """Return the lowest and the highest number that a clamp lets through; None if the node is no
    clamp between numbers.
    """
    if not _is(node, *_CLAMPS):
        return None
    arguments = arguments_of(node)
    lowest, highest = (
        absent if arguments.get(name) is None else arguments[name]
        for name, absent in (("min", -math.inf), ("max", math.inf))
    )
    is_known = isinstance(lowest, (int, float)) and isinstance(highest, (int, float))
    return (lowest, highest) if is_known else None


def _is_scale(node: Node) -> bool:
    return are_equal([value(node).numel()], [1]) and value(node).dtype == torch.float32


def _is(node: Node, *targets: object) -> bool:
    return node.op == "call_function" and node.target in targets


def _is_last(node: Node) -> bool:
    """Return whether a reduction is over the last dimension of its argument, and no other."""
    source, dimensions = node.args[0], argument(node, "dim")
    assert isinstance(source, Node)
    count = value(source).dim()
    return isinstance(dimensions, (list, tuple)) and [d % count for d in dimensions] == [count - 1]


def _other(node: Node, operand: Node) -> Node | None:
    """Return the operand of a call with two operands that is not ``operand``, if it is a node."""
    if len(node.args) != 2 or operand not in node.args:
        return None
    second = node.args[1] if node.args[0] is operand else node.args[0]
    return second if isinstance(second, Node) else None


def _is_vector(node: Node, rows: torch.Tensor) -> bool:
    """Return whether a node is a vector that has an element for each column of ``rows``."""
    shape = value(node).shape
    return len(shape) > 0 and are_equal(shape, [*[1] * (len(shape) - 1), rows.shape[-1]])
