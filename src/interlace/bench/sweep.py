"""``interlace bench sweep``: every implementation of random calls, and what ``auto`` would take."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from interlace.bench import products
from interlace.bench.draws import Draw
from interlace.bench.timing import measure
from interlace.errors import InterlaceError
from interlace.gemm.autotune import autotune
from interlace.registry import operator_matching

_SAMPLES, _GRAPH_US = 5, 600.0
"""Less than other benchmarks take: many shapes say more than the last percent of one."""


def bench(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Check and time all implementations of one drawn call; collective.

    Returns:
        The result, with the times of all implementations that can run the call. ``auto`` is the one
        that ``impl="auto"`` takes, ``measured`` the one that it takes within
        :func:`interlace.autotune`, and ``left_out`` says why others were not timed.
    """
    operator = operator_matching(*draw.pattern).name
    shape = products.Shape(operator, draw.rows, draw.columns, draw.inner, dtype)
    case = products.Case(shape)
    # Random calls are too many for products in float64: PyTorch's own pair judges the others.
    expected = case.call(0, "unfused")
    times, worst = {}, 0.0
    left_out = {name: refusal for name, refusal in case.refusals().items() if refusal is not None}
    for way in case.implementations(case.choice.config):
        name = way.impl
        try:
            worst = max(worst, products.check_way(case, way, expected))
        except (InterlaceError, RuntimeError) as error:  # on every rank alike
            left_out[name] = str(error).splitlines()[0][:200]
            continue
        timing = measure(way.call, period=case.operand_sets, samples=_SAMPLES, graph_us=_GRAPH_US)
        times[name] = way.entry(timing)
    measured = [name for name in _measured_order(case) if name in times]
    case.owner.release()
    candidates = [name for name in case.choice.candidates if name in times]
    return {
        **{name: value for name, value in dataclasses.asdict(draw).items() if name != "pattern"},
        **case.header(case.choice.config, candidates[0], worst),
        "measured": (measured or candidates)[0],
        "predicted": case.choice.reason,
        "times": times,
        "left_out": left_out,
    }


def _measured_order(case: products.Case) -> list[str]:
    """Return the implementations in the order that the first call measures; empty if there is only
    one worth measuring.
    """
    before = len(case.owner.cache.measured)
    with autotune():
        case.call(0, "auto")
    orders = list(case.owner.cache.measured.values())[before:]
    return [each.name for order in orders for each in order]
