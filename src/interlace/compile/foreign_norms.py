"""RMSNorms that other programs have defined as operators of their own.

Such an operator hides what it computes, so a norm behind an all-reduce would not be found. The pass
spells it out in PyTorch's calls, tries to fuse these with the all-reduce, and puts the program's
operator back where it could not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from interlace.compile import rows
from interlace.compile.graph import Writer, argument, arguments_of, aten, schema_of, value

_CAST = torch.ops.prims.convert_element_type.default


@dataclasses.dataclass(frozen=True)
class ForeignNorm:
    """An RMSNorm of another program, over the last dimension, computed in float32.

    Its schema must be ``(x, weight, epsilon, variance_size)``; or, with a residual,
    ``(x, x_residual, weight, epsilon, variance_size)``, and then it returns the norm of the total
    and the total, rounded to the dtype of x.

    Attributes:
        name: The operator's qualified name, such as ``"vllm_ir::rms_norm"``.
        has_residual: Whether it adds a residual to x first.
    """

    name: str
    has_residual: bool


_known: dict[str, ForeignNorm] = {}


def register(norm: ForeignNorm) -> None:
    """Let the pass fuse a norm of another program with the all-reduce before it."""
    _known[norm.name] = norm


def unregister(name: str) -> None:
    """Undo :func:`register`."""
    _known.pop(name, None)


def registered() -> list[tuple[str, bool]]:
    """Return the names of all registered norms, and whether they add a residual."""
    return sorted((norm.name, norm.has_residual) for norm in _known.values())


@dataclasses.dataclass
class SpelledNorm:
    """A program's norm, and the calls that stand for it meanwhile.

    Attributes:
        node: The program's call, detached from its operands.
        results: The nodes that take the norm, and the total, out of the call's result; or the call
            itself.
        stand_ins: What stands for each of ``results``.
        calls: All calls that stand for it, in the graph's order.
        operands: Where x, and the residual, are found: a call, and the place among its arguments.
        settings: The program's arguments behind these operands.
    """

    node: Node
    results: list[Node]
    stand_ins: list[Node]
    calls: list[Node]
    operands: list[tuple[Node, int]]
    settings: tuple[Any, ...]

    def finish(self) -> None:
        """Erase the program's call if the norm has been fused; else put it back."""
        graph = self.node.graph
        if self.stand_ins[0]._erased:
            for node in dict.fromkeys((*self.results, self.node)):
                graph.erase_node(node)
            return
        # The operands as they are by now: the all-reduce may have been fused without the norm.
        operands = [call.args[place] for call, place in self.operands]
        self.node.args = (*operands, *self.settings)
        for stand_in, result in zip(self.stand_ins, self.results, strict=True):
            stand_in.replace_all_uses_with(result)
        for node in reversed(self.calls):
            graph.erase_node(node)


def spell_out(graph: Graph, sums: Collection[Node]) -> list[SpelledNorm]:
    """Replace the norms of sums over ranks by PyTorch's calls; return them, to be finished later.

    Args:
        graph: A graph, in which norms that are nothing like that stay as they are.
        sums: The nodes that hold the result of an all-reduce.
    """
    spelled = []
    for node in list(graph.nodes) if _known else []:
        norm = _norm(node)
        if norm is not None and _is_sum(argument(node, 0, "x"), sums):
            spelling = _spell(node, norm)
            spelled += [] if spelling is None else [spelling]
    return spelled


def _norm(node: Node) -> ForeignNorm | None:
    """Return the norm that a node calls; None if it calls none, or one that works in place."""
    schema = schema_of(node)
    return None if schema is None or schema.is_mutable else _known.get(schema.name)


def _is_sum(node: Any, sums: Collection[Node]) -> bool:
    """Return whether a node has the rows of a sum over ranks, in their order."""
    while isinstance(node, Node) and node not in sums and rows.keeps_order(node):
        node = node.all_input_nodes[0]
    return node in sums


def _spell(node: Node, norm: ForeignNorm) -> SpelledNorm | None:
    """Spell a norm out and return it; None if it is of a part of the columns, or goes unused."""
    arguments = arguments_of(node)
    count = 2 if norm.has_residual else 1
    sources, (weight, eps, variance_size) = arguments[:count], arguments[count:]
    items: dict[Any, Node] = {0: node}
    if norm.has_residual:
        items = {item.args[1]: item for item in node.users}
    used = [items[place] for place in sorted(items) if items[place].users]
    is_plain = variance_size is None and (node in used or len(items) == len(node.users))
    if not is_plain or items.get(0) not in used:
        return None
    writer, dtype = Writer(node, node), value(sources[0]).dtype
    calls: list[Node] = []

    def call(target: Any, *args: Any) -> Node:
        calls.append(writer.call(target, *args))
        return calls[-1]

    def cast(source: Node, to: torch.dtype) -> Node:
        return source if value(source).dtype == to else call(_CAST, source, to)

    wide = [cast(source, torch.float32) for source in sources]
    total = call(aten.add.Tensor, *wide) if norm.has_residual else wide[0]
    # A total that nothing uses would keep the sum alive.
    totals = [cast(total, dtype)] if len(used) == 2 else []
    square = call(aten.pow.Tensor_Scalar, total, 2)
    mean = call(aten.mean.dim, square, [-1], True)
    root = call(aten.rsqrt.default, call(aten.add.Scalar, mean, eps))
    normed = call(aten.mul.Tensor, total, root)
    if weight is not None:
        normed = call(aten.mul.Tensor, cast(normed, value(weight).dtype), weight)
    stand_ins = [cast(normed, dtype), *totals]
    first = total if norm.has_residual else square
    operands = [
        (first, place) if widened is source else (widened, 0)
        for place, (widened, source) in enumerate(zip(wide, sources, strict=True))
    ]
    for result, stand_in in zip(used, stand_ins, strict=True):
        result.replace_all_uses_with(stand_in)
    for item in items.values():
        if item not in used:
            node.graph.erase_node(item)
    # Without its operands, the call is no use of the sum.
    node.args, node.kwargs = (), {}
    return SpelledNorm(node, used, stand_ins, calls, operands, tuple(arguments[count:]))
