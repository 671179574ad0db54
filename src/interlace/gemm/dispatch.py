"""Dispatch of operators around a matrix product: agree once, choose, run."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from interlace.comm import Group, group_named
from interlace.comm.replay.deferred import DeferredCall, PerformedCall, addresses
from interlace.comm.replay.replays import AgainCall, places
from interlace.comm.runtime import ranges
from interlace.comm.runtime.driver import is_out_of_memory
from interlace.costs.registry import OPERATOR_COSTS
from interlace.errors import InterlaceError, WorkspaceError
from interlace.gemm import autotune, invariance
from interlace.gemm.call import GemmCall
from interlace.gemm.choice import MAX_RANKS
from interlace.gemm.decision import AgreedKind, Asked, Decision, agree, decide
from interlace.gemm.epilogue import Epilogue
from interlace.gemm.invariance import (
    effective_impl,
    is_invariant,
)
from interlace.gemm.operands import Operands
from interlace.gemm.operator import GemmOperator, Splits
from interlace.gemm.scaled import has_block_scales
from interlace.mapped.meeting import compare_once
from interlace.registry import Implementation

Form = tuple[Hashable, ...]
"""What calls of plain operands that differ in addresses alone have in common, for
``Group.recall_form``: the number of rows of x first, and then what calls have in common that differ
in that, too.

Beside the arguments that is what the program may change between two calls: whether they must be
batch-invariant, and whether they are measured. What ranks have agreed on for such calls stays until
they forget it together.
"""

Known = tuple[Form, Hashable | None]
"""The form of a call, and what tells it from the others of that form, its addresses; None for those
of a call that its form alone finds.
"""

_ALIGNMENT = 16
"""Bytes: Triton compiles for an address that this divides, and for one that it does not."""


def recall_key(operator: str, tensors: Sequence[torch.Tensor | None], *options: Any) -> Hashable:
    """Return by what ``Group.recall`` finds a call of these tensors and options when it comes
    again; None where it is not to look: on a CPU, and while a profiler listens.
    """
    assert tensors[0] is not None
    if not tensors[0].is_cuda or ranges.is_listening():
        return None
    lists = (tuple(option) if isinstance(option, list) else option for option in options)
    return operator, *places(*tensors), invariance.mode(), *lists


def known_call(
    operator: GemmOperator,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    gather: bool,
    impl: str,
    group: Group,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
) -> Known:
    """Return the form of a call of plain operands and its addresses, for ``Group.recall``.

    Scales of rows have the same form as vectors, as rows and as columns.
    """
    kinds: tuple[Hashable, ...]
    scales: tuple[Hashable, ...] = ()
    at = x_address, w_address, bias_address, *scale_addresses = addresses(
        x, w, bias, x_scale, w_scale
    )
    # Nothing is validated yet.
    rows, inner = (x.shape[0], x.shape[1:]) if x.dim() else (0, ())
    if x_scale is not None and w_scale is not None:
        if x.dim() == w.dim() == 2 and has_block_scales(x, w, x_scale, w_scale):
            kinds = "blocks", x_scale.stride(), w_scale.stride()
        else:
            columns = w.shape[0] if w.dim() else 0
            kinds = _kind_of(x_scale, rows, (rows, 1)), _kind_of(w_scale, columns, (1, columns))
        alignments = (address % _ALIGNMENT for address in scale_addresses)
        scales = kinds, x_scale.dtype, w_scale.dtype, *alignments
    extra = None
    if bias is not None:
        extra = bias.shape, bias.dtype, bias_address % _ALIGNMENT
    form = (
        rows, operator.name, impl, gather, out_dtype,
        inner, x.stride(), x.dtype, x_address % _ALIGNMENT,
        w.shape, w.stride(), w.dtype, w_address % _ALIGNMENT,
        extra, scales, operator.place_of(x, group), invariance.mode(), autotune.is_enabled(impl),
    )  # fmt: skip
    return form, at


def _kind_of(scale: torch.Tensor, rows: int, broadcast: tuple[int, int]) -> Hashable:
    """Return of what a scale is that is not of blocks; its shape where a validation refuses that.

    Args:
        rows: The rows of its matrix.
        broadcast: The shape of a scale for each row of two dimensions.
    """
    shape = tuple(scale.shape)
    if shape in ((), (1,), (1, 1)):
        return "matrix"
    return "rows" if shape in ((rows,), broadcast) else shape


def recall(group: Group, known: Known, *operands: torch.Tensor | None) -> Any:
    """Run a call that has come before, or is like an earlier one but for its addresses and its
    rows; return its result, or None if it must take the long way.

    Args:
        group: The group of the call.
        known: Its form and its addresses.
        operands: X, w, bias and both scales, and the tensors of an epilogue.
    """
    result = group.recall_known(known, *operands)
    if result is None:
        result = group.recall_form(_of_any_rows(known[0]), known, *operands)
    return result


def _of_any_rows(form: Form) -> Form:
    """Return what calls have in common whose forms are alike but for the rows of x."""
    return "any rows", *form[1:]


def run(
    operator: GemmOperator,
    operands: Operands,
    splits: Splits,
    gather: bool,
    group_name: str,
    impl: str,
    config: str,
    epilogue: Epilogue | None = None,
    known: Known | None = None,
    out: torch.Tensor | None = None,
) -> Any:
    """Run one call whose arguments are validated.

    Args:
        splits: The lists of rows that the operator takes, each None for the default.
        gather: Whether the gathered x is a result, too.
        config: The text of a configuration, or empty for the tuned table's.
        epilogue: What is to be computed of the sum over ranks, if the operator does that.
        known: By what a call with an epilogue is to be found when it comes again, for which the
            caller looks; None for nothing.
        out: The memory of the result, of operators with one result; None for new memory.

    Returns:
        The operator's result, or its pair of results.

    Raises:
        ArgumentError: The implementation that was asked for cannot run these operands.
        RankMismatchError: Ranks differ in what must be the same.
        GroupError: The group is too large or broken.
    """
    group = group_for(operator.name, group_name, operands.x.device)
    is_plain = epilogue is None and out is None and _is_recallable(splits, config)
    if is_plain and group.replays.is_enabled:
        x, w, bias = operands.x, operands.w, operands.bias
        scales = operands.x_scale, operands.w_scale
        known = known_call(operator, x, w, bias, operands.out_dtype, gather, impl, group, *scales)
        if not ranges.is_listening():
            result = recall(group, known, x, w, bias, *scales)
            if result is not None:
                return result
    form = None if known is None else known[0]
    if known is not None and known[1] is None:
        known = None
    impl = effective_impl(operator, impl)
    lists = tuple(None if rows is None else tuple(rows) for rows in splits)
    # 1. Agree: once per kind of call, or in every call if the ranks' lists may change separately.
    is_new_each_time = operator.exchanges(lists)
    place = operator.place_of(operands.x, group) if operator.gives_rows(lists) else None

    asked = Asked(operator, operands, lists, impl, config, place, epilogue)

    def decided() -> Decision:
        return decide(asked, group, agree(asked, group))

    decision = decided() if is_new_each_time else group.cache.decided(asked.key(), decided)
    call = GemmCall(
        operator=operator,
        operands=operands,
        gather=gather,
        group=group,
        group_name=group_name,
        impl=impl,
        is_batch_invariant=is_invariant(impl),
        epilogue=epilogue,
        known=known,
        form=form,
        place=place,
        out=out,
        **decision.of_call(),
    )
    if not operands.columns or not decision.rows.total:
        return operator.run_empty(call) if out is None else out
    if group.memory.limit_bytes is not None and not decision.has_run:
        _keep_what_fits(call, decision)
    # 2. Measure, if the program wants that, and no rank has measured this kind of call.
    if not is_new_each_time and _is_to_be_measured(impl, decision):
        _measure(call, decision)
        if not decision.is_measured:
            # Ranks ask one another in the next call again, so none may pass that over.
            call = dataclasses.replace(call, known=None, form=None)
    return _run_decided(call, decision)


def _run_decided(call: GemmCall, decision: Decision) -> Any:
    """Run a call as it was decided."""
    # All ranks have agreed on the implementations, so none falls back without its peers: an
    # implementation returns None if it has no memory for these sizes, on all ranks alike.
    for implementation in decision.implementations:
        if call.operator.is_pair(implementation.name):
            compare_once(call.group, decision.family, call.operator.name, call.operands.rows)
        result = _run_if_memory(implementation, call, decision)
        if result is not None:
            decision.has_run = True
            return result
    raise AssertionError("the unfused pair runs any call")


def _is_recallable(splits: Splits, config: str) -> bool:
    """Return whether a call is found by its operands: lists of rows and given configurations are
    not looked at.
    """
    return not (config or any(rows is not None for rows in splits))


def _keep_what_fits(call: GemmCall, decision: Decision) -> None:
    """Do without implementations whose symmetric memory is beyond the group's limit, up to the
    first that fits: others are refused when they allocate. All ranks do so alike, by sizes and what
    the group holds.

    Raises:
        WorkspaceError: None is left, as the caller has asked for one, or for the same bits in every
            batch, which pairs do not give.
    """
    refused = {}
    for index, implementation in enumerate(decision.implementations):
        lack = call.group.shortage(functools.partial(implementation.reservation, call))
        if lack is None:
            decision.implementations = decision.implementations[index:]
            return
        refused[implementation.name] = lack
    name, lack = next(iter(refused.items()))
    instead = "do without batch invariance" if call.is_batch_invariant else "take impl='auto'"
    raise WorkspaceError(
        f"{call.operator.name}: impl={name!r} must fit under the group's limit of symmetric "
        f"memory; got {lack}. Raise the limit, free memory by Group.release(), or {instead}."
    )


def _run_if_memory(implementation: Implementation, call: GemmCall, decision: Decision) -> Any:
    """Run one implementation; return None, and do without it from here on, if a rank has no memory
    for it and another one may run.

    Outside of captures, a :class:`WorkspaceError` is raised on all ranks alike, and before the
    first launch.
    """
    try:
        return _run_or_give_up(implementation, call, decision)
    except WorkspaceError:
        remaining = tuple(
            candidate for candidate in decision.implementations if candidate is not implementation
        )
        may_fall_back = remaining and not call.is_explicit and not call.group.broken
        if not may_fall_back or call.group.capture_id() is not None:
            raise
        decision.implementations = remaining
        call.group.replays.forget()
    # Errors and frames that refer to each other keep the tensors of the call that has failed.
    gc.collect()
    return None


def _run_or_give_up(implementation: Implementation, call: GemmCall, decision: Decision) -> Any:
    """Run one implementation. If torch has no memory for its first call here, ranks that allocate
    symmetric memory meanwhile learn of it, and all raise a :class:`WorkspaceError`.
    """
    group = call.group
    try:
        return _run(implementation, call, decision)
    except RuntimeError as error:
        meets_others = not decision.has_run and group.world_size > 1 and group.capture_id() is None
        if not meets_others or not is_out_of_memory(error):
            raise
        group.channel.give_up(call.operator.name, error)


def _run(implementation: Implementation, call: GemmCall, decision: Decision) -> Any:
    """Run one implementation, within a range for profilers."""
    operands = call.operands
    with ranges.around(
        call.operator.name, implementation.name, (operands.x, operands.w), lambda: _link_bytes(call)
    ):
        work = implementation.run(call)
        if call.out is not None and work is not None:
            is_deferred = isinstance(work, DeferredCall)
            work = work.into(call.out) if is_deferred else call.out.copy_(work)
        result = call.group.perform(work, call.known)
    if call.form is not None and result is not None:
        _remember(call, decision, work)
    return result


def _remember(call: GemmCall, decision: Decision, work: Any) -> None:
    """Remember how a call has run, for those that are like it.

    Args:
        work: What the implementation has returned.
    """
    replays, is_of_rows = call.group.replays, call.known is not None
    assert call.form is not None
    if is_of_rows and replays.alike(call.form) is not None:
        return
    makes_again = work.again if isinstance(work, (DeferredCall, PerformedCall)) else None
    again = None if makes_again is None else makes_again()
    if is_of_rows:
        # What is remembered must refer to neither group nor operands.
        absent: Any = None
        template = dataclasses.replace(
            call,
            group=absent,
            operands=absent,
            known=None,
            form=None,
            epilogue=None if call.epilogue is None else call.epilogue.with_tensors(),
        )
        out_dtype = call.operands.out_dtype
        again = functools.partial(_run_again, decision, template, out_dtype, again)
        if decision.family is not None:
            with_any_rows = _of_any_rows(call.form)
            if replays.alike(with_any_rows) is None:
                run_other = functools.partial(_run_other_rows, decision, template, out_dtype)
                replays.remember_form(with_any_rows, run_other)
    if again is not None:
        replays.remember_form(call.form, again)


def _run_other_rows(
    decision: Decision,
    template: GemmCall,
    out_dtype: torch.dtype,
    group: Group,
    known: Known,
    *tensors: Any,
) -> Any:
    """Run a call like one that has run, but for its rows: past what was validated and agreed on for
    any number of them. It is decided as such a call is that takes the long way.

    Args:
        decision: How that one was decided.
        template: That call, without group and tensors.
        out_dtype: The result's dtype.
        tensors: X, w, bias and both scales, and those of an epilogue, if that one had one.

    Returns:
        The result; None if it must take the long way, which may refuse it, or measure.
    """
    given = _given(template, out_dtype, *tensors)
    operands, operator = given["operands"], template.operator
    # Where there is a limit, implementations are asked for the memory that they need.
    if not operands.rows or group.memory.limit_bytes is not None:
        return None
    asked = Asked(
        operator, operands, (None,) * len(operator.split_names), template.impl, "", template.place,
        given["epilogue"],
    )  # fmt: skip

    def decided() -> Decision:
        assert decision.family is not None
        agreed = AgreedKind.of(decision.family, operands.rows, *decision.kind[:-1])
        return decide(asked, group, agreed)

    try:
        other = group.cache.decided(asked.key(), decided)
    except InterlaceError:
        return None
    # Ranks exchange something then, whatever was known of the rows of that one.
    if _is_to_be_measured(template.impl, other):
        return None
    call = dataclasses.replace(
        template, group=group, known=known, form=known[0], **given, **other.of_call()
    )
    return _run_decided(call, other)


def _given(
    template: GemmCall,
    out_dtype: torch.dtype,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    *epilogue_tensors: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the operands and the epilogue of a call like one that has run, as its fields."""
    epilogue = template.epilogue
    return {
        "operands": Operands(x, w, bias, x_scale, w_scale, out_dtype),
        "epilogue": None if epilogue is None else epilogue.with_tensors(*epilogue_tensors),
    }


def _run_again(
    decision: Decision,
    template: GemmCall,
    out_dtype: torch.dtype,
    again: AgainCall | None,
    group: Group,
    known: tuple[Hashable, ...],
    *tensors: Any,
) -> Any:
    """Run a call like one that has run, past all that was found out before that one's first run.

    Args:
        decision: How that one was decided.
        template: That call, without group and tensors.
        out_dtype: The result's dtype.
        again: Makes calls that need no graph, past the implementation's preparations; None where it
            has nothing like that.
        tensors: X, w, bias and both scales, and those of an epilogue, if that one had one.

    Returns:
        The result.
    """
    x, w, bias, x_scale, _, *others = tensors
    if x_scale is not None:
        again = None  # it takes no scales
    # What comes again is worth a graph, which the long way through the implementation makes.
    if again and not ranges.is_listening() and not group.replays.comes_again(known):
        result = again(group, known, x, w, bias, *others)
        if result is not None:
            return result
    given = _given(template, out_dtype, *tensors)
    call = dataclasses.replace(template, group=group, known=known, **given)
    return _run_decided(call, decision)


def _link_bytes(call: GemmCall) -> int | None:
    """Return the bytes that leave a rank if rows are shared out evenly; None without a formula."""
    operands = call.operands
    if call.operator.name not in OPERATOR_COSTS:
        return None
    return call.operator.cost(
        rows=call.rows.product,
        columns=operands.columns,
        inner=operands.inner,
        itemsize=operands.x.itemsize,
        output_itemsize=operands.out_dtype.itemsize,
        world_size=call.group.world_size,
    ).link_bytes


def _is_to_be_measured(impl: str, decision: Decision) -> bool:
    """Return whether the order of a call's implementations is to be measured before it runs."""
    is_open = bool(decision.predicted_us) and not decision.is_measured
    return is_open and autotune.is_enabled(impl)


def _measure(call: GemmCall, decision: Decision) -> None:
    """Put the implementations in the order of measured times. Collective where the kind is new.

    Whether it is new, all ranks know alike, by what they have agreed on; this rank's decision says
    nothing about that, as another one may be made for other rows of this rank alone.
    """
    near = autotune.near_the_best(
        decision.implementations, decision.predicted_us, decision.choice.worst_error
    )
    if len(near) < 2:
        # Nothing is in doubt here, whatever is measured of other rows of the kind.
        decision.is_measured = True
        return
    known = call.group.cache.measured
    if decision.kind not in known:
        if not autotune.may_measure(call):
            return
        known[decision.kind] = autotune.measured(call, near, decision.predicted_us)
    measured = known[decision.kind]
    order = measured.in_order(decision.implementations, decision.predicted_us)
    # What comes again is found past this decision.
    if decision.has_run and order != decision.implementations:
        call.group.replays.forget()
    decision.implementations, decision.is_measured = order, True


def group_for(operator: str, group_name: str, device: torch.device) -> Group:
    """Return the group of a call.

    Raises:
        GroupError: It has more ranks than the kernels take.
    """
    group = group_named(group_name, device)
    group.require_size(operator, MAX_RANKS)
    return group
