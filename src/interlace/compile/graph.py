"""Nodes of a traced graph: what they stand for, and new ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from interlace.compile.findings import LeftAlone

aten = torch.ops.aten

_PROVENANCE = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack")


def value(node: Node) -> torch.Tensor:
    """The (fake) tensor that a node stands for."""
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor):
        raise LeftAlone(f"the graph does not say what {node.name} is")
    return found


def is_static(*sizes: object) -> bool:
    """Whether all sizes are known when compiling."""
    return all(isinstance(size, int) for size in sizes)


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by place or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def changes_memory(node: Node) -> bool:
    """Whether a call writes to one of its arguments."""
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    return bool(schema.is_mutable) if schema is not None else "mutation" in str(node.target)


def between(first: Node, last: Node) -> Iterable[Node]:
    """The nodes after ``first`` and before ``last``, in the graph's order."""
    node = first.next
    while node is not last and node.op != "root":
        yield node
        node = node.next


VIEWS = (
    aten.view.default, aten.permute.default, aten.transpose.int, aten.t.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten.detach.default, aten.alias.default,
)  # fmt: skip
"""Calls that give all elements of their argument, where they lie."""


def views_since(node: Node, before: Node) -> tuple[Node, list[Node]]:
    """What ``node`` is a view of that comes before another one, and the views in between, the last
    first.

    Where one of them is no view, that is what is returned.
    """
    views = []
    while (
        not node < before
        and node.op == "call_function"
        and node.target in (*VIEWS, aten.select.int)
    ):
        views.append(node)
        node = node.all_input_nodes[0]
    return node, views


class Writer:
    """Adds calls to a graph, before a given node."""

    def __init__(self, before: Node, source: Node) -> None:
        """``source``: whose place in the user's program the new nodes are to name."""
        self._graph: Graph = before.graph
        self._before = before
        self._provenance = {key: source.meta[key] for key in _PROVENANCE if key in source.meta}

    def call(self, target: Any, *args: Any) -> Node:
        """A call of an operator, with the value that it will have."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args)
        node.meta.update(self._provenance)
        evaluate(node)
        return node

    def reshape(self, node: Node, shape: Sequence[int]) -> Node:
        """``node`` with another shape; a copy only where strides leave no other way."""
        tensor = value(node)
        if list(tensor.shape) == list(shape):
            return node
        try:
            tensor.view(*shape)
        except (
            RuntimeError,
            ValueError,
        ):  # what PyTorch says of a real tensor, and of a traced one
            node = self.contiguous(node)
        return self.call(aten.view.default, node, list(shape))

    def contiguous(self, node: Node) -> Node:
        """A contiguous copy."""
        copy = self.call(aten.clone.default, node)
        copy.kwargs = {"memory_format": torch.contiguous_format}
        evaluate(copy)
        return copy

    def laid_out_as(self, node: Node, wanted: torch.Tensor) -> Node:
        """``node``, or a copy whose strides are those of the contiguous ``wanted``."""
        return node if value(node).stride() == wanted.stride() else self.contiguous(node)


def evaluate(node: Node) -> None:
    """Work out what a call returns from what its arguments stand for."""
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
    """Erase those of ``nodes`` that nothing uses, users before what they use."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            node.graph.erase_node(node)
