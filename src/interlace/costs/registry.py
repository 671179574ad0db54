"""The register of cost formulas: an operator's name leads to its formula and its collective.

Each operator's own file declares its formula with :func:`cost_of`, so readers (the simulator,
benchmarks, tests) look an operator up and need no list of names. Neither torch nor Triton is
imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from interlace.errors import ArgumentError

Computation = Literal["GEMM", "batched GEMM", "GEMV", "embedding", "experts"]
Formula = TypeVar("Formula", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class OperatorCost:
    """Declaration of one operator's cost.

    Attributes:
        operator: the operator's public name.
        formula: cost of the fused forward kernel on one rank; its arguments are the operator's
            sizes, by keyword.
        computation: kind of computation that the operator fuses with its collective.
        collective: name of the collective: ``"all_to_all"``, ``"all_reduce"``,
            ``"reduce_scatter"`` or ``"all_gather"``.
        collective_first: whether the collective feeds the computation instead of taking its output.
        gradient: cost of the fused backward kernel; None if the operator has none of its own.
    """

    operator: str
    formula: Callable[..., Any]
    computation: Computation
    collective: str
    collective_first: bool = False
    gradient: Callable[..., Any] | None = None


OPERATOR_COSTS: dict[str, OperatorCost] = {}
"""Every declared cost by the operator's name."""


def cost_of(
    operator: str, *, computation: Computation, collective: str, collective_first: bool = False
) -> Callable[[Formula], Formula]:
    """Declare the decorated function as the forward cost of ``operator``.

    Raises:
        ArgumentError: the operator has a cost already.
    """

    def declare(formula: Formula) -> Formula:
        # Two formulas under one name would make results depend on the order of imports.
        if operator in OPERATOR_COSTS:
            raise ArgumentError(
                f"cost_of: an operator must have one cost; got a second one for {operator!r}. "
                "Choose another name."
            )
        OPERATOR_COSTS[operator] = OperatorCost(
            operator, formula, computation, collective, collective_first
        )
        return formula

    return declare


def gradient_cost_of(operator: str) -> Callable[[Formula], Formula]:
    """Declare the decorated function as the backward cost of ``operator``.

    Raises:
        ArgumentError: the operator has no forward cost yet.
    """

    def declare(formula: Formula) -> Formula:
        OPERATOR_COSTS[operator] = dataclasses.replace(find_cost(operator), gradient=formula)
        return formula

    return declare


def find_cost(operator: str) -> OperatorCost:
    """Return the declaration of ``operator``.

    Raises:
        ArgumentError: no operator of that name has declared a cost.
    """
    if operator not in OPERATOR_COSTS:
        raise ArgumentError(
            f"an operator must be one of {', '.join(sorted(OPERATOR_COSTS))}; got {operator!r}."
        )
    return OPERATOR_COSTS[operator]
