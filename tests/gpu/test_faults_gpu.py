"""Faults of one rank on real GPUs. Run with ``-m gpu``.

Every living rank must end with an error that names the faulty rank, by its deadline, and its GPU
must
be free then: the kernel has ended. ``tests/faults`` says what happens in each, and has the same for
the CPU backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults import checks, scenarios
from tests.faults.scenarios import CASES, MortalPool
from tests.pool import Pool

pytestmark = pytest.mark.gpu

Ranks = Callable[[int], Pool]


@pytest.fixture
def mortal() -> Iterator[MortalPool]:
    """Two ranks of their own for a test that kills one; the store dies with rank 0."""
    pool = MortalPool(2, "cuda", "rank 0")
    yield pool
    pool.close()


@pytest.mark.parametrize("name", list(CASES))
def test_a_late_rank(ranks: Ranks, world_size: int, name: str) -> None:
    checks.late_in_time(ranks(world_size).run(scenarios.late_in_time, name))


@pytest.mark.parametrize("name", list(CASES))
def test_a_rank_that_is_too_late(ranks: Ranks, world_size: int, name: str) -> None:
    checks.too_late(ranks(world_size).run(scenarios.too_late, name))


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_rank_that_dies_before_a_call(mortal: MortalPool, faulty: int) -> None:
    checks.died(mortal.run(scenarios.dies_before_a_call, "reduce_scatter", faulty), faulty)


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_rank_that_dies_in_a_kernel(mortal: MortalPool, faulty: int) -> None:
    checks.died(mortal.run(scenarios.dies_in_a_kernel, faulty), faulty)


def test_a_rank_that_calls_something_else(ranks: Ranks, world_size: int) -> None:
    checks.other_operator(ranks(world_size).run(scenarios.other_call, "operator"))


def test_a_rank_that_calls_something_else_that_was_agreed_on(ranks: Ranks, world_size: int) -> None:
    checks.too_late(ranks(world_size).run(scenarios.other_call_agreed_on, "operator"))


def test_a_rank_that_calls_with_another_shape(ranks: Ranks, world_size: int) -> None:
    checks.other_shape(ranks(world_size).run(scenarios.other_call, "shape"))


@pytest.mark.alone  # both calls must have begun within the deadline of two seconds
def test_a_rank_that_calls_with_another_shape_that_was_agreed_on(
    ranks: Ranks, world_size: int
) -> None:
    checks.other_shape_agreed_on(ranks(world_size).run(scenarios.other_call_agreed_on, "shape"))


@pytest.mark.parametrize("name", ["out_of_memory", "interrupted", "interrupted_in_a_wait"])
def test_a_rank_that_fails(ranks: Ranks, world_size: int, name: str) -> None:
    """It has no memory, or is interrupted before its call, or while it waits."""
    getattr(checks, name)(ranks(world_size).run(getattr(scenarios, name)))
