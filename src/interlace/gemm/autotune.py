"""Measurements at the first call of a kind, where predictions are too close to decide."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from interlace.comm.identity import identity
from interlace.errors import PeerTimeoutError, RankMismatchError
from interlace.gemm.call import GemmCall
from interlace.registry import Implementation
from interlace.tuning.measured import MeasuredTimes, default_folder

NEAR = 1.5
"""Implementations are measured whose predicted time is at most so many times the shortest."""

_BUDGET_US = 100e3
"""What the calls of one measurement may take together, by their predicted times."""

_WARM_UPS = 2
"""Calls before the timed ones, which compile kernels and take memory."""

_MOST_CALLS, _MOST_SAMPLES = 8, 5
"""Calls in a CUDA graph, one after the other as in a program, and replays of the graph."""

_SLEEP_CYCLES = 400_000
"""A fifth of a millisecond, in which hosts enqueue a graph before the GPUs begin it."""

_asked: bool | None = None
"""What the innermost context says; None outside of any."""


@contextlib.contextmanager
def autotune(enabled: bool = True) -> Iterator[None]:
    """Measure implementations within the context, instead of trusting predictions.

    The first call of a new kind (operator, sizes, dtype, layout, ranks) of the operators around a
    product times the implementations whose predicted time is within 1.5 of the shortest: on all
    ranks together, with cold weights, in about 100 ms, beside what compiling takes. All ranks then
    agree on the fastest. It is remembered on disk, so the next program does not measure again, and
    it counts after the context, too. Calls in a CUDA graph's capture are not measured: make the
    first call before.

    ``INTERLACE_AUTOTUNE=1`` in the environment is the same for the whole program, and
    ``INTERLACE_AUTOTUNE=0`` measures nothing even where a call asks for it by ``impl="measured"``,
    as those of ``interlace.compile`` do. Measured times are in ``INTERLACE_CACHE_DIR``, by default
    ``~/.cache/interlace``.

    Args:
        enabled: False to measure nothing within the context, whatever the environment says. It must
            be the same on every rank.

    Example:
        >>> with interlace.autotune():
        ...     model(batch)  # the first step measures
    """
    global _asked
    before, _asked = _asked, enabled
    try:
        yield
    finally:
        _asked = before


def is_enabled(impl: str = "auto") -> bool:
    """Return whether a new kind of calls is measured.

    The context decides; outside of any, the environment; and else, whether the call asks for it by
    ``impl="measured"``.
    """
    if _asked is not None:
        return _asked
    by_environment = _by_environment()
    return impl == "measured" if by_environment is None else by_environment


@functools.cache
def _by_environment() -> bool | None:
    value = os.environ.get("INTERLACE_AUTOTUNE", "")
    return value != "0" if value else None


@functools.cache
def _memory() -> MeasuredTimes:
    return MeasuredTimes(default_folder())


def kind_of(call: GemmCall) -> dict[str, Any]:
    """Return everything that the times of a call depend on, as JSON can hold it."""
    operands = call.operands
    return {
        **identity(call.group.device),
        "operator": call.operator.name,
        "ranks": call.group.world_size,
        "x": list(operands.x.shape),
        "w": list(operands.w.shape),
        "w_along_K": operands.w.stride(1) == 1,
        "dtype": str(operands.x.dtype),
        "out_dtype": str(operands.out_dtype),
        "bias": operands.bias is not None,
        "rows": list(call.rows.by_rank),
        "gather": call.gather,
    }


def may_measure(call: GemmCall) -> bool:
    """Return whether a call can be measured now; the same on every rank."""
    group = call.group
    return (
        group.world_size > 1
        and group.backend == "cuda"
        and group.members.ranks_per_gpu == 1
        and group.capture_id() is None
    )


class Measured(NamedTuple):
    """What ranks have measured together for one kind of call.

    Attributes:
        order: The implementations that may run it: the fastest first, those that were not measured
            last.
        times_us: The measured times in microseconds by implementation.
    """

    order: tuple[Implementation, ...]
    times_us: Mapping[str, float]


def measured(
    call: GemmCall, candidates: tuple[Implementation, ...], predicted_us: Mapping[str, float]
) -> Measured:
    """Return the candidates in the order of measured times.

    Collective: ranks exchange what they remember of this kind of call, and measure together what
    rank 0 does not remember.

    Args:
        candidates: In the order of their predicted times.
        predicted_us: The predicted times; candidates without one are not measured.
    """
    near = near_the_best([each for each in candidates if each.name in predicted_us], predicted_us)
    if len(near) < 2:
        return Measured(candidates, {})
    kind = kind_of(call)
    # Ranks may remember different times, so one rank's memory counts for all.
    times_us = call.group.exchange("measured times", _memory().read(kind))[0]
    if times_us is None:
        times_us = measure(call, near, predicted_us)
        if call.group.rank == 0:
            _memory().write(kind, times_us)
    order = sorted(candidates, key=lambda each: times_us.get(each.name, math.inf))
    return Measured(tuple(order), times_us)


def near_the_best(
    candidates: list[Implementation], predicted_us: Mapping[str, float]
) -> list[Implementation]:
    """Return the candidates near the shortest predicted time, as many as fit in the budget.

    Two always fit.
    """
    shortest = min((predicted_us[each.name] for each in candidates), default=0.0)
    near: list[Implementation] = []
    total_us = 0.0
    for each in candidates:
        total_us += predicted_us[each.name] * (_WARM_UPS + 1)
        if predicted_us[each.name] <= NEAR * shortest and (len(near) < 2 or total_us <= _BUDGET_US):
            near.append(each)
    return near


def measure(
    call: GemmCall, candidates: list[Implementation], predicted_us: Mapping[str, float]
) -> dict[str, float]:
    """Return the time in microseconds of each candidate that runs on every rank, the slowest
    rank's. Collective.
    """
    left_us = _BUDGET_US / len(candidates)
    stopwatch = _Stopwatch(call)
    times: dict[str, float] = {}
    for each in candidates:
        most = max(1, round(left_us / max(predicted_us[each.name], 1.0)) - _WARM_UPS)
        calls = max(1, min(_MOST_CALLS, most // _MOST_SAMPLES))
        graph = _attempt(call, each, calls, stopwatch)
        # What fails on one rank is no candidate on any.
        if not all(call.group.exchange("what can be measured", graph is not None)):
            continue
        assert graph is not None
        us = stopwatch.us_of_a_call(graph, calls, min(_MOST_SAMPLES, max(1, most // calls)))
        times[each.name] = max(call.group.exchange("a measured time", us))
    return times


def _attempt(
    call: GemmCall, implementation: Implementation, calls: int, stopwatch: _Stopwatch
) -> torch.cuda.CUDAGraph | None:
    """Return a CUDA graph of so many calls; None if the implementation cannot run here."""
    try:
        for _ in range(_WARM_UPS):
            if implementation.run(call) is None:
                return None
        return stopwatch.record(lambda: implementation.run(call), calls)
    except (PeerTimeoutError, RankMismatchError):
        raise  # on every rank
    except Exception:
        return None


class _Stopwatch:
    """Time CUDA graphs of calls, between which memory is read that displaces weights from the L2:
    in a program, other layers run between two calls of one layer.
    """

    def __init__(self, call: GemmCall) -> None:
        self._group, self._process_group = call.group, call.process_group
        device = call.group.device
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._other_layers = torch.zeros(2 * cache_bytes // 4, device=device)
        self._meeting = torch.zeros(1, device=device)
        self._between_us: dict[int, float] = {}

    def record(self, run: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of calls with other layers between them."""

        def enqueue() -> None:
            for _ in range(calls):
                self._other_layers.sum()
                run()

        return self._group.replays.record(enqueue)

    def us_of_a_call(self, graph: torch.cuda.CUDAGraph, calls: int, samples: int) -> float:
        """Return the time of one call of a graph in microseconds, without what is between."""
        if calls not in self._between_us:
            between = self.record(lambda: None, calls)
            self._between_us[calls] = self._median_us(between, _MOST_SAMPLES)
        # A call may be hidden by what is between, but no call takes no time.
        return max(0.1, self._median_us(graph, samples) - self._between_us[calls]) / calls

    def _median_us(self, graph: torch.cuda.CUDAGraph, samples: int) -> float:
        times = []
        for _ in range(samples):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # The hosts enqueue while the GPUs sleep, so their time does not count; nor does the
            # time by which one GPU begins earlier than another.
            torch.cuda._sleep(_SLEEP_CYCLES)
            dist.all_reduce(self._meeting, group=self._process_group)
            with self._group.running():
                start.record()
                graph.replay()
                end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) * 1e3)
        return statistics.median(times)
