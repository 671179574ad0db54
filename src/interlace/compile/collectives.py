"""Collectives in a graph: a call that starts the collective, and calls that wait for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import Node

from interlace.compile import rows
from interlace.compile.findings import LeftAlone
from interlace.compile.graph import Writer, argument, arguments_of, between, erase_unused, value
from interlace.compile.producers import is_work

# Registers the collectives' operators.
import torch.distributed._functional_collectives  # isort: skip

_namespace = torch.ops._c10d_functional
WAIT = _namespace.wait_tensor.default
ALL_REDUCE = _namespace.all_reduce.default
REDUCE_SCATTER = _namespace.reduce_scatter_tensor.default
ALL_GATHER = _namespace.all_gather_into_tensor.default
ALL_TO_ALL = _namespace.all_to_all_single.default

_KNOWN = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL)
"""The collectives that operators have."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a fused operator may replace together with a product.

    Attributes:
        node: The call that starts the collective.
        input: The collective's operand.
        waits: The calls that wait for the collective, in the graph's order.
        group_name: The name of the process group.
    """

    node: Node
    input: Node
    waits: list[Node]
    group_name: str

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def result(self) -> torch.Tensor:
        """The (fake) tensor that the first wait returns."""
        return value(self.waits[0])

    def require_sum(self) -> None:
        """Raise :class:`LeftAlone` unless a reduction is a sum."""
        reduction = argument(self.node, "reduce_op")
        if reduction != "sum":
            raise LeftAlone(f"it reduces by {reduction!r}; operators add")

    def require_waiting(self) -> None:
        """Raise :class:`LeftAlone` if the program computes something during the collective."""
        # Work between the call and its wait already hides the communication. A fused operator
        # would move the collective to the product and lose that overlap.
        for node in between(self.node, self.waits[0]):
            if is_work(node):
                raise LeftAlone(
                    f"{node.name} runs between the collective and its wait, and hides it already"
                )

    def require_even(self, ranks: int) -> None:
        """Raise :class:`LeftAlone` unless the operand's first dimension divides over the ranks."""
        if value(self.input).dim() < 2 or value(self.input).shape[0] % ranks:
            raise LeftAlone(f"its first dimension does not divide evenly over {ranks} ranks")

    def require_even_splits(self, ranks: int) -> None:
        """Raise :class:`LeftAlone` unless an all-to-all's splits are even and known when
        compiling.
        """
        self.require_even(ranks)
        share = value(self.input).shape[0] // ranks
        arguments = arguments_of(self.node)
        sizes = (*arguments["output_split_sizes"], *arguments["input_split_sizes"])
        if any(not isinstance(size, int) or size != share for size in sizes):
            raise LeftAlone(
                "its splits are not even; the operator would compare them on the host in each call"
            )

    def require_no_other_use(self, nodes: Collection[Node], description: str) -> None:
        """Raise :class:`LeftAlone` if one of ``nodes`` has a use that does not lead here.

        Args:
            nodes: The product and the nodes between it and the collective.
            description: The word for ``nodes`` in the message, such as ``"the product"``.
        """
        allowed = {self.node, *nodes}
        for node in nodes:
            outside = [user for user in node.users if user not in allowed]
            if outside and not _reaches(node, allowed):
                raise LeftAlone(f"{outside[0].name} uses {description}, too")

    def become(self, y: Node, writer: Writer, before: Iterable[Node]) -> None:
        """Replace the collective by ``y``, which has as many elements, and erase unused nodes.

        Args:
            y: The fused operator's result.
            writer: Adds the calls that bring ``y`` into the collective's shape and strides.
            before: The product and the nodes between it and the collective; those that nothing
                uses any more are erased.
        """
        self.replace(writer.shaped_as(y, self.result))
        erase_unused(before)

    def replace(self, result: Node) -> None:
        """Replace the collective and its waits by ``result``, and erase them."""
        for wait in self.waits:
            wait.replace_all_uses_with(result)
            wait.graph.erase_node(wait)
        # A graph may save the collective's result for the backward pass before the wait. The wait
        # returns the same memory, so ``result`` replaces this use as well.
        self.node.replace_all_uses_with(result)
        self.node.graph.erase_node(self.node)


def _reaches(node: Node, allowed: set[Node]) -> bool:
    """Return whether every use of ``node`` leads to a node of ``allowed``."""
    # The parts of a split are all on the way to the collective if they are concatenated again, so
    # uses are followed downstream as long as they only move rows.
    pending = [user for user in node.users if user not in allowed]
    while pending:
        user = pending.pop()
        if not rows.moves_rows(user) or not user.users:
            return False
        pending += [after for after in user.users if after not in allowed]
    return True


def is_collective(node: Node) -> bool:
    """Return whether a node starts a functional collective of ``torch.distributed``.

    It need not be a collective that a fused operator exists for.
    """
    if node.op != "call_function" or getattr(node.target, "namespace", "") not in (
        "_c10d_functional",
        "_dtensor",
    ):
        return False
    return str(node.target).split(".")[1] not in ("wait_tensor", "_wrap_tensor_autograd")


def is_only_use(node: Node, wait: Node) -> bool:
    """Return whether ``node`` alone uses what a collective has brought to memory of its own.

    Args:
        node: A user of ``wait``.
        wait: A call that waits for a collective, or for something else.
    """
    start = wait.args[0]
    return (
        isinstance(start, Node)
        # Others write to memory that the program has given them.
        and start.target in _KNOWN
        and set(start.users) == {wait}
        and set(wait.users) == {node}
    )


def read(node: Node) -> Collective:
    """Return the collective that a node starts.

    Raises:
        LeftAlone: No operator has this collective, its group is unknown, or its result is used
            without a wait.
    """
    if node.op != "call_function":
        # A backward pass waits for what the forward pass has started and saved without a wait.
        raise LeftAlone("another graph has started it")
    if node.target not in _KNOWN:
        # A Python function, such as the one that takes a result out of several, has no namespace.
        name = str(node.target).partition(".")[2].partition(".")[0]
        in_place = " in place" if name.endswith(("_", "_out")) else ""
        raise LeftAlone(f"no operator has this collective{in_place}")
    group = argument(node, "group_name")
    # Some versions of DTensor pass the ProcessGroup itself instead of its name.
    group = getattr(group, "group_name", group)
    if not isinstance(group, str):
        raise LeftAlone("its group is not known when compiling")
    waits = sorted(user for user in node.users if user.target is WAIT)
    if not waits or any(user.target is not WAIT and user.op != "output" for user in node.users):
        raise LeftAlone("its result is used without waiting for it")
    if not any(wait.users for wait in waits):
        raise LeftAlone("nothing uses its result")
    return Collective(node, argument(node, "input"), waits, group)
