"""Collectives, products of float8 and norms that other programs have defined as operators of their
own.

Such a collective is functional, waits itself, and names its group in the program's words. The pass
spells it out as a collective of ``torch.distributed``, and a product as
:func:`interlace.compile.producers.scaled_product`, tries to fuse these, and puts the program's
operators back where it could not. A norm is read as it is (:mod:`interlace.compile.norms`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._ops import OpOverload
from torch.fx import Graph, Node

from interlace.compile.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import (
    Writer,
    arguments_of,
    aten,
    between,
    erase_unused,
    is_static,
    schema_of,
    value,
)
from interlace.compile.producers import scaled_product

ProcessGroupOf = Callable[[str], dist.ProcessGroup]


@dataclasses.dataclass(frozen=True)
class Foreign:
    """An operator of another program.

    Its schema must be ``(tensor, group_name)``, or ``(tensor, dim, world_size, group_name)`` if it
    gathers or scatters; further arguments, and other names of these, are allowed.

    Attributes:
        name: The operator's qualified name, such as ``"vllm::all_reduce"``.
        collective: ``"all_reduce"``, ``"reduce_scatter"`` (both of them sums) or ``"all_gather"``.
        process_group: Returns the process group of a name of the program's.
        require_alike: Raises :class:`interlace.compile.findings.LeftAlone` if the graphs of ranks
            may differ before the collective, given its operand.
    """

    name: str
    collective: str
    process_group: ProcessGroupOf
    require_alike: Callable[[torch.Tensor], None] = lambda _: None


@dataclasses.dataclass(frozen=True)
class ForeignNorm:
    """An RMSNorm of another program, over the last dimension, computed in float32.

    Its schema must be ``(x, weight, epsilon, variance_size)``; or, with a residual,
    ``(x, x_residual, weight, epsilon, variance_size)``, and then it returns the norm of the total
    and the total, rounded to the dtype of x. Calls with a ``variance_size`` are left alone.

    Attributes:
        name: The operator's qualified name, such as ``"vllm_ir::rms_norm"``.
        has_residual: Whether it adds a residual to x first.
    """

    name: str
    has_residual: bool


ScaledOperands = tuple[Node, Node, Node, Node, Node | None]
"""X ``[M, K]``, w ``[N, K]``, the scales of both as operators take them, and the bias."""


@dataclasses.dataclass(frozen=True)
class ForeignProduct:
    """A product of float8 of another program, ``x @ w.T`` times the scales of both.

    The operator returns the product, or writes it to its only argument that it changes.

    Attributes:
        name: The operator's qualified name, such as ``"vllm::fp8_gemm_nt_op"``.
        operands: Returns the operands of a call, given its arguments by name. Calls that bring them
            into the layouts of Interlace's operators are added by the writer; they are erased if
            the product is left alone.
    """

    name: str
    operands: Callable[[Writer, dict[str, Any]], ScaledOperands]


_EMPTY = (aten.empty.memory_format, aten.empty_strided.default)
"""Calls that make the tensors to which operators write their results."""

_Known = Foreign | ForeignNorm | ForeignProduct
_known: dict[str, _Known] = {}


def register(operator: _Known) -> None:
    """Let the pass fuse a collective of another program, a product of float8 before it, or a norm
    behind an all-reduce.
    """
    collectives = ("all_reduce", "reduce_scatter", "all_gather")
    if isinstance(operator, Foreign) and operator.collective not in collectives:
        raise ValueError(f"{operator.name}: no operator has the collective {operator.collective!r}")
    _known[operator.name] = operator


def unregister(name: str) -> None:
    """Undo :func:`register`."""
    _known.pop(name, None)


def registered() -> list[tuple[str, str, object]]:
    """Return the names of all registered operators, and what they do."""
    details = {Foreign: "collective", ForeignNorm: "has_residual", ForeignProduct: "name"}
    return sorted(
        (name, type(known).__name__, getattr(known, details[type(known)]))
        for name, known in _known.items()
    )


def called(node: Node) -> _Known | None:
    """Return the registered operator that a node calls; None if it calls none."""
    schema = schema_of(node)
    return None if schema is None else _known.get(schema.name)


@dataclasses.dataclass
class SpelledCollective:
    """A program's collective, and the two calls that stand for it meanwhile.

    Attributes:
        node: The program's call, detached from its operand.
        start, wait: The calls that stand for it.
        args: The program's arguments behind the operand.
    """

    node: Node
    start: Node
    wait: Node
    args: tuple[Any, ...]

    def finish(self) -> None:
        """Erase the program's call if the collective has been fused; else put it back."""
        graph = self.node.graph
        if not self.start._erased:
            self.node.args = (self.start.args[0], *self.args)
            self.wait.replace_all_uses_with(self.node)
            graph.erase_node(self.wait)
            graph.erase_node(self.start)
        elif not self.node._erased:
            graph.erase_node(self.node)


@dataclasses.dataclass
class SpelledProduct:
    """A program's product, and the calls that stand for it meanwhile.

    Attributes:
        nodes: The program's calls, in the graph's order; the last one has the product.
        calls: The calls that stand for it; the last one is of ``scaled_product``.
    """

    nodes: list[Node]
    calls: list[Node]

    def finish(self) -> None:
        """Erase the program's calls if the product has been fused; else put them back."""
        *_, stand_in = self.calls
        if not stand_in._erased:
            stand_in.replace_all_uses_with(self.nodes[-1])
        erase_unused(call for call in self.calls if not call._erased)
        erase_unused(self.nodes)


def spell_out(
    graph: Graph,
) -> tuple[list[SpelledCollective | SpelledProduct], list[tuple[Node, str]]]:
    """Replace the collectives of other programs by those of ``torch.distributed``, and their
    products by ``scaled_product``.

    Returns:
        The replaced calls, to be finished after the pass; and the collectives that have no such
        spelling, with the reason.
    """
    spelled: list[SpelledCollective | SpelledProduct] = []
    refused = []
    for node in list(graph.nodes) if _known else []:
        known = called(node)
        if isinstance(known, Foreign):
            try:
                spelled.append(_spell(node, known))
            except LeftAlone as refusal:
                refused.append((node, str(refusal)))
            continue
        product = _spell_product(node)
        if product is not None:
            spelled.append(product)
    return spelled, refused


def _spell_product(node: Node) -> SpelledProduct | None:
    """Put ``scaled_product`` in the place of a program's product; None if a node calls none."""
    known, nodes, arguments = called(node), [node], {}
    if node.target is auto_functionalized:
        assert isinstance(node.args[0], OpOverload)
        known, arguments = _known.get(node.args[0].name()), node.kwargs
        # The new value of the argument that the operator writes to comes behind the operator's own
        # result, which is nothing.
        buffers = [operand for operand in node.all_input_nodes if operand.target in _EMPTY]
        nodes = [*buffers, node, *node.users]
    elif isinstance(known, ForeignProduct) and not schema_of(node).is_mutable:
        arguments = arguments_of(node)
    result = nodes[-1]
    if not isinstance(known, ForeignProduct) or not arguments or not result.users:
        return None
    end = result.next
    writer = Writer(end, result)
    stand_in = writer.call(scaled_product, *known.operands(writer, arguments), value(result).dtype)
    result.replace_all_uses_with(stand_in)
    return SpelledProduct(nodes, list(between(result, end)))


def _spell(node: Node, foreign: Foreign) -> SpelledCollective:
    named = arguments_of(node)
    operand, *settings = named.values()

    def of(name: str) -> Any:
        if name not in named:
            raise LeftAlone(f"{foreign.name} has no argument {name!r}")
        return named[name]

    foreign.require_alike(value(operand))
    name = of("group_name")
    try:
        group = foreign.process_group(name)
    except (LookupError, AttributeError, TypeError, ImportError) as error:
        raise LeftAlone(f"its group {name!r} is not known in this process") from error
    if foreign.collective != "all_reduce":
        if of("dim") % value(operand).dim():
            raise LeftAlone("it is along another dimension than the first")
        # Spelling it out would already assume that the ranks' rows are equally many.
        if not is_static(*value(operand).shape):
            raise LeftAlone("sizes change from call to call (dynamic shapes)")
    ranks, group_name = dist.get_world_size(group), group.group_name
    writer = Writer(node, node)
    if foreign.collective == "all_reduce":
        start = writer.call(ALL_REDUCE, operand, "sum", group_name)
    elif foreign.collective == "reduce_scatter":
        start = writer.call(REDUCE_SCATTER, operand, "sum", ranks, group_name)
    else:
        start = writer.call(ALL_GATHER, operand, ranks, group_name)
    wait = writer.call(WAIT, start)
    node.replace_all_uses_with(wait)
    # Without its operand, the call is no use of the product.
    node.args, node.kwargs = (), {}
    return SpelledCollective(node, start, wait, tuple(settings))
