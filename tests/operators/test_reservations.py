"""Every implementation allocates the symmetric memory that it says beforehand, and no more than a
limit allows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import environment
from interlace.comm.groups.reservation import Reservation
from interlace.gemm.operator import GemmOperator
from interlace.operators.embedding_all_to_all.layout import Layout, SizedLookups
from interlace.operators.mixture_of_experts.choice import ExpertTerms
from interlace.operators.mixture_of_experts.layout import ExpertSizes
from interlace.registry import operators
from interlace.testing.cases import IMPLEMENTATIONS, Case, every_case

# What stock pairs compare their rows by; no limit applies to it.
_COMPARISON = ", comparison of rows"


def _cases(world_size: int) -> list[Case]:
    """Return calls of all implementations; those of products without a backward pass, which is
    other operators'.
    """
    cases: list[Case] = []
    for case in every_case(world_size, [name for name in IMPLEMENTATIONS if name in operators()]):
        declaration = operators()[case.operator]
        if isinstance(declaration, GemmOperator):
            case = dataclasses.replace(case, backward=False)
        if case not in cases:
            cases.append(case)
    return cases


def _said(case: Any, tensors: dict[str, torch.Tensor], granularity: int) -> Reservation | None:
    """Return what an implementation says that it needs, by the sizes of a call."""
    declaration, ranks = operators()[case.operator], dist.get_world_size()
    implementation = declaration.implementation(case.impl_name)
    if case.operator == "embedding_all_to_all":
        layout = Layout(tuple(case._widths(rank) for rank in range(ranks)), case.batch)
        sized: Any = SizedLookups(layout, case.result_dtype.itemsize, case.backward)
    elif case.operator == "mixture_of_experts":
        x, top_k = tensors["x"], tensors["experts"].shape[1]
        capacity = case.capacity or max(1, len(x))
        sizes = ExpertSizes(
            len(x), top_k, ranks * case.local, case.hidden, case.ffn, ranks, capacity
        )
        sized = ExpertTerms(sizes, x.dtype, "cpu", case.backward)
    elif getattr(case, "splits", None) is not None:
        return None
    else:
        return declaration.reservations(
            tensors["x"], tensors["w"], bias=tensors.get("bias"), world_size=ranks,
            granularity=granularity,
        )[case.impl_name]  # fmt: skip
    said: Reservation | None = implementation.reservation(sized)
    return said


def _compare(cases: list[Any]) -> list[tuple[str, int | None, int | None, int]]:
    """Return for each call its label, the bytes that were said by its sizes and by the call itself,
    and those that it has allocated.
    """
    asked: list[Reservation] = []
    compared = []
    with environment.changed({"INTERLACE_MAX_WORKSPACE": "64G"}):
        process_group = dist.new_group()
        group = interlace.group_of(process_group)
    shortage = group.memory.shortage

    def recorded(reservation: Reservation, **options: bool) -> str | None:
        asked.append(reservation)
        return shortage(reservation, **options)

    group.memory.shortage = recorded  # type: ignore[method-assign]
    for case in cases:
        group.release()
        asked.clear()
        tensors = case.tensors(dist.get_rank(), dist.get_world_size(), 0)
        said = _said(case, tensors, group.granularity)
        make = case.open(process_group)
        make(tensors)
        held = {
            name: nbytes
            for name, nbytes in group.workspace_bytes().items()
            if not name.endswith(_COMPARISON)
        }
        by_call = asked[0] if asked and not case.backward else None
        sizes = [
            None if each is None else each.nbytes(group.granularity) for each in (said, by_call)
        ]
        compared.append((case.label, *sizes, sum(held.values())))
    group.memory.shortage = shortage  # type: ignore[method-assign]
    return compared


@pytest.mark.parametrize("operator", [name for name in IMPLEMENTATIONS if name in operators()])
def test_allocates_what_it_says(ranks: Any, operator: str) -> None:
    """The memory that an implementation reserves, by sizes alone and in a call, is what a call of
    it allocates.
    """
    cases = [case for case in _cases(2) if case.operator == operator]
    assert {case.impl_name for case in cases} == {
        each.name
        for each in operators()[operator].implementations
        if not each.is_stock and (operator != "mixture_of_experts" or each.name != "chunked")
    }
    known = set()
    for compared in ranks(2).run(_compare, cases):
        for case, (label, said, by_call, held) in zip(cases, compared, strict=True):
            assert said in (None, held), label
            assert by_call in (None, held), label
            if said is not None:
                known.add(case.impl_name)
            assert (held == 0) == (case.impl_name in ("unfused", "pooled") and _is_bare(case)), (
                label
            )
    assert known == {case.impl_name for case in cases}


def _is_bare(case: Case) -> bool:
    """Tell if a case's implementation needs no symmetric memory."""
    return case.impl_name == "unfused" or case.operator == "embedding_all_to_all"
