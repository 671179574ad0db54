"""Define what a cost consists of, and find an operator's formula by the operator's name.

An operator's formula is declared with :func:`cost_of`, so readers (the simulator, benchmarks,
tests) look an operator up and need no list of names. Neither torch nor Triton is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from interlace.errors import ArgumentError

Computation = Literal["GEMM", "GEMV", "embedding", "experts", "loss", "choice"]
Formula = TypeVar("Formula", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Cost:
    """Work and traffic of one rank in one call.

    Attributes:
        flops: Multiplications and additions.
        memory_bytes: Bytes that this GPU's memory reads and writes, writes by peers included.
        link_bytes: Bytes of the puts that leave this rank.
        messages: Number of puts; a put that a program sends to several peers counts once per peer.
        signals: Number of signals that leave this rank.
        network_bytes: Bytes among ``link_bytes`` that go to ranks of other nodes.
        network_messages: Messages among ``messages`` that go there.
    """

    flops: int
    memory_bytes: int
    link_bytes: int
    messages: int
    signals: int
    network_bytes: int = 0
    network_messages: int = 0


@dataclasses.dataclass(frozen=True)
class NetworkCost:
    """The traffic of one rank between nodes, from which the time of a call follows.

    Attributes:
        network_bytes: Bytes that go to ranks of other nodes.
        network_messages: Messages that go there.
        slices: Exchanges that the messages leave in, one after another; 1 for a collective.
        remote_share: Fraction of the computation after which the last of them is complete.
        landing_bytes: Bytes that memory reads and writes to copy what has arrived to its place.
        shares: Relative sizes of the exchanges; empty if they are equal.
    """

    network_bytes: int
    network_messages: int
    slices: int = 1
    remote_share: float = 1.0
    landing_bytes: int = 0
    shares: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class OperatorCost:
    """Declaration of one operator's cost.

    Attributes:
        operator: The operator's public name.
        formula: Cost of the fused forward kernel on one rank; its arguments are the operator's
            sizes, by keyword.
        computation: Kind of computation that the operator fuses with its collective.
        collective: Name of the collective: ``"all_to_all"``, ``"all_reduce"``,
            ``"reduce_scatter"`` or ``"all_gather"``.
        collective_first: Whether the collective feeds the computation instead of taking its output.
        between_nodes: Traffic of each implementation whose results leave for other nodes in slices,
            by its name; see :func:`network_cost_of`.
    """

    operator: str
    formula: Callable[..., Any]
    computation: Computation
    collective: str
    collective_first: bool = False
    between_nodes: Mapping[str, Callable[..., NetworkCost]] = dataclasses.field(
        default_factory=dict
    )


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


def network_cost_of(operator: str, implementation: str) -> Callable[[Formula], Formula]:
    """Declare the decorated function as the traffic between nodes of an implementation.

    Its time between nodes is predicted from that traffic, so it needs nothing else. The function
    takes what the operator's forward formula takes, and ``rank``, ``node_of_rank`` and ``slices``
    by keyword, and returns a :class:`NetworkCost`.

    Raises:
        ArgumentError: the operator has no forward cost yet.
    """

    def declare(formula: Formula) -> Formula:
        declared = find_cost(operator)
        OPERATOR_COSTS[operator] = dataclasses.replace(
            declared, between_nodes={**declared.between_nodes, implementation: formula}
        )
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
