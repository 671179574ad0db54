"""What the pass did with a collective, and why."""

from __future__ import annotations

import dataclasses
import re

from torch.fx import Node


class LeftAlone(Exception):
    """Raised where a collective stays as it is; the message says why, as the end of "left alone: ..."."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A collective of a graph, and what became of it.

    Attributes:
        graph: ``"forward"`` or ``"backward"``.
        collective: its operator, such as ``"all_reduce"``.
        node: its name in the graph.
        shape: of what goes into it.
        module: the module whose product it follows or feeds, where the graph says so; else ``""``.
        operator: the fused operator that took its place, or None.
        reason: why that one, or why none.
    """

    graph: str
    collective: str
    node: str
    shape: tuple[int | str, ...]
    module: str
    operator: str | None
    reason: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        done = f"fused by {self.operator}" if self.operator else "left alone"
        return f"{self.graph}: {self.collective} of {list(self.shape)} ({self.node}{where}) {done}: {self.reason}"


def module_of(node: Node) -> str:
    """The path of the module that a node was traced from (of its forward pass, for a gradient), or ``""``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = list(stack.values())
    if not entries:
        return ""
    path = re.sub(r"\['?(\w+)'?\]", r".\1", str(entries[-1][0]))  # L['self']._modules['mlp']._modules['down']
    return re.sub(r"^L\.(self\b)?|\b_modules\.", "", path).strip(".")
