"""Findings: records of what the pass did with each collective, and why; and a report of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator

from torch._logging import trace_structured
from torch.fx import Node

log = logging.getLogger("interlace.compile")


PRODUCTS = "products"
"""What a finding has for a collective if it is of products with the same input."""


class LeftAlone(Exception):
    """Raised if a collective is left unchanged; the message completes "left alone: ..."."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A collective of a graph, and what the pass did with it; or products with one input.

    Attributes:
        graph: ``"forward"`` or ``"backward"``.
        collective: The collective's operator, such as ``"all_reduce"``; or ``"products"``.
        node: The collective's name in the graph, or the products' names.
        shape: The shape of the collective's operand, or of the products' input.
        module: The path of the module whose product the collective follows or feeds, or ``""`` if
            the graph does not tell.
        operator: The fused operator that replaced the collective, or None.
        reason: Why this operator was chosen, or why the collective was left alone.
    """

    graph: str
    collective: str
    node: str
    shape: tuple[int | str, ...]
    module: str
    operator: str | None
    reason: str

    def __str__(self) -> str:
        location = f" in {self.module}" if self.module else ""
        done = f"fused by {self.operator}" if self.operator else "left alone"
        subject = f"{self.collective} of {list(self.shape)} ({self.node}{location})"
        return f"{self.graph}: {subject} {done}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of all graphs of a model; ``print`` shows one line for each."""

    findings: tuple[Finding, ...]

    @property
    def merged(self) -> tuple[Finding, ...]:
        """The findings of products with the same input that became one kernel."""
        return tuple(finding for finding in self.findings if finding.collective == PRODUCTS)

    @property
    def fused(self) -> tuple[Finding, ...]:
        """The findings of pairs that a fused operator replaced."""
        return tuple(
            finding
            for finding in self.findings
            if finding.operator and finding.collective != PRODUCTS
        )

    @property
    def left(self) -> tuple[Finding, ...]:
        """The findings of collectives that were left alone."""
        return tuple(finding for finding in self.findings if not finding.operator)

    def __str__(self) -> str:
        fused, left = len(self.fused), len(self.left)
        head = f"{fused + left} collectives: {fused} fused, {left} left alone"
        if self.merged:
            head += f"; {len(self.merged)} groups of products with one input merged"
        return "\n".join([head, *map(str, self.findings)])


def module_of(node: Node) -> str:
    """Return the path of the module that a node was traced from, or ``""`` if it is unknown.

    For a node of a gradient it is the module whose forward pass the gradient belongs to.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = list(stack.values())
    if not entries:
        return ""
    # The entry reads like L['self']._modules['mlp']._modules['down'], which becomes mlp.down.
    path = re.sub(r"\['?(\w+)'?\]", r".\1", str(entries[-1][0]))
    return re.sub(r"^L\.(self\b)?|\b_modules\.", "", path).strip(".")


# Open recordings belong to the process, not to a thread: backward graphs are compiled on other
# threads than forward graphs.
_records: list[list[Finding]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[Finding]]:
    r"""Collect the findings of every graph that the pass sees within this context, in any thread.

    The logger ``interlace.compile`` receives them, too. The pass does not see a graph that Inductor
    takes from its cache.

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
        _records[:] = [kept for kept in _records if kept is not record]


def record(findings: list[Finding]) -> None:
    """Append findings to all open recordings, log them at level DEBUG, and hand them to tlparse.

    ``TORCH_LOGS="+interlace"`` shows the log; a ``TORCH_TRACE`` has the findings as the artifact
    ``interlace_findings`` of the graph that is being compiled.
    """
    for open_record in _records:
        open_record.extend(findings)
    for finding in findings:
        log.debug("%s", finding)
    if findings:
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": "interlace_findings", "encoding": "json"},
            payload_fn=lambda: [dataclasses.asdict(finding) for finding in findings],
        )
