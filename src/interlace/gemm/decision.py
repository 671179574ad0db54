"""How a call of an operator around a matrix product is to run: ranks agree on it, and choose."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from interlace.comm import Group
from interlace.comm.groups.symmetric_memory import SymmetricPlace
from interlace.comm.host.agreement import Family
from interlace.comm.host.identity import profile_digest
from interlace.costs.known_profiles import as_of, version
from interlace.errors import ArgumentError, InterlaceError
from interlace.gemm import autotune, invariance
from interlace.gemm.between_nodes import times_between_nodes
from interlace.gemm.call import RowPlan
from interlace.gemm.config import GemmConfig
from interlace.gemm.epilogue import Epilogue
from interlace.gemm.invariance import (
    invariant_implementation,
    is_invariant,
    most_ranks_in,
    name_in,
)
from interlace.gemm.operands import Operands
from interlace.gemm.operator import GemmOperator, Splits
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.gemm.terms import Terms
from interlace.registry import Implementation
from interlace.tuning.choice import Choice, configured

log = logging.getLogger("interlace.gemm")


@dataclasses.dataclass
class Decision:
    """The implementation, rows and configuration of calls of one kind, agreed on by all ranks.

    Attributes:
        mark: The number that the calls' signals carry.
        rows: How rows are shared out.
        implementations: What runs: the first one that has memory for these sizes.
        choice: What was chosen, with the configurations that implementations run with.
        predicted_us: The predicted times of implementations; empty where the caller has chosen.
        kind: What all ranks have agreed on; of calls that they have agreed on for all numbers of
            rows, the class of the rows beside it.
        family: What ranks have agreed on, if that was for all numbers of rows.
        leaves: As a ``GemmCall`` has them.
        is_measured: Whether the order of the implementations was measured.
        has_run: Whether such a call has run, so that its memory is there.
    """

    mark: int
    rows: RowPlan
    implementations: tuple[Implementation, ...]
    choice: Choice[GemmConfig]
    predicted_us: Mapping[str, float]
    kind: tuple[Hashable, ...]
    family: Family | None = None
    leaves: int = 0
    is_measured: bool = False
    has_run: bool = False

    def of_call(self) -> dict[str, Any]:
        """Return the fields that a ``GemmCall`` has of it."""
        return {
            "rows": self.rows,
            "config": self.choice.config,
            "configs": self.choice.configs,
            "mark": self.mark,
            "leaves": self.leaves,
            "family": self.family,
        }


class Asked(NamedTuple):
    """What a call asks for, validated on this rank.

    Attributes:
        operator, operands: As a ``GemmCall`` has them.
        splits: The lists of rows that the operator takes, each None for the default.
        impl: As a ``GemmCall`` has it.
        config: The text of a configuration; empty for the tuned table's.
        place: As a ``GemmCall`` has it.
        epilogue: As a ``GemmCall`` has it.
    """

    operator: GemmOperator
    operands: Operands
    splits: Splits
    impl: str
    config: str
    place: SymmetricPlace | None
    epilogue: Epilogue | None

    def key(self) -> tuple[Hashable, ...]:
        """Return all by which the call is decided, for ``CallCache.decided``."""
        after = () if self.epilogue is None else self.epilogue.signature()
        return (
            self.operator.name, *self.operands.signature(), self.splits, self.impl, self.config,
            self.place, *after,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AgreedKind:
    """What all ranks have agreed on, by which each decides for itself.

    Attributes:
        mark, kind, family: As a :class:`Decision` has them.
        profiles: The profiles that ranks knew then, for ``known_profiles.as_of``.
        choice: What rank 0 has chosen, for all; None where each rank chooses.
    """

    mark: int
    kind: tuple[Hashable, ...]
    profiles: int
    family: Family | None = None
    choice: list[Any] | None = None

    @staticmethod
    def of(family: Family, rows: int, *shared: Hashable) -> AgreedKind:
        """Return what ranks have agreed on of the calls of a family with so many rows of x.

        Args:
            shared: What all calls of the family have in common.
        """
        kind = *shared, autotune.class_of(rows)
        return AgreedKind(family.mark(rows), kind, family.profiles, family)


def agree(asked: Asked, group: Group) -> AgreedKind:
    """Agree on a call with all ranks. Collective.

    Calls that differ in their rows alone, without lists of them, are agreed on once for all numbers
    of rows, as a server sees hundreds. Each rank chooses for itself then, and all alike, as they go
    by the same code, tables and profiles.
    """
    operator, operands, splits, place = asked.operator, asked.operands, asked.splits, asked.place
    of_rows = operator.agreed(operands, splits, group)
    also_agreed = {} if asked.epilogue is None else asked.epilogue.agreed()
    shared = {**operands.agreed(), **also_agreed, "impl": asked.impl, "config": asked.config}
    if operator.reads_in_place:
        shared["the_place_of_x"] = "ordinary memory" if place is None else str(place)

    def choose() -> list[Any] | None:
        # Lists that differ by rank are known once ranks have exchanged them; then each chooses.
        if operator.exchanges(splits):
            return None
        try:
            rows = operator.plan_rows(operands.rows, splits, group)
        except InterlaceError:  # which ranks raise when they decide, together
            return None
        return _choose(operator, operands, rows, group, place).packed()

    for_all_rows = all(rows is None for rows in splits)
    return agree_on(
        group, operator.name, shared, of_rows, operands.rows, choose, for_all_rows=for_all_rows
    )


def agree_on(
    group: Group,
    operator: str,
    shared: Mapping[str, Hashable],
    of_rows: Mapping[str, Hashable],
    rows: int,
    choose: Callable[[], list[Any] | None],
    *,
    for_all_rows: bool,
) -> AgreedKind:
    """Agree on a call with all ranks. Collective.

    Args:
        group: The ranks.
        operator: The operator's name.
        shared: What calls have in common that differ in their rows alone; equal on all ranks.
        of_rows: What follows from the rows, and is equal on all ranks, too.
        rows: Rows of x.
        choose: Returns rank 0's choice, packed, where ranks choose together.
        for_all_rows: Whether ranks of one node agree once for all numbers of rows.
    """
    # Ranks compare everything before the first of them goes on: a later refusal is every rank's.
    if for_all_rows and not group.spans_nodes:
        family = group.agreement.family(operator, shared, of_rows, profile_digest(group.device))
        if family.is_alike:
            return AgreedKind.of(family, rows, operator, *shared.items())
    agreed = {**of_rows, **shared}
    mark, chosen_by_rank_0 = group.agreement.agree(operator, agreed, choose)
    return AgreedKind(mark, (operator, *agreed.items()), version(), choice=chosen_by_rank_0)


def decide(asked: Asked, group: Group, agreed: AgreedKind) -> Decision:
    """Choose how a call runs that ranks have agreed on.

    It exchanges nothing, but for lists of rows that ranks exchange in every call.
    """
    operator, operands, splits = asked.operator, asked.operands, asked.splits
    impl, config, place = asked.impl, asked.config, asked.place
    operands.require_supported(operator.name, operator.takes_float8)
    rows = operator.plan_rows(operands.rows, splits, group)
    terms = operands.terms(rows.is_even, group.world_size, group.members.node_of_rank)
    # A call within the mode says by its word what the caller has named.
    named, is_free = name_in(impl), not is_invariant(impl)
    most_ranks, leaves = most_ranks_in(impl), 0
    if most_ranks > 1 and operator.adds_ranks:
        ranks, dtype = group.world_size, operands.x.dtype
        leaves = invariance.leaves_of(operator.name, most_ranks, ranks, operands.inner, dtype)
    asked_for = named or operator.choosers[0]
    operator.require_nodes(asked_for, group.nodes, terms, is_invariant=not is_free)
    if agreed.choice is None:
        # What ranks have in common is what they knew when they agreed.
        with as_of(agreed.profiles):
            choice = _choose(operator, operands, rows, group, place)
    else:
        choice = Choice.unpacked(operator, agreed.choice)
    if not is_free:
        # A configuration names the kernel that it is for. One of another type than the operator's
        # has one kernel, whatever the number of rows.
        kernel = configured(operator, config) if config else None
        if kernel is not None and kernel.config_type is not None and not named:
            invariant = kernel
        else:
            name, x = named or (kernel.name if kernel else ""), operands.x
            invariant = invariant_implementation(operator, x.device, x.dtype, choice, terms, name)
        operator.require_nodes(invariant.name, group.nodes, terms, is_invariant=True)
        implementations = resolve(operator, invariant.name, choice, terms)
        chosen = operator.invariant_choice(
            operands, choice, group.world_size, for_all_ranks=most_ranks > 1
        )
    else:
        implementations = resolve(operator, impl, choice, terms)
        chosen = choice
    if config:
        chosen = chosen.with_text(operator, config)
    if operands.has_block_scales:
        chosen = _with_shorter_steps(chosen)
    # Where the caller has decided there is nothing to measure.
    is_open = impl in operator.choosers and is_free and not config
    if log.isEnabledFor(logging.DEBUG):
        shapes = list(operands.x.shape), list(operands.w.shape)
        log.debug(
            "%s of x %s and w %s with impl=%r: %s (%s)",
            operator.name, *shapes, impl, choice.impl, choice.reason,
        )  # fmt: skip
    return Decision(
        agreed.mark,
        rows,
        implementations,
        chosen,
        # Only calls within a node are measured at their first call.
        choice.times_us if is_open and not group.spans_nodes else {},
        agreed.kind,
        agreed.family,
        leaves,
    )


def _with_shorter_steps(choice: Choice[Any]) -> Choice[Any]:
    """Return a choice whose configurations go along K in steps within a block of scales."""

    def shorten(config: Any) -> Any:
        return dataclasses.replace(config, block_k=min(config.block_k, SCALE_BLOCK))

    configs = {name: shorten(config) for name, config in choice.configs.items()}
    return dataclasses.replace(choice, config=shorten(choice.config), configs=configs)


def _choose(
    operator: GemmOperator,
    operands: Operands,
    rows: RowPlan,
    group: Group,
    place: SymmetricPlace | None,
) -> Choice[Any]:
    """Return what a free call takes by what this rank knows, between nodes if there are several."""
    sizes = operands.sizes(rows.product)
    choice = operator.choose(
        **sizes,
        out_dtype=operands.out_dtype,
        world_size=group.world_size,
        w_along_k=operands.w_along_k,
        **({} if place is None else {"in_place": True}),
        **({"has_block_scales": True} if operands.has_block_scales else {}),
    )
    if not group.spans_nodes:
        return choice
    times = times_between_nodes(operator.name, group.nodes, **sizes, world_size=group.world_size)
    return choice.between(operator, group.nodes, times)


def resolve(
    operator: GemmOperator, impl: str, choice: Choice[Any], terms: Terms
) -> tuple[Implementation, ...]:
    """Return what may run a call: ``impl``, or what was chosen and does not refuse it, in turn.

    Raises:
        ArgumentError: ``impl`` was asked for and cannot run such a call.
    """
    if impl in operator.choosers:
        candidates = map(operator.implementation, choice.candidates)
        return tuple(candidate for candidate in candidates if candidate.refusal(terms) is None)
    implementation = operator.implementation(impl)
    refusal = implementation.refusal(terms)
    if refusal is None:
        return (implementation,)
    nodes = 1 + max(terms.node_of_rank, default=0)
    raise ArgumentError(
        f"{operator.name}: impl={impl!r} must have {refusal}. {operator.advice(terms, nodes)}"
    )
