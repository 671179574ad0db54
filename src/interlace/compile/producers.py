"""Matrix products in a graph: ``x @ w.T``, in each of the forms that ATen has for it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.fx import Node
from torch.nn.functional import ScalingType

from interlace.compile.findings import LeftAlone
from interlace.compile.graph import (
    Writer,
    are_equal,
    argument,
    arguments_of,
    aten,
    is_static,
    value,
)
from interlace.gemm.operands import ALIGNMENT_BYTES, FLOAT8, FLOATS, contiguous_dimension
from interlace.gemm.scaled import ROWS_OF_BLOCKS, SCALE_BLOCK
from interlace.gemm.terms import default_output_dtype
from interlace.units import ceil_div, round_up

# The names of x, w and bias among the arguments of each product.
_PRODUCTS: dict[Any, tuple[str, str, str]] = {
    aten.mm.default: ("self", "mat2", "bias"),
    aten.addmm.default: ("mat1", "mat2", "self"),
    aten.bmm.default: ("self", "mat2", "bias"),
    aten.linear.default: ("input", "weight", "bias"),
}
_SCALED = (aten._scaled_mm.default, aten._scaled_mm_v2.default)
"""Products of float8, whose x is ``self`` and whose w is ``mat2``, transposed."""

_RECIPES = tuple(
    scaling.value
    for scaling in (
        ScalingType.TensorWise,
        ScalingType.RowWise,
        ScalingType.BlockWise1x128,
        ScalingType.BlockWise128x128,
    )
)
"""The kinds of scales that operators take, all float32."""


def scaled_product(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return an uninitialised result of another program's product of float8 operands.

    The pass puts a call of this function in the place of such a product while it looks for pairs
    (:mod:`interlace.compile.foreign`). No graph that runs has one.

    Args:
        x: ``[M, K]``.
        w: ``[N, K]``.
        x_scale, w_scale: The scales as operators take them.
        bias: ``[N]``, or None.
        dtype: The dtype of the result ``[M, N]``.
    """
    return x.new_empty([x.shape[0], w.shape[0]], dtype=dtype)


_WORK = (
    *_PRODUCTS,
    *_SCALED,
    scaled_product,
    aten.baddbmm.default,
    aten._grouped_mm.default,
    aten.convolution.default,
)


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product of a graph.

    Attributes:
        node: The call, whose result is ``[..., N]``.
        x: The left operand, ``[..., K]``.
        w: The weight: ``[N, K]`` if ``by_columns`` is False; else ``[K, N]``, or ``[1, K, N]`` for
            a batch of one.
        by_columns: Whether the weight's last dimension is N.
        bias: The vector ``[N]`` that is added to every row, or None.
        x_scale, w_scale: The scales of float8 operands, else None. Those of blocks of w have the
            layout of w: ``[N / 128, K / 128]``, or transposed and padded along K if ``by_columns``.
    """

    node: Node
    x: Node
    w: Node
    by_columns: bool
    bias: Node | None
    x_scale: Node | None = None
    w_scale: Node | None = None

    @property
    def inner(self) -> int:
        """K, the length of the sums."""
        return int(value(self.x).shape[-1])

    @property
    def columns(self) -> int:
        """N, the columns of the result."""
        return int(value(self.node).shape[-1])

    @property
    def w_along_k(self) -> bool:
        """Whether the weight is contiguous along K."""
        w = value(self.w)
        return bool((w.mT if self.by_columns else w).stride(-1) == 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return value(self.node).dtype

    @property
    def operand_dtype(self) -> torch.dtype:
        """The dtype of x and w."""
        return value(self.x).dtype

    @property
    def has_block_scales(self) -> bool:
        """Whether scales are those of blocks."""
        if self.x_scale is None or self.w_scale is None:
            return False
        # A row of x whose K is one block has one scale.
        of_w = value(self.w_scale).numel()
        return value(self.x_scale).shape[1:].numel() > 1 or of_w not in (1, self.columns)

    def scales(self, writer: Writer) -> list[Node | None]:
        """Return the scales as operators take them; None of other dtypes than float8."""
        x_scale, w_scale = self.x_scale, self.w_scale
        if w_scale is not None and value(w_scale).numel() == 1:
            w_scale = writer.reshape(w_scale, [1])
        elif w_scale is not None and self.has_block_scales and self.by_columns:
            # ``[K / 128, N / 128]``, which cuBLAS wants padded along K.
            w_scale = writer.call(aten.permute.default, w_scale, [1, 0])
            blocks = ceil_div(self.inner, SCALE_BLOCK)
            if value(w_scale).shape[1] != blocks:
                w_scale = writer.call(aten.slice.Tensor, w_scale, 1, 0, blocks)
        return [x_scale, w_scale]

    @property
    def device(self) -> torch.device:
        return value(self.node).device

    @property
    def sources(self) -> list[Node]:
        """The nodes of weight and bias that a fused operator would read."""
        return [_untransposed(self)[0], *([self.bias] if self.bias is not None else [])]

    def rows(self, writer: Writer) -> Node:
        """Return x as ``[M, K]``."""
        if value(self.x).dim() == 2:
            return self.x
        return writer.reshape(self.x, [-1, self.inner])

    def weight(self, writer: Writer) -> Node:
        """Return the weight as ``[N, K]``.

        It is the tensor that the program transposed, if it did so, or else a view of the weight.
        """
        w, by_rows = _untransposed(self)
        if value(w).dim() == 3:
            w = writer.call(aten.select.int, w, 0, 0)
        return w if by_rows else writer.call(aten.permute.default, w, [1, 0])


def rows_of(product: Product) -> int:
    """Return the rows M of a product; if M is dynamic, the value that the graph was traced with.

    Raises:
        LeftAlone: Sizes are dynamic and the traced value is unknown.
    """
    leading = value(product.x).shape[:-1]
    dynamic: list[Any] = [size for size in leading if not is_static(size)]
    hints = [size.node.hint for size in dynamic]
    # A result's shape is restored by a view, in which one size may be unknown.
    if len(dynamic) > 1 or None in hints:
        raise LeftAlone("sizes change from call to call (dynamic shapes)")
    return math.prod([*(int(size) for size in leading if is_static(size)), *map(int, hints)])


def is_work(node: Node) -> bool:
    """Return whether a node takes long enough to hide communication behind it."""
    return node.op == "call_function" and (node.target in _WORK or "attention" in str(node.target))


def product_of(node: Node, *, scaled: bool = False) -> Product | None:
    """Return the product that a node computes, or None if it computes something else.

    Args:
        scaled: Whether it may be of float8.
    """
    if scaled and node.op == "call_function" and node.target in _SCALED:
        return _scaled_product(node)
    if scaled and node.target is scaled_product:
        x, w, x_scale, w_scale, bias, _ = node.args
        return Product(node, x, w, False, bias, x_scale, w_scale)  # type: ignore[arg-type]
    if node.op != "call_function" or node.target not in _PRODUCTS:
        return None
    x, w, bias = _PRODUCTS[node.target]
    arguments, by_columns = arguments_of(node), node.target is not aten.linear.default
    return Product(node, arguments[x], arguments[w], by_columns, arguments.get(bias))


def _scaled_product(node: Node) -> Product | None:
    """Return a product of float8; None if its scales are none that operators take."""
    arguments = arguments_of(node)
    scales = [arguments["scale_a"], arguments["scale_b"]]
    if node.target is aten._scaled_mm_v2.default:
        recipes = [arguments["recipe_a"], arguments["recipe_b"]]
        # Several scales, or another order of them, are of formats with fewer bits.
        has_more = (
            arguments["swizzle_a"] or arguments["swizzle_b"] or arguments.get("contraction_dim")
        )
        if has_more or any(len(recipe) != 1 or recipe[0] not in _RECIPES for recipe in recipes):
            return None
        scales = [scale for (scale,) in scales]
    elif arguments.get("scale_result") is not None:
        return None
    return Product(node, arguments["self"], arguments["mat2"], True, arguments.get("bias"), *scales)


def _require_suitable_scales(product: Product) -> None:
    """Raise :class:`LeftAlone` if operators do not take such float8 operands or scales."""
    node, x, w = product.node, value(product.x), value(product.w)
    if (x.dtype, w.dtype) != (FLOAT8, FLOAT8) or product.dtype != default_output_dtype(FLOAT8):
        raise LeftAlone(
            f"it multiplies {x.dtype} and {w.dtype} into {product.dtype}; operators multiply "
            f"{FLOAT8} into {default_output_dtype(FLOAT8)}"
        )
    assert product.x_scale is not None
    assert product.w_scale is not None
    of_x, of_w = value(product.x_scale), value(product.w_scale)
    columns, blocks = product.columns, ceil_div(product.inner, SCALE_BLOCK)
    by_rows = of_w.mT if product.by_columns and of_w.dim() == 2 else of_w
    kinds = (
        (are_equal([of_x.numel()], [1]) or are_equal(of_x.shape, [x.shape[0], 1]))
        and (of_w.numel() == 1 or list(by_rows.shape) in ([columns], [columns, 1])),
        are_equal(of_x.shape, [x.shape[0], blocks])
        and by_rows.dim() == 2
        and by_rows.shape[0] == ceil_div(columns, SCALE_BLOCK)
        and by_rows.shape[1] in (blocks, round_up(blocks, ROWS_OF_BLOCKS)),
    )
    if {of_x.dtype, of_w.dtype} != {torch.float32} or not any(kinds):
        raise LeftAlone(
            f"{node.name} has scales {list(of_x.shape)} and {list(of_w.shape)}; operators take "
            "float32 for matrices, rows or blocks of 128"
        )


def require_suitable(product: Product) -> None:
    """Raise :class:`LeftAlone` if no operator can compute this product."""
    node, x, w = product.node, value(product.x), value(product.w)
    if node.target is aten.bmm.default and not are_equal(x.shape[:1], [1]):
        raise LeftAlone(f"{node.name} is a batch of products")
    if node.target is aten.addmm.default and (
        node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1
    ):
        raise LeftAlone(f"{node.name} scales what it adds or multiplies")
    if not is_static(*w.shape, x.shape[-1]):
        raise LeftAlone("the weight's sizes change from call to call (dynamic shapes)")
    if product.x_scale is not None:
        _require_suitable_scales(product)
    elif x.dtype not in FLOATS or w.dtype != x.dtype or product.dtype != x.dtype:
        raise LeftAlone(
            f"its dtypes are {x.dtype} and {w.dtype}; operators take float16, bfloat16 and float32"
        )
    if product.bias is not None and (
        list(value(product.bias).shape) != [product.columns]
        or value(product.bias).dtype != product.dtype
    ):
        raise LeftAlone(f"{node.name} adds something else than a vector of its dtype to every row")
    if is_static(*x.shape) and not (x.numel() and w.numel()):
        raise LeftAlone(f"{node.name} is empty")
    if not are_equal(x.stride()[-1:], [1]) and x.shape[-1] > 1:
        raise LeftAlone(
            f"the rows of {product.x.name} are not contiguous; a fused operator would copy them"
        )
    # Kernels load the weight through tensor descriptors, which need one contiguous dimension and
    # aligned strides. The operators copy any other weight, in every call, which costs more than
    # the fusion saves.
    dimension = contiguous_dimension(w[0] if w.dim() == 3 else w)
    if dimension is None:
        raise LeftAlone("the weight is contiguous along neither dimension")
    distances = [w.stride(-2 if dimension == 1 else -1)] if min(w.shape[-2:]) > 1 else []
    if any(distance * w.itemsize % ALIGNMENT_BYTES for distance in distances):
        raise LeftAlone(
            f"the weight's rows do not begin at multiples of {ALIGNMENT_BYTES} bytes; a fused "
            "operator would copy it"
        )


def _untransposed(product: Product) -> tuple[Node, bool]:
    """Return the tensor that the program transposed, any number of times, to make the weight.

    Returns:
        The tensor's node, and whether its layout is ``[..., N, K]``.
    """
    w, by_rows = product.w, not product.by_columns
    while _transposes(w):
        assert isinstance(w.args[0], Node)
        w, by_rows = w.args[0], not by_rows
    return w, by_rows


def _transposes(node: Node) -> bool:
    """Return whether a call swaps the two dimensions of a matrix, or of each matrix of a batch."""
    if node.op != "call_function" or value(node).dim() not in (2, 3):
        return False
    dimensions = value(node).dim()
    *batch, rows, columns = range(dimensions)
    if node.target is aten.permute.default:
        return [d % dimensions for d in argument(node, "dims")] == [*batch, columns, rows]
    if node.target is aten.transpose.int:
        return {argument(node, "dim0") % dimensions, argument(node, "dim1") % dimensions} == {
            rows,
            columns,
        }
    return dimensions == 2 and node.target is aten.t.default
