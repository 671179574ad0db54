"""Helpers to read the nodes of a traced graph and to add new ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch._prims  # registers torch.ops.prims
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from interlace.compile.findings import LeftAlone

aten = torch.ops.aten

CAST = torch.ops.prims.convert_element_type.default
"""The call that casts a tensor, in the form that graphs get from Inductor's decompositions."""

_CASTS = (aten._to_copy.default, CAST)

_PROVENANCE = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack")


def value(node: Node) -> torch.Tensor:
    """Return the (fake) tensor that a node stands for.

    Raises:
        LeftAlone: The graph holds no tensor for this node.
    """
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        raise LeftAlone(f"the graph does not say what {node.name} is")
    return tensor


def is_static(*sizes: object) -> bool:
    """Return whether all sizes are known when compiling."""
    return all(isinstance(size, int) for size in sizes)


def are_equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether sizes or strides are known to be equal, whatever changes from call to call.

    A plain comparison would make a size that changes a condition of the graph, and raises if the
    size depends on data.
    """
    return len(first) == len(second) and all(
        statically_known_true(left == right) for left, right in zip(first, second, strict=True)
    )


def cast_source(node: Node) -> Node | None:
    """Return the node of which a call is a copy in another dtype, or None for any other call."""
    if node.op != "call_function" or node.target not in _CASTS:
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    on_one_device = value(source).device == value(node).device
    has_its_strides = are_equal(value(source).stride(), value(node).stride())
    return source if on_one_device and has_its_strides else None


def is_cast(node: Node) -> bool:
    """Return whether a call changes the dtype of its argument, and nothing else of it."""
    source = cast_source(node)
    return source is not None and value(source).dtype != value(node).dtype


def schema_of(node: Node) -> Any:
    """Return the schema of the operator that a node calls; None for any other node."""
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def arguments_of(node: Node) -> dict[str, Any]:
    """Return all arguments of an operator's call by name in their order, defaults among them."""
    parameters = schema_of(node).arguments
    arguments = dict(zip((parameter.name for parameter in parameters), node.args, strict=False))
    defaults = {parameter.name: parameter.default_value for parameter in parameters}
    return {**defaults, **arguments, **node.kwargs}


def argument(node: Node, name: str) -> Any:
    """Return an argument of an operator's call, which may be positional, a keyword or a default."""
    return arguments_of(node)[name]


def changes_memory(node: Node) -> bool:
    """Return whether a call writes to one of its arguments."""
    if node.op != "call_function":
        return False
    # Calls without a schema are higher-order operators; their names tell those that mutate.
    schema = schema_of(node)
    return bool(schema.is_mutable) if schema is not None else "mutation" in str(node.target)


def is_movable(node: Node) -> bool:
    """Return whether a call may change places with the calls around it that it does not depend on.

    Not so calls that write to memory or draw random numbers. An operator of another library may
    communicate, and ranks must do so in one order, while each rank decides for itself what moves.
    """
    if node.op == "get_attr" or node.target is torch.ops._c10d_functional.wait_tensor.default:
        return True
    schema = schema_of(node)
    if schema is None:
        # Functions of Python's: an item of several results, arithmetic with sizes.
        return node.op == "call_function" and not isinstance(node.target, HigherOrderOperator)
    is_pure = torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
    return is_pure and not schema.is_mutable and schema.name.split("::")[0] in ("aten", "prims")


def between(first: Node, last: Node) -> Iterable[Node]:
    """Yield the nodes after ``first`` and before ``last``, in the graph's order."""
    node = first.next
    while node is not last and node.op != "root":
        yield node
        node = node.next


def require_unchanged(first: Node, last: Node) -> None:
    """Raise :class:`LeftAlone` if a node between ``first`` and ``last`` writes to memory."""
    # The product moves to the collective's position (or the reverse), and must still read the same
    # values there. Aliasing is unknown, so any write counts.
    for node in between(first, last):
        if changes_memory(node):
            raise LeftAlone(f"{node.name} changes memory in between")


VIEWS = (
    aten.view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.detach.default,
    aten.alias.default,
)
"""Calls whose result has all elements of their argument and shares its memory."""


def views_since(node: Node, before: Node) -> tuple[Node, list[Node]]:
    """Follow views and casts upstream from ``node`` to a node that comes before ``before``.

    Returns:
        The first node that comes before ``before`` or is neither a view nor a cast; and the calls
        that lead from it to ``node``, the last one first.
    """
    views = []
    while not node < before and (
        (node.op == "call_function" and node.target in (*VIEWS, aten.select.int)) or is_cast(node)
    ):
        views.append(node)
        node = node.all_input_nodes[0]
    return node, views


def move_before(anchor: Node, node: Node, barred: Collection[Node]) -> Callable[[], None]:
    """Return a function that moves a node, and what it is computed from, before ``anchor``.

    Args:
        anchor: The node before which they come.
        node: The node to move; it stays if it comes before ``anchor`` already.
        barred: Nodes from which it must not be computed.

    Raises:
        LeftAlone: It is ``anchor`` or a barred node, or is computed from one or by a call that must
            stay in its place.
    """
    moved: list[Node] = []
    pending = [node]
    while pending:
        candidate = pending.pop()
        if candidate is anchor or candidate in barred:
            raise LeftAlone(f"{node.name} is computed from the collective's result")
        if candidate < anchor or candidate in moved:
            continue
        if not is_movable(candidate):
            raise LeftAlone(f"{node.name} is computed by {candidate.name}, which must not move")
        moved.append(candidate)
        pending += candidate.all_input_nodes

    def move() -> None:
        for candidate in sorted(moved):
            anchor.prepend(candidate)

    return move


class Writer:
    """Adds calls to a graph, before a given node."""

    def __init__(self, before: Node, source: Node) -> None:
        """Add calls before ``before``, attributed to the user's line and module of ``source``."""
        self._graph: Graph = before.graph
        self._before = before
        self._provenance = {key: source.meta[key] for key in _PROVENANCE if key in source.meta}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call of an operator, and record the (fake) tensor that it returns."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        node.meta.update(self._provenance)
        evaluate(node)
        return node

    def reshape(self, node: Node, shape: Sequence[int]) -> Node:
        """Return ``node`` with another shape; it is copied only if its strides allow no view."""
        tensor = value(node)
        if are_equal(tensor.shape, shape):
            return node
        try:
            tensor.view(*shape)
        except (RuntimeError, ValueError):
            # PyTorch raises RuntimeError for a real tensor and ValueError for a traced one.
            node = self.contiguous(node)
        return self.call(aten.view.default, node, list(shape))

    def as_rows(self, node: Node) -> Node:
        """Return ``node [..., N]`` as a contiguous matrix ``[M, N]``."""
        if value(node).dim() != 2:
            node = self.reshape(node, [-1, value(node).shape[-1]])
        return node if value(node).is_contiguous() else self.contiguous(node)

    def shaped_as(self, node: Node, layout: torch.Tensor) -> Node:
        """Return ``node`` in the shape and strides of ``layout``, which has as many elements.

        At most one size of ``layout`` may be dynamic.
        """
        if not are_equal(value(node).shape, layout.shape):
            shape = [size if isinstance(size, int) else -1 for size in layout.shape]
            node = self.reshape(node, shape)
        return self.laid_out_as(node, layout)

    def contiguous(self, node: Node) -> Node:
        """Return a contiguous copy of ``node``."""
        return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def laid_out_as(self, node: Node, layout: torch.Tensor) -> Node:
        """Return ``node``, or a copy with the strides of ``layout`` if its own are others."""
        if are_equal(value(node).stride(), layout.stride()):
            return node
        order = layout.dim_order()
        if list(order) == sorted(order):
            return self.contiguous(node)
        # Later calls may be views that only these strides allow, as in models that keep the batch
        # behind the sequence.
        permuted = self.contiguous(self.call(aten.permute.default, node, list(order)))
        positions = [order.index(dimension) for dimension in range(len(order))]
        return self.call(aten.permute.default, permuted, positions)


def evaluate(node: Node) -> None:
    """Compute the (fake) tensor that a call returns from its arguments' (fake) tensors."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    for argument in node.all_input_nodes:
        tensor = argument.meta["val"]
        tensor = tensor[0] if isinstance(tensor, (tuple, list)) else tensor
        if isinstance(tensor, FakeTensor):
            mode = tensor.fake_mode
    with mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def erase_unused(nodes: Iterable[Node]) -> None:
    """Erase the nodes among ``nodes`` that nothing uses."""
    # Nodes sort by their position in the graph. Going backwards erases users before the nodes that
    # they use, which then have no users left.
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            node.graph.erase_node(node)
