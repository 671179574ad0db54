"""Faults of one rank on the CPU backend; ``tests/gpu/test_faults_gpu.py`` has the same on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import checks, scenarios
from tests.faults.scenarios import CASES, MortalPool


@pytest.fixture
def mortal() -> Iterator[MortalPool]:
    pool = MortalPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", list(CASES))
def test_a_late_rank(ranks, name):
    checks.late_in_time(ranks(3).run(scenarios.late_in_time, name))


@pytest.mark.parametrize("name", list(CASES))
def test_a_rank_that_is_too_late(ranks, name):
    checks.too_late(ranks(3).run(scenarios.too_late, name))


@pytest.mark.parametrize("name", ["gemv", "reduce_scatter"])
def test_a_rank_that_dies_before_a_call(mortal, name):
    checks.died(mortal.run(scenarios.dies_before_a_call, name))


def test_a_rank_that_dies_in_a_kernel(mortal):
    checks.died(mortal.run(scenarios.dies_in_a_kernel))


def test_a_rank_that_calls_something_else(ranks):
    checks.other_call(ranks(3).run(scenarios.other_call))


def test_a_rank_that_calls_something_else_that_was_agreed_on(ranks):
    checks.other_call_agreed_on(ranks(3).run(scenarios.other_call_agreed_on))


def test_a_rank_that_calls_with_another_shape(ranks):
    checks.other_shape(ranks(3).run(scenarios.other_shape))


def test_a_rank_that_calls_with_another_shape_that_was_agreed_on(ranks):
    checks.other_shape_agreed_on(ranks(3).run(scenarios.other_shape_agreed_on))


def test_a_rank_without_memory(ranks):
    checks.out_of_memory(ranks(3).run(scenarios.out_of_memory))


def test_a_rank_that_is_interrupted_before_its_call(ranks):
    checks.interrupted(ranks(3).run(scenarios.interrupted))


def test_a_rank_that_is_interrupted_while_it_waits(ranks):
    checks.interrupted_in_a_wait(ranks(3).run(scenarios.interrupted_in_a_wait))
