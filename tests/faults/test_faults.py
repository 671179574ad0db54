"""Faults of one rank on the CPU backend; ``tests/gpu/test_faults_gpu.py`` has the same on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import checks, scenarios
from tests.faults.scenarios import CASES, MortalPool


@pytest.fixture
def mortal() -> Iterator[MortalPool]:
    """Two ranks of their own for a test that kills one; the store dies with rank 0."""
    pool = MortalPool(2, store="rank 0")
    yield pool
    pool.close()


@pytest.mark.parametrize("name", list(CASES))
def test_a_late_rank(ranks, name):
    checks.late_in_time(ranks(3).run(scenarios.late_in_time, name))


@pytest.mark.parametrize("name", list(CASES))
def test_a_rank_that_is_too_late(ranks, name):
    checks.too_late(ranks(3).run(scenarios.too_late, name))


@pytest.mark.parametrize(("name", "faulty"), [("gemv", 1), ("reduce_scatter", 0)])
def test_a_rank_that_dies_before_a_call(mortal, name, faulty):
    checks.died(mortal.run(scenarios.dies_before_a_call, name, faulty), faulty)


def test_a_rank_that_dies_in_a_kernel(mortal):
    checks.died(mortal.run(scenarios.dies_in_a_kernel, 0), 0)


def test_a_rank_that_calls_something_else(ranks):
    checks.other_operator(ranks(3).run(scenarios.other_call, "operator"))


def test_a_rank_that_calls_something_else_that_was_agreed_on(ranks):
    checks.too_late(ranks(3).run(scenarios.other_call_agreed_on, "operator"))


def test_a_rank_that_calls_with_another_shape(ranks):
    checks.other_shape(ranks(3).run(scenarios.other_call, "shape"))


def test_a_rank_that_calls_with_another_shape_that_was_agreed_on(ranks):
    checks.other_shape_agreed_on(ranks(3).run(scenarios.other_call_agreed_on, "shape"))


@pytest.mark.parametrize("name", ["out_of_memory", "interrupted", "interrupted_in_a_wait"])
def test_a_rank_that_fails(ranks, name):
    """It has no memory, or is interrupted before its call, or while it waits."""
    getattr(checks, name)(ranks(3).run(getattr(scenarios, name)))
