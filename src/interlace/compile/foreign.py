"""Collectives and norms that other programs have defined as operators of their own.

Such a collective is functional, waits itself, and names its group in the program's words. The pass
spells it out as a collective of ``torch.distributed``, tries to fuse that, and puts the program's
operator back where it could not. A norm is read as it is (:mod:`interlace.compile.norms`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.fx import Graph, Node

from interlace.compile.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import Writer, arguments_of, is_static, schema_of, value

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
    """

    name: str
    collective: str
    process_group: ProcessGroupOf


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


_known: dict[str, Foreign | ForeignNorm] = {}


def register(operator: Foreign | ForeignNorm) -> None:
    """Let the pass fuse a collective of another program, or a norm behind an all-reduce."""
    collectives = ("all_reduce", "reduce_scatter", "all_gather")
    if isinstance(operator, Foreign) and operator.collective not in collectives:
        raise ValueError(f"{operator.name}: no operator has the collective {operator.collective!r}")
    _known[operator.name] = operator


def unregister(name: str) -> None:
    """Undo :func:`register`."""
    _known.pop(name, None)


def registered() -> list[tuple[str, str | bool]]:
    """Return the names of all registered operators, and what they do."""
    return sorted(
        (name, known.collective if isinstance(known, Foreign) else known.has_residual)
        for name, known in _known.items()
    )


def called(node: Node) -> Foreign | ForeignNorm | None:
    """Return the registered operator that a node calls; None if it calls none."""
    schema = schema_of(node)
    return None if schema is None else _known.get(schema.name)


@dataclasses.dataclass
class Spelled:
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


def spell_out(graph: Graph) -> tuple[list[Spelled], list[tuple[Node, str]]]:
    """Replace the collectives of other programs by those of ``torch.distributed``.

    Returns:
        The replaced calls, to be finished after the pass; and the calls that have no such spelling,
        with the reason.
    """
    spelled, refused = [], []
    for node in list(graph.nodes) if _known else []:
        foreign = called(node)
        if not isinstance(foreign, Foreign):
            continue
        try:
            spelled.append(_spell(node, foreign))
        except LeftAlone as refusal:
            refused.append((node, str(refusal)))
    return spelled, refused


def _spell(node: Node, foreign: Foreign) -> Spelled:
    named = arguments_of(node)
    operand, *settings = named.values()

    def of(name: str) -> Any:
        if name not in named:
            raise LeftAlone(f"{foreign.name} has no argument {name!r}")
        return named[name]

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
    return Spelled(node, start, wait, tuple(settings))
