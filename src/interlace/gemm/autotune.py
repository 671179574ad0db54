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

_WARM_UPS, _MOST_SAMPLES = 3, 7
"""Calls before the timed ones: the second one makes a CUDA graph, which the third one replays."""

_SLEEP_CYCLES = 1_000_000
"""Half a millisecond, in which the host enqueues a call before the GPU begins it."""

_COLD_BYTES = 256 << 20
"""Written between two calls, so that no weight is still in the L2, as in a program's next layer."""

_enabled = 0


@contextlib.contextmanager
def autotune(enabled: bool = True) -> Iterator[None]:
    """Measure implementations within the context, instead of trusting predictions.

    The first call of a new kind (operator, sizes, dtype, layout, ranks) of the operators around a
    product times the implementations whose predicted time is within 1.5 of the shortest: on all
    ranks together, with cold weights, in about 100 ms, beside what compiling takes. All ranks then
    agree on the fastest. It is remembered on disk, so the next program does not measure again, and
    it counts after the context, too. Calls in a CUDA graph's capture are not measured: make the
    first call before.

    ``INTERLACE_AUTOTUNE=1`` in the environment is the same for the whole program. Measured times
    are in ``INTERLACE_CACHE_DIR``, by default ``~/.cache/interlace``.

    Args:
        enabled: False to measure nothing within the context, whatever the environment says. It must
            be the same on every rank.

    Example:
        >>> with interlace.autotune():
        ...     model(batch)  # the first step measures
    """
    global _enabled
    before, _enabled = _enabled, 1 if enabled else -1
    try:
        yield
    finally:
        _enabled = before


def is_enabled() -> bool:
    """Return whether new kinds of calls are measured."""
    return _enabled > 0 or (_enabled == 0 and _by_environment())


@functools.cache
def _by_environment() -> bool:
    return os.environ.get("INTERLACE_AUTOTUNE", "0") not in ("", "0")


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
    times: dict[str, float] = {}
    for each in candidates:
        samples = round(left_us / max(predicted_us[each.name], 1.0)) - _WARM_UPS
        samples = max(1, min(samples, _MOST_SAMPLES))
        # What fails on one rank is no candidate on any.
        by_rank = call.group.exchange("a measured time", _attempt(call, each, samples))
        if all(us is not None for us in by_rank):
            times[each.name] = max(by_rank)
    return times


def _attempt(call: GemmCall, implementation: Implementation, samples: int) -> float | None:
    """Return an implementation's median time on this rank; None if it cannot run here."""
    try:
        return time_us(lambda: implementation.run(call), call, samples)
    except (PeerTimeoutError, RankMismatchError):
        raise  # on every rank
    except Exception:
        return None


def time_us(run: Callable[[], Any], call: GemmCall, samples: int) -> float | None:
    """Return the median time of a call on this GPU, in microseconds, with cold weights; None if
    there is no memory for its sizes.
    """
    for _ in range(_WARM_UPS):
        if run() is None:
            return None
    device, times = call.group.device, []
    cold = torch.empty(_COLD_BYTES, dtype=torch.uint8, device=device)
    meeting = torch.zeros(1, device=device)
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The host enqueues the call while the GPU sleeps, so its time does not count; nor does the
        # time by which one GPU begins earlier than another.
        torch.cuda._sleep(_SLEEP_CYCLES)
        cold.fill_(0)
        dist.all_reduce(meeting, group=call.process_group)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3)
    return statistics.median(times)
