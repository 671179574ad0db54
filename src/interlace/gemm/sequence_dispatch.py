"""Agree on a call between two layouts of one matrix with all ranks, choose, and run it."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

from interlace.comm import Group
from interlace.comm.runtime import ranges
from interlace.costs.known_profiles import as_of
from interlace.gemm import invariance
from interlace.gemm.decision import AgreedKind, agree_on
from interlace.gemm.operands import Operands
from interlace.gemm.sequence import Ranges, SequenceCall, SequenceOperator
from interlace.mapped.meeting import compare_once
from interlace.registry import Implementation
from interlace.tuning.choice import Choice


def run(
    operator: SequenceOperator,
    operands: Operands,
    rows: tuple[int, ...],
    columns: Ranges,
    gather: bool,
    group: Group,
    group_name: str,
    impl: str,
    config: str,
    known: Hashable,
) -> Any:
    """Agree on a call with all ranks, choose what runs it, and run it. Collective.

    Args:
        rows: Rows of the sequence on each rank, as the caller says.
        columns: The columns of each rank, as the caller says.
        gather: Whether the gathered x is a result, too; ranks may differ in it.
        config: The text of a configuration; empty for the one that is chosen.
        known: By what ``Group.recall`` finds the call when it comes again; None for nothing.

    Raises:
        ArgumentError: The lists do not fit, or ``impl`` cannot run such a call, or not with the
            same bits in every batch where those are asked for.
        RankMismatchError: Ranks differ in what must be the same; raised on every rank.
        GroupError: The group is broken.
    """

    def decide() -> tuple[AgreedKind, Choice[Any]]:
        return _decide(operator, operands, rows, columns, group, impl, config)

    impl = invariance.effective_impl(operator, impl)
    key = operator.name, operands.signature(), rows, columns, impl, config
    agreed, choice = group.once(key, decide)
    call = SequenceCall(
        operands, rows, columns, gather, group, group_name, choice.config, agreed.mark
    )
    implementation = _implementation(operator, impl, choice, call)
    group.check()
    if operator.is_pair(implementation.name):
        compare_once(group, agreed.family, operator.name, operands.rows)
    tensors = (operands.x, operands.w)
    with ranges.around(operator.name, implementation.name, tensors, lambda: None):
        return group.perform(implementation.run(call), known)


def _decide(
    operator: SequenceOperator,
    operands: Operands,
    rows: tuple[int, ...],
    columns: Ranges,
    group: Group,
    impl: str,
    config: str,
) -> tuple[AgreedKind, Choice[Any]]:
    """Agree on calls of one kind with all ranks, and choose what runs them. Collective.

    Where all ranks have equally many rows, ranks of one node agree once for all numbers of them.

    Returns:
        What they have agreed on, and the choice.
    """
    rank, world_size, nodes = group.rank, group.world_size, group.nodes
    is_batch_invariant = invariance.is_invariant(impl)
    shared = {
        **operator.excess(operands, rows, columns, rank, world_size),
        "the_columns_of_each_rank": columns,
        **operands.agreed(),
        "impl": impl,
        "config": config,
    }

    def choose() -> Choice[Any]:
        return operator.choice_of(
            operands, rows, columns, world_size, nodes, is_batch_invariant=is_batch_invariant
        )

    agreed = agree_on(
        group,
        operator.name,
        shared,
        {"the_rows_of_each_rank": rows},
        operands.rows,
        lambda: choose().packed(),
        for_all_rows=len(rows) == world_size and len({*rows}) == 1,
    )
    operator.check(operands, rows, columns, rank, world_size)
    operands.require_supported(operator.name, takes_float8=False)
    if agreed.choice is None:
        # What ranks have in common is what they knew when they agreed.
        with as_of(agreed.profiles):
            choice = choose()
    else:
        choice = Choice.unpacked(operator, agreed.choice)
    needed = choice.impl if is_batch_invariant else impl
    operator.require_nodes(needed, nodes, is_invariant=is_batch_invariant)
    return agreed, choice.with_text(operator, config) if config else choice


def _implementation(
    operator: SequenceOperator, impl: str, choice: Choice[Any], call: SequenceCall
) -> Implementation:
    """Return what runs a call: ``impl``, or what was chosen, and the pair where the memory of that
    does not fit under the group's limit, or there is nothing to multiply.
    """
    if not (sum(call.rows) and call.operands.columns and sum(call.column_counts)):
        return operator.implementation("unfused")
    if invariance.is_invariant(impl):
        return operator.implementation(choice.impl)
    if impl not in operator.choosers:
        return operator.implementation(impl)
    chosen = operator.implementation(choice.impl)
    lacks = call.group.shortage(functools.partial(chosen.reservation, call))
    return chosen if lacks is None else operator.implementation("unfused")
