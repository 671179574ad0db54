"""Calls of every implementation of every operator, with the results that they must have.

The soak (``interlace soak``), the smoke test on GPUs and the run under ``compute-sanitizer`` share
this list::

    for case in every_case(world_size):
        assert case.prepare().check() == [0] * ..., case.label
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from interlace import registry
from interlace.testing.cases import (
    choices,
    embedding,
    experts,
    losses,
    norms,
    outputs,
    products,
    sequence,
    sums,
)
from interlace.testing.cases.base import Case, Prepared

_MODULES = {
    operator: module
    for module in (products, norms, sums, sequence, embedding, experts, losses, choices, outputs)
    for operator in module.IMPLEMENTATIONS
}

IMPLEMENTATIONS: Mapping[str, Sequence[str]] = {
    operator: module.IMPLEMENTATIONS[operator] for operator, module in _MODULES.items()
}
"""Operator -> its implementations: the operator's ``impl``, and behind a space a protocol of the
fused kernel where there are several.
"""

BETWEEN_NODES: Mapping[str, Sequence[str]] = experts.BETWEEN_NODES
"""Operator -> further implementations, which need ranks on several nodes."""


def every_case(
    world_size: int, operators: Sequence[str] = (), *, spans_nodes: bool = False
) -> Iterator[Case]:
    """Yield one or a few small calls of every implementation, with the backward pass if there is
    one.

    Args:
        operators: The operators to take; default: all.
        spans_nodes: Whether to yield calls of those as well that need ranks on several nodes.
    """
    for operator in operators or IMPLEMENTATIONS:
        more = BETWEEN_NODES.get(operator, ()) if spans_nodes else ()
        for impl in (*IMPLEMENTATIONS[operator], *more):
            yield from _MODULES[operator].every(operator, impl, world_size)


def between_nodes(operators: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the implementations that send something of ours between nodes, by operator.

    Args:
        operators: The operators to take, for which stock pairs count as well; default: all that
            have more than pairs.
    """
    declared = registry.operators()
    cases = {}
    for name in operators or IMPLEMENTATIONS:
        if name in declared:
            able = [
                impl
                for impl in (*IMPLEMENTATIONS[name], *BETWEEN_NODES.get(name, ()))
                if declared[name].spans_nodes(impl.partition(" ")[0])
                and (operators or not declared[name].is_pair(impl.partition(" ")[0]))
            ]
            if able:
                cases[name] = able
    return cases


def draw_case(
    world_size: int,
    source: random.Random,
    operators: Sequence[str] = (),
    *,
    large: bool = True,
    spans_nodes: bool = False,
) -> Case:
    """Return a random call of a random implementation; it depends on the state of ``source`` only.

    Args:
        operators: The operators to draw from; default: all.
        large: Whether some calls may be too large for Triton's interpreter to be quick.
        spans_nodes: Whether the ranks are on several nodes; see :func:`between_nodes`.
    """
    implementations = IMPLEMENTATIONS
    if spans_nodes:
        implementations = between_nodes(operators)
        operators = list(implementations)
    operator = source.choice(list(operators or implementations))
    impl = source.choice(implementations[operator])
    case: Case = _MODULES[operator].draw(operator, impl, world_size, source, large)
    return case


__all__ = [
    "BETWEEN_NODES",
    "IMPLEMENTATIONS",
    "Case",
    "Prepared",
    "between_nodes",
    "draw_case",
    "every_case",
]
