"""What the pass did with a collective, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator

from torch.fx import Node

log = logging.getLogger("interlace.compile")


class LeftAlone(Exception):
    """Raised where a collective stays as it is; the message says why, as the end of "left alone:
    ...".
    """


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
    """The path of the module that a node was traced from (of its forward pass, for a gradient), or
    ``""``.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = list(stack.values())
    if not entries:
        return ""
    path = re.sub(
        r"\['?(\w+)'?\]", r".\1", str(entries[-1][0])
    )  # L['self']._modules['mlp']._modules['down']
    return re.sub(r"^L\.(self\b)?|\b_modules\.", "", path).strip(".")


# Backward graphs are compiled on other threads, so these are the process's.
_records: list[list[Finding]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[Finding]]:
    r"""The findings of every graph that the pass sees within it, in any thread; also logged, as
    ``interlace.compile``.

    A compiled graph that Inductor finds in its cache is not seen again.

    Example:
        >>> with interlace.compile.recording() as findings:
        ...     torch.compile(model, backend=interlace.compile.backend)(x).sum().backward()
        >>> print(*findings, sep="\n")
    """
    record: list[Finding] = []
    _records.append(record)
    try:
        yield record
    finally:
        _records[:] = [other for other in _records if other is not record]


def record(findings: list[Finding]) -> None:
    """Tell all who are recording, and the log."""
    for each in _records:
        each.extend(findings)
    for finding in findings:
        log.info("%s", finding)
