"""``interlace bench sweep``: every implementation of random calls, and what ``auto`` would take."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from interlace.bench import products
from interlace.bench.benchmark import Way
from interlace.bench.draws import Draw
from interlace.bench.roles import Role
from interlace.bench.timing import measure
from interlace.errors import InterlaceError
from interlace.gemm.call import Terms

_SAMPLES, _GRAPH_US = 5, 600.0
"""Less than other benchmarks take: many shapes say more than the last percent of one."""


def bench(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Check and time all implementations of one drawn call; collective.

    Returns:
        The result, with the times of all implementations that can run the call. ``auto`` is the one
        that ``impl="auto"`` takes, and ``left_out`` says why others were not timed.
    """
    shape = products.Shape(draw.operator, draw.rows, draw.columns, draw.inner, dtype)
    case = products.Case(shape)
    terms = _terms(case)
    expected = case.call(0, "unfused").double()
    times, left_out, worst = {}, {}, 0.0
    for implementation in case.operator.implementations:
        name, refusal = implementation.name, implementation.refusal(terms)
        # On a GPU, "nccl" runs what "unfused" does.
        if refusal is not None or name == "nccl":
            left_out[name] = refusal or "the same as unfused"
            continue
        step = functools.partial(case.call, impl=name)
        try:
            y = step(0).double()
            # Both have roundings, so half of their difference is one's.
            difference = float((y - expected).norm() / expected.norm())
            worst = max(worst, case.accept([difference / 2], name))
        except (InterlaceError, RuntimeError) as error:  # on every rank alike
            left_out[name] = str(error).splitlines()[0][:200]
            continue
        role: Role = "pair" if case.operator.is_pair(name) else "ours"
        timing = measure(step, period=case.operand_sets, samples=_SAMPLES, graph_us=_GRAPH_US)
        times[name] = Way(name, role, step, name).entry(timing)
    case.owner.release()
    candidates = [name for name in case.choice.candidates if name in times]
    return {
        "operator": draw.operator,
        **{name: value for name, value in dataclasses.asdict(draw).items() if name != "operator"},
        **case.header(case.choice.config, candidates[0], worst),
        "predicted": case.choice.reason,
        "times": times,
        "left_out": left_out,
    }


def _terms(case: products.Case) -> Terms:
    """Return the terms of the case's calls."""
    x, _ = case.operands(0)
    shape = case.shape
    return Terms(
        has_bias=False,
        converts=False,
        is_even=shape.rows % case.owner.world_size == 0,
        rows=len(x),
        device_type=case.device.type,
        dtype=shape.dtype,
        result_bytes=shape.rows * shape.columns * shape.dtype.itemsize,
    )
