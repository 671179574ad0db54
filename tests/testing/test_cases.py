"""The list of every implementation of every operator: complete, and right on the CPU backend."""

from __future__ import annotations

import random

import pytest
import torch

from interlace.mapped import COLLECTIVES
from interlace.operators.gemm_all_reduce.config import PROTOCOLS as GEMV_PROTOCOLS
from interlace.registry import operators
from interlace.testing.cases import BETWEEN_NODES, IMPLEMENTATIONS, draw_case, every_case
from interlace.testing.cases.base import in_another_layout


def _check(operator: str, in_other_layouts: bool) -> dict[str, list[int]]:
    import torch.distributed as dist

    cases = every_case(dist.get_world_size(), [operator])
    return {
        case.label: case.prepare(seeds=(0, 1), layouts=i if in_other_layouts else None).check(1)
        for i, case in enumerate(cases)
    }


@pytest.mark.parametrize("in_other_layouts", [False, True])
@pytest.mark.parametrize("operator", list(IMPLEMENTATIONS))
def test_every_case_is_right(ranks, operator, in_other_layouts):
    """Of new tensors, and of some at addresses that 16 does not divide, with gaps between rows."""
    for found in ranks(2).run(_check, operator, in_other_layouts):
        wrong = {label: counts for label, counts in found.items() if any(counts)}
        assert found
        assert not wrong


def test_other_layouts_have_gaps_that_nothing_may_read():
    w = torch.arange(12.0).view(3, 4).T
    layouts = [in_another_layout(w, random.Random(seed)) for seed in range(20)]
    assert all(torch.equal(each, w) and each.stride(0) == 1 for each in layouts)
    assert {each.stride(1) for each in layouts} == {4, 5, 7, 12}
    assert {each.storage_offset() for each in layouts} == {0, 1}
    gaps = (each for each in layouts if each.stride(1) == 5)
    assert all(
        each.as_strided((3,), (5,), each.storage_offset() + 4).isnan().all() for each in gaps
    )


def test_every_implementation_is_listed():
    """An implementation that is added to an operator must be added to the list."""
    assert len(operators()) >= 7
    for name, declaration in operators().items():
        if not type(declaration).__module__.startswith("interlace."):
            continue  # another package's
        ours = {each.name for each in declaration.implementations if not each.is_stock}
        listed = (*IMPLEMENTATIONS[name], *BETWEEN_NODES.get(name, ()))
        assert {impl.split()[0] for impl in listed} == ours
    listed = {impl for impl in IMPLEMENTATIONS["gemv_all_reduce"] if impl.startswith("gemv")}
    assert listed == {f"gemv {protocol}" for protocol in GEMV_PROTOCOLS}
    assert {impl.split()[0] for impl in IMPLEMENTATIONS["mapped_output"]} == set(COLLECTIVES)


def test_random_cases_depend_on_the_seed_alone():
    first, again, other = (
        [draw_case(3, source) for _ in range(50)] for source in map(random.Random, (5, 5, 6))
    )
    assert first == again
    assert first != other
