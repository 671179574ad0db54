"""``interlace.compile.explain``, a report on a model's collectives and the pass's decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from interlace.compile.backends import eager_backend
from interlace.compile.findings import PRODUCTS, Finding, recording


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


def explain(model: Callable[..., Any], *inputs: Any, **keywords: Any) -> Report:
    """List a model's collectives, what the pass does with each of them, and why.

    The model runs forward once, with the fused operators, so every rank of its groups must call
    this function. If inputs or parameters require gradients, the backward graph is analysed but
    not run. Like ``torch._dynamo.explain`` this resets ``torch.compile`` before and after: models
    that were compiled before are compiled again at their next call.

    Args:
        model: A module or function that is not compiled yet.
        inputs: The positional arguments of the model's call.
        keywords: The keyword arguments of the model's call.

    Returns:
        A :class:`Report` with a :class:`Finding` for each collective, and for products that became
        one kernel; the findings of a forward graph precede those of its backward graph.

    Example:
        >>> print(interlace.compile.explain(block, x))
        2 collectives: 1 fused, 1 left alone
        forward: all_reduce of [4096, 8192] (all_reduce in mlp.down) fused by gemm_all_reduce:
            measured on ...
        backward: all_reduce of [4096, 8192] (all_reduce_1) left alone: what goes into it is add_3,
            not a product
    """
    torch.compiler.reset()
    try:
        with recording() as findings:
            torch.compile(model, backend=eager_backend)(*inputs, **keywords)
    finally:
        torch.compiler.reset()
    return Report(tuple(findings))
