"""``interlace.compile.explain``: what the pass finds in a model, and what it does about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from interlace.compile.backends import eager_backend
from interlace.compile.findings import Finding, recording


@dataclasses.dataclass(frozen=True)
class Report:
    """Findings of all graphs of a model; ``print`` it for a line a collective."""

    findings: tuple[Finding, ...]

    @property
    def fused(self) -> tuple[Finding, ...]:
        """The pairs that became one operator."""
        return tuple(finding for finding in self.findings if finding.operator)

    @property
    def left(self) -> tuple[Finding, ...]:
        """The collectives that stay."""
        return tuple(finding for finding in self.findings if not finding.operator)

    def __str__(self) -> str:
        head = f"{len(self.findings)} collectives: {len(self.fused)} fused, {len(self.left)} left alone"
        return "\n".join([head, *map(str, self.findings)])


def explain(model: Callable[..., Any], *inputs: Any, **keywords: Any) -> Report:
    """List a model's collectives, what the pass does with each, and why.

    The model runs forward once, by the fused operators, so every rank of its groups must call this;
    its backward graph, where the inputs or parameters require gradients, is looked at and not run.
    As ``torch._dynamo.explain`` does, this resets ``torch.compile`` before and after: models that
    were compiled before are compiled again when they are next called.

    Args:
        model: a module or function, not compiled yet.
        inputs, keywords: what to call it with.

    Returns:
        A :class:`Report`: a :class:`Finding` for each collective, forward graphs before their
        backward graphs.

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
