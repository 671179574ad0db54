"""The list of every implementation of every operator: complete, and right on the CPU backend."""

from __future__ import annotations

import random

import pytest

from interlace.mapped import COLLECTIVES
from interlace.operators.gemm_all_reduce.config import PROTOCOLS as GEMV_PROTOCOLS
from interlace.registry import operators
from interlace.testing.cases import BETWEEN_NODES, IMPLEMENTATIONS, draw_case, every_case


def _check(operator: str) -> dict[str, list[int]]:
    import torch.distributed as dist

    cases = list(every_case(dist.get_world_size(), [operator]))
    return {case.label: case.prepare(seeds=(0, 1)).check(1) for case in cases}


@pytest.mark.parametrize("operator", list(IMPLEMENTATIONS))
def test_every_case_is_right(ranks, operator):
    for found in ranks(2).run(_check, operator):
        wrong = {label: counts for label, counts in found.items() if any(counts)}
        assert found
        assert not wrong


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
