"""Measurements of random calls for ``interlace tune machine`` and ``interlace bench sweep``: every
implementation, and what ``impl="auto"`` predicts.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from interlace.bench import products
from interlace.bench.draws import Draw
from interlace.bench.report import is_disturbed
from interlace.bench.timing import measure
from interlace.comm.runtime.driver import has_memory
from interlace.errors import InterlaceError
from interlace.gemm.autotune import most_bytes
from interlace.registry import operator_matching

_SAMPLES, _GRAPH_US = 5, 600.0
"""Less than other benchmarks take: many shapes say more than the last percent of one."""


_PAUSES_S = (0.0, 0.0, 0.0, 0.1, 0.3, 1.0, 3.0)
"""Seconds before each measurement of one implementation: it is measured again as long as other work
on the machine has disturbed it, which may last. The last measurement counts, disturbed or not.
"""

_HOPELESS = 12
"""What is predicted to take so many times the best is not measured."""


def operands_of(draw: Draw, dtype: str) -> products.TimedProduct:
    """Return the operands of a drawn call on this rank; collective."""
    operator = operator_matching(*draw.pattern).name
    shape = products.ProductShape(
        operator,
        draw.rows,
        draw.columns,
        draw.inner,
        getattr(torch, dtype),
        draw.w_along_k,
        draw.x_padding,
        draw.has_bias,
        draw.has_block_scales,
    )
    return products.TimedProduct(shape)


def time_implementations(case: products.TimedProduct, draw: Draw) -> dict[str, Any]:
    """Check and time all implementations of a call; collective.

    Returns:
        The times of all implementations that can run the call. ``auto`` is the one that
        ``impl="auto"`` takes, and ``left_out`` says why others were not timed.
    """
    # Random calls are too many for products in float64: PyTorch's own pair judges the others.
    expected = case.call(0, "unfused")
    times, worst = {}, 0.0
    left_out = {name: refusal for name, refusal in case.refusals().items() if refusal is not None}
    predicted_us = case.choice.times_us
    least_us = min(predicted_us.values(), default=0.0)
    nbytes = most_bytes(draw.rows, draw.columns, draw.inner, case.shape.dtype.itemsize)
    for way in case.implementations(case.choice.config):
        name = way.impl
        if predicted_us.get(name, 0.0) > _HOPELESS * least_us:
            left_out[name] = f"predicted to take {predicted_us[name] / least_us:.0f} times the best"
            continue
        # A rank that runs out of memory would leave its peers' kernels waiting.
        is_enough = has_memory(nbytes, case.device)
        if not all(case.owner.exchange("memory for a call", is_enough)):
            left_out[name] = "a rank has no memory for it"
            continue
        problem = ""
        try:
            way.call(0)
        except (InterlaceError, RuntimeError) as error:
            problem = str(error).splitlines()[0][:200]
        # One rank's library may refuse what the others' take, and they would wait for it below.
        problem = next(filter(None, case.owner.exchange("whether a call runs", problem)), "")
        if not problem:
            try:
                worst = max(worst, products.check_way(case, way, expected))
            except InterlaceError as error:  # on every rank alike
                problem = str(error).splitlines()[0][:200]
        if problem:
            left_out[name] = problem
            continue
        # Every rank has the same times, so all of them measure equally often.
        for attempt, pause_s in enumerate(_PAUSES_S, 1):
            time.sleep(pause_s)
            timing = measure(
                way.call, period=case.operand_sets, samples=_SAMPLES, graph_us=_GRAPH_US
            )
            times[name] = {**way.entry(timing), "attempts": attempt}
            if not is_disturbed(times[name]):
                break
    candidates = [name for name in case.choice.candidates if name in times]
    return {
        **{name: value for name, value in dataclasses.asdict(draw).items() if name != "pattern"},
        **case.header(case.choice.config, candidates[0], worst),
        "predicted": case.choice.reason,
        "times": times,
        "left_out": left_out,
    }
