"""Collectives in a graph: the call, and the waits for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from interlace.compile.findings import LeftAlone
from interlace.compile.graph import Writer, argument, between, erase_unused, value
from interlace.compile.producers import is_work

# Registers the collectives' operators.
import torch.distributed._functional_collectives  # isort: skip

_namespace = torch.ops._c10d_functional
WAIT = _namespace.wait_tensor.default
ALL_REDUCE = _namespace.all_reduce.default
REDUCE_SCATTER = _namespace.reduce_scatter_tensor.default
ALL_GATHER = _namespace.all_gather_into_tensor.default
ALL_TO_ALL = _namespace.all_to_all_single.default

# Where the group stands among the arguments.
_GROUP = {ALL_REDUCE: 2, REDUCE_SCATTER: 3, ALL_GATHER: 2, ALL_TO_ALL: 3}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that an operator could take part in.

    Attributes:
        node: the call.
        input: what goes into it.
        waits: the calls that wait for it, in the graph's order.
        group_name: of its process group.
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
        """What it gives, as the first wait does."""
        return value(self.waits[0])

    @property
    def splits(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Of an all-to-all: rows to each rank, rows from each rank."""
        return argument(self.node, 2, "input_split_sizes"), argument(
            self.node, 1, "output_split_sizes"
        )

    def require_sum(self) -> None:
        """Raise :class:`LeftAlone` unless a reduction is a sum."""
        how = argument(self.node, 1, "reduce_op")
        if how != "sum":
            raise LeftAlone(f"it reduces by {how!r}; operators add")

    def require_waiting(self) -> None:
        """Raise :class:`LeftAlone` where the program has something else to do in the meantime."""
        for node in between(self.node, self.waits[0]):
            if is_work(node):
                raise LeftAlone(
                    f"{node.name} runs between the collective and its wait, and hides it already"
                )

    def become(self, y: Node, writer: Writer, before: Iterable[Node]) -> None:
        """Let ``y``, of as many elements, take the place of the collective, and of the nodes that
        came ``before`` it.
        """
        self.replace(writer.laid_out_as(writer.reshape(y, self.result.shape), self.result))
        erase_unused(before)

    def replace(self, result: Node) -> None:
        """Let ``result`` take the place of the collective and its waits, which are erased."""
        for wait in self.waits:
            wait.replace_all_uses_with(result)
            wait.graph.erase_node(wait)
        # Saved for the backward pass before it was waited for: the same memory
        self.node.replace_all_uses_with(result)
        self.node.graph.erase_node(self.node)


def is_collective(node: Node) -> bool:
    """Whether a node starts a collective of ``torch.distributed``'s functional kind, one that
    operators know or not.
    """
    if node.op != "call_function" or getattr(node.target, "namespace", "") not in (
        "_c10d_functional",
        "_dtensor",
    ):
        return False
    return str(node.target).split(".")[1] not in ("wait_tensor", "_wrap_tensor_autograd")


def read(node: Node) -> Collective:
    """The collective that a node starts.

    Raises:
        LeftAlone: no operator has it, its group is not known, or its result is used in another way
            than by waiting for it.
    """
    if node.target not in _GROUP:
        in_place = " in place" if str(node.target).split(".")[1].endswith(("_", "_out")) else ""
        raise LeftAlone(f"no operator has this collective{in_place}")
    group = argument(node, _GROUP[node.target], "group_name")
    group = getattr(group, "group_name", group)
    if not isinstance(group, str):
        raise LeftAlone("its group is not known when compiling")
    waits = sorted(user for user in node.users if user.target is WAIT)
    if not waits or any(user.target is not WAIT and user.op != "output" for user in node.users):
        raise LeftAlone("its result is used without waiting for it")
    if not any(wait.users for wait in waits):
        raise LeftAlone("nothing uses its result")
    return Collective(node, argument(node, 0, "input"), waits, group)
