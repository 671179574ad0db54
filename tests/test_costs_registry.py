"""The register of costs names every operator that has a cost, once, and the simulator goes by
it.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator

import pytest

from interlace import registry
from interlace.costs import OPERATOR_COSTS, cost_of, find_cost
from interlace.costs.gemm import gemm_reduce_scatter
from interlace.errors import ArgumentError
from interlace_sim import operators


@pytest.fixture
def declared() -> Iterator[str]:
    """An operator of somebody's own, which is forgotten after the test."""
    cost_of("my_operator", computation="GEMM", collective="all_gather", collective_first=True)(
        functools.partial(find_cost("all_gather_gemm").formula)
    )
    yield "my_operator"
    del OPERATOR_COSTS["my_operator"]


def test_every_operator_declares_its_cost() -> None:
    """A forgotten decorator shows."""
    ours = {
        name
        for name, cost in OPERATOR_COSTS.items()
        if cost.formula.__module__.startswith("interlace.")
    }
    declared = {
        name
        for name, operator in registry.operators().items()
        if type(operator).__module__.startswith("interlace.")
    }
    # The function of a vector is another name of the all-reduce, with a cost of its own.
    assert ours - {"gemv_all_reduce"} == declared
    assert find_cost("gemm_reduce_scatter").formula is gemm_reduce_scatter


def test_a_declared_operator_can_be_simulated_at_once(declared: str) -> None:
    """The simulator has no list of names: a new operator needs no line of it."""
    sizes = {"rows": 64, "columns": 32, "inner": 16, "itemsize": 2, "world_size": 4}
    made = getattr(operators, declared)(**sizes)
    assert made == operators.all_gather_gemm(**sizes)
    assert made.name == "AllGather + GEMM"


def test_wrong_names_are_refused(declared: str) -> None:
    with pytest.raises(ArgumentError, match="must have one cost; got a second one for 'my_opera"):
        cost_of(declared, computation="GEMM", collective="all_reduce")(gemm_reduce_scatter)
    with pytest.raises(ArgumentError, match=r"an operator must be one of .*; got 'nothing'"):
        find_cost("nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = operators.nothing


def test_the_register_needs_no_torch() -> None:
    code = (
        "import sys, interlace.costs as c; assert c.OPERATOR_COSTS and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
