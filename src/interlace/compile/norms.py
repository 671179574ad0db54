"""Norms in a graph: RMSNorm and LayerNorm over the last dimension, in each of their spellings.

A norm is one call of PyTorch's, or the calls that Inductor's decompositions and the models
themselves spell it with: upcast to float32, mean of squares, reciprocal root, product with the
input, weight, cast.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

from interlace.compile import foreign, rows
from interlace.compile.findings import LeftAlone
from interlace.compile.foreign import ForeignNorm
from interlace.compile.graph import (
    are_equal,
    argument,
    arguments_of,
    aten,
    cast_source,
    schema_of,
    value,
)
from interlace.gemm.operands import FLOAT8

_LARGEST = torch.finfo(FLOAT8).max
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


def norm_of(node: Node, dtype: torch.dtype) -> Norm | None:
    """Return the norm of a node's result, or None if the graph has none.

    Args:
        node: The norm's input ``[..., N]``, of ``dtype`` or float32.
        dtype: The dtype that the norm's result must have, before a cast to float8.

    Raises:
        LeftAlone: The graph uses a value from within the norm, such as the reciprocal root, which a
            backward pass takes.
    """
    foreign_norms = (norm for _, norm in foreign_norms_of(node, has_residual=False))
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
        if _is(call, aten.native_layer_norm.default):
            kind, eps = "layer", argument(call, 4, "eps")
            weight, bias = argument(call, 2, "weight"), argument(call, 3, "bias")
        elif _is(call, aten._fused_rms_norm.default):
            kind, eps = "rms", argument(call, 3, "eps")
            weight, bias = argument(call, 2, "weight"), None
            eps = torch.finfo(torch.float32).eps if eps is None else eps
        else:
            continue
        shape = argument(call, 1, "normalized_shape")
        if call.args[0] is not node or not are_equal(shape, value(node).shape[-1:]):
            continue
        # Further items are the mean and the reciprocal root, for a backward pass.
        for item in call.users:
            if item.target is operator.getitem and item.args[1] == 0:
                yield Norm(kind, float(eps), [call, item], weight, bias)


def foreign_norms_of(node: Node, *, has_residual: bool) -> Iterator[tuple[Node, Norm]]:
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
    """Yield the norms of a node that are spelled out in float32."""
    if value(node).dtype == torch.float32:
        wide = [node]
    else:
        casts = [user for user in node.users if cast_source(user) is node]
        wide = [cast for cast in casts if value(cast).dtype == torch.float32]
    for each in wide:
        for user in list(each.users):
            for norm in (*_rms(user, wide), *_layer(user, wide)):
                yield _with_weight(norm, dtype)


def _rms(square: Node, wide: list[Node]) -> Iterator[Norm]:
    """Yield ``x * rsqrt(mean(x * x) + eps)`` that begins with a square; ``wide`` are the x."""
    is_square = _is(square, aten.pow.Tensor_Scalar) and square.args[1] == 2
    is_product = _is(square, aten.mul.Tensor) and all(factor in wide for factor in square.args)
    if not (is_square or is_product):
        return
    for mean in square.users:
        if not _is(mean, aten.mean.dim) or value(mean).dtype != torch.float32:
            continue
        if argument(mean, 2, "keepdim", False) and _is_last(mean):
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
    given = arguments_of(node)
    lowest, highest = (
        absent if given.get(name) is None else given[name]
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
    source, dimensions = node.args[0], argument(node, 1, "dim")
    assert isinstance(source, Node)
    count = value(source).dim()
    return isinstance(dimensions, (list, tuple)) and [d % count for d in dimensions] == [count - 1]


def _other(node: Node, operand: Node) -> Node | None:
    """Return the operand of a call with two operands that is not ``operand``, if it is a node."""
    if len(node.args) != 2 or operand not in node.args:
        return None
    other = node.args[1] if node.args[0] is operand else node.args[0]
    return other if isinstance(other, Node) else None


def _is_vector(node: Node, rows: torch.Tensor) -> bool:
    """Return whether a node is a vector that has an element for each column of ``rows``."""
    shape = value(node).shape
    return len(shape) > 0 and are_equal(shape, [*[1] * (len(shape) - 1), rows.shape[-1]])
