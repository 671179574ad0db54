"""Measurements at the first call of a kind, where predictions are too close to decide."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from interlace import environment
from interlace.cache_folder import cache_folder
from interlace.comm import Group
from interlace.comm.groups.machine_rates import sets_past_cache
from interlace.comm.host.identity import identity
from interlace.comm.replay import tapes
from interlace.comm.runtime.conditions import Condition, has, is_in_environment, returns
from interlace.comm.runtime.driver import has_memory
from interlace.comm.runtime.ordinary import call_apart, in_inductors_run
from interlace.costs.time import in_order
from interlace.errors import PeerTimeoutError, RankMismatchError
from interlace.gemm.call import GemmCall
from interlace.gemm.operands import Operands
from interlace.gemm.splits import balanced
from interlace.mapped import Fused
from interlace.registry import Implementation, Operator
from interlace.tuning.measured import MeasuredTimes

log = logging.getLogger("interlace.gemm")

_BUDGET_US = 100e3
"""What the calls of one measurement may take together, by their predicted times."""

_WARM_UPS = 2
"""Calls before the timed ones, which compile kernels and take memory."""

_MOST_CALLS, _MOST_SAMPLES = 16, 5
"""Calls in a CUDA graph, and replays of the graph."""

_SLEEP_CYCLES = 1_000_000
"""Half a millisecond, in which hosts enqueue a graph before the GPUs begin it."""

_DOUBTFUL = 1.3
"""What takes so much longer than predicted, compared with the others, is measured again: hosts with
other work to do have made one implementation of a call twice and eight times as slow.
"""

_TIE = 0.01
"""The fraction by which two measurements of one call often differ: a stock pair wins such ties."""

_asked: bool | None = None
"""What the innermost context says; None outside of any."""


@contextlib.contextmanager
def autotune(enabled: bool = True) -> Iterator[None]:
    """Measure implementations within the context, instead of trusting predictions.

    The first call of a new kind (operator, sizes, dtype, layout, ranks; rows by powers of two) of
    the operators around a product times the implementations whose predicted time is within 1.5 of
    the shortest, or within 3 on a GPU whose profile is a guess: on all ranks together, with cold
    weights, in about 100 ms, beside what compiling takes. All ranks then agree on the fastest. It
    is remembered on disk, so the next program does not measure again, and it counts after the
    context, too. Calls in a CUDA graph's capture are not measured: make the first call before.

    ``INTERLACE_AUTOTUNE=1`` in the environment is the same for the whole program, and
    ``INTERLACE_AUTOTUNE=0`` measures nothing even where a call asks for it by ``impl="measured"``,
    as those of ``interlace.compile`` do. Nothing is measured either under
    ``torch.use_deterministic_algorithms(True)``: another run might choose differently. Measured
    times are in ``INTERLACE_CACHE_DIR``, by default ``~/.cache/interlace``.

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
    ``impl="measured"``. Where results must repeat from run to run, nothing is measured.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    if _asked is not None:
        return _asked
    by_environment = environment.switch("INTERLACE_AUTOTUNE")
    return impl == "measured" if by_environment is None else by_environment


def _conditions() -> Iterable[Condition]:
    """Return the conditions that :func:`is_enabled` returns what it does now."""
    yield returns(torch._C._get_deterministic_algorithms)
    yield has(sys.modules[__name__], "_asked")
    yield is_in_environment("INTERLACE_AUTOTUNE")


tapes.depend_on(_conditions)

_times_in = functools.cache(MeasuredTimes)


def _memory() -> MeasuredTimes:
    return _times_in(cache_folder("measured"))


def kind_of(
    operator: str,
    operands: Operands,
    ranks: int,
    *,
    by_rank: Sequence[int] = (),
    gather: bool = False,
) -> dict[str, Any]:
    """Return everything that the times of a call depend on, as JSON can hold it; of the rows that
    is their class.

    Args:
        by_rank: Rows of each rank, if they are not shared out as evenly as can be.
    """
    is_balanced = list(by_rank) == balanced(sum(by_rank), ranks)
    return {
        **identity(operands.x.device),
        "operator": operator,
        "ranks": ranks,
        "rows_up_to": class_of(operands.rows),
        "w": list(operands.w.shape),
        "w_along_K": operands.w.stride(1) == 1,
        "dtype": str(operands.x.dtype),
        "out_dtype": str(operands.out_dtype),
        "bias": operands.bias is not None,
        "rows": None if is_balanced or not by_rank else list(by_rank),
        "gather": gather,
    }


def class_of(rows: int) -> int:
    """Return the most rows of the calls that are measured together with one of ``rows``.

    A server makes calls of hundreds of numbers of rows, and a measurement takes longer than a call.
    So one counts for all up to the next power of two, each with its own predicted times.
    """
    return 1 << max(rows - 1, 0).bit_length()


def remembered(kind: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the times that were measured for a kind of call, as multiples of the predicted ones;
    None if none were.
    """
    return _memory().read(kind)


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
    """Hold what all ranks have measured for one kind of calls.

    Attributes:
        operator: The operator.
        multiples: The measured times of implementations, as multiples of the predicted ones.
    """

    operator: Operator
    multiples: Mapping[str, float]

    def times_us(self, predicted_us: Mapping[str, float]) -> dict[str, float]:
        """Return the times of a call of this kind in microseconds, the one that runs first, by its
        predicted times.
        """
        # In the order of the measurements, as ranks break ties alike.
        times_us = {
            name: multiple * predicted_us[name]
            for name, multiple in self.multiples.items()
            if name in predicted_us
        }
        return {name: times_us[name] for name in in_measured_order(self.operator, times_us)}

    def in_order(
        self, candidates: Sequence[Implementation], predicted_us: Mapping[str, float]
    ) -> tuple[Implementation, ...]:
        """Return the candidates for a call of this kind: the fastest first, and those that were not
        measured last.
        """
        positions = {name: position for position, name in enumerate(self.times_us(predicted_us))}
        return tuple(sorted(candidates, key=lambda each: positions.get(each.name, len(positions))))


def measured(
    call: GemmCall, near: list[Implementation], predicted_us: Mapping[str, float]
) -> Measured:
    """Return the times of implementations of which it is not known which one is the fastest.
    Collective.

    Ranks exchange what they remember of this kind of call, and measure together what rank 0 does
    not remember.

    Args:
        near: As :func:`near_the_best` returns them.
        predicted_us: Their predicted times.
    """
    kind = kind_of(
        call.operator.name,
        call.operands,
        call.group.world_size,
        by_rank=call.rows.by_rank,
        gather=call.gather,
    )
    names = {candidate.name for candidate in near}
    times = remembered(kind)
    # Times of some of them do not say which one is the fastest.
    times = times if times is not None and names <= times.keys() else None
    # Ranks may remember different times, so one rank's memory counts for all.
    multiples = call.group.exchange("measured times", times)[0]
    if multiples is None:
        if in_inductors_run():
            # Copies of weights and graphs must not come from the pool of Inductor's graph.
            times_us = call_apart(measure, call, near, predicted_us)
        else:
            times_us = measure(call, near, predicted_us)
        multiples = {name: us / predicted_us[name] for name, us in times_us.items()}
        # What has failed, as for lack of memory, may work in the next program.
        if call.group.rank == 0 and names <= multiples.keys():
            _memory().write(kind, multiples)
    return Measured(call.operator, multiples)


def in_measured_order(operator: Operator, times_us: Mapping[str, float]) -> list[str]:
    """Return implementations by measured times of a GPU, and the host's where it takes more; a
    stock pair comes before what is hardly shorter.
    """
    return in_order(operator.eager_us(times_us), operator.preferred_among(times_us), _TIE)


def near_the_best(
    candidates: Sequence[Implementation], predicted_us: Mapping[str, float], worst_error: float
) -> list[Implementation]:
    """Return the candidates whose predicted time is at most ``worst_error`` times the shortest, as
    many as fit in the budget. Two always fit. Those without a predicted time are left out.
    """
    candidates = [candidate for candidate in candidates if candidate.name in predicted_us]
    shortest = min((predicted_us[candidate.name] for candidate in candidates), default=0.0)
    near: list[Implementation] = []
    total_us = 0.0
    for candidate in candidates:
        total_us += predicted_us[candidate.name] * (_WARM_UPS + 1)
        if predicted_us[candidate.name] <= worst_error * shortest and (
            len(near) < 2 or total_us <= _BUDGET_US
        ):
            near.append(candidate)
    return near


def measure(
    call: GemmCall, candidates: list[Implementation], predicted_us: Mapping[str, float]
) -> dict[str, float]:
    """Return the time in microseconds of each candidate that runs on every rank, the slowest
    rank's; of none if a rank has no memory for calls beside the program's. Collective.
    """
    left_us = _BUDGET_US / len(candidates)
    layers = _layers(call)
    times: dict[str, float] = {}
    # A peer's kernels wait for this rank's, so none may turn out to have no memory once the first
    # one is enqueued.
    x, (columns, inner) = call.operands.x, call.operands.w.shape
    rows = max(len(x), sum(call.rows.by_rank))
    is_enough = has_memory(most_bytes(rows, columns, inner, x.itemsize), call.group.device)
    if not all(call.group.exchange("memory for measurements", is_enough)):
        return times

    def measure_one(candidate: Implementation) -> None:
        affordable = max(1, round(left_us / max(predicted_us[candidate.name], 1.0)) - _WARM_UPS)
        calls = max(1, min(_MOST_CALLS, affordable // _MOST_SAMPLES))
        graph = _record(candidate, layers, calls)
        # What fails on one rank is no candidate on any.
        if not all(call.group.exchange("what can be measured", graph is not None)):
            return
        assert graph is not None
        samples = min(_MOST_SAMPLES, max(1, affordable // calls))
        us = _median_us(graph, call, samples) / calls
        us = max(call.group.exchange("a measured time", us))
        times[candidate.name] = min(us, times.get(candidate.name, us))

    for candidate in candidates:
        measure_one(candidate)
    # All ranks know the same times, so they agree on what is measured again.
    again = doubtful(times, predicted_us)
    for candidate in candidates:
        if candidate.name in again:
            measure_one(candidate)
    return times


def doubtful(times: Mapping[str, float], predicted_us: Mapping[str, float]) -> set[str]:
    """Return the implementations whose measured times other work may have lengthened: those that
    take longer, as multiples of their predicted times, than most of the others do.
    """
    ratios = {name: us / predicted_us[name] for name, us in times.items()}
    usual = statistics.median_low(ratios.values()) if ratios else 0.0
    return {name for name, ratio in ratios.items() if ratio > _DOUBTFUL * usual}


def _layers(call: GemmCall) -> list[GemmCall]:
    """Return calls that are the same but for the memory of their weights, as those of a program's
    layers are: enough of them that no call finds its weight in the L2.
    """
    w = call.operands.w
    count = sets_past_cache(w.nbytes, call.group.device)
    weights = [w]
    # Without memory for copies a rank goes on with fewer: its peers would wait for it.
    with contextlib.suppress(torch.OutOfMemoryError):
        while len(weights) < count:
            weights.append(w.clone())
    return [
        dataclasses.replace(call, operands=dataclasses.replace(call.operands, w=weight))
        for weight in weights
    ]


def most_bytes(rows: int, columns: int, inner: int, itemsize: int) -> int:
    """Return the bytes that a call of any implementation takes at most, and a CUDA graph of calls.

    That is all ranks' rows and the weight, padded; the product in float32, in parts and as the
    result; and symmetric memory for them. The graph has memory of its own.

    Args:
        rows: Rows of all ranks.
        columns, inner: N and K.
        itemsize: Bytes of an operand's element.
    """
    copies = (rows + columns) * inner * itemsize
    product = rows * columns * torch.float32.itemsize
    return 2 * (2 * copies + 2 * product)


def _record(
    implementation: Implementation, layers: Sequence[GemmCall], calls: int
) -> torch.cuda.CUDAGraph | None:
    """Return a CUDA graph of so many calls, one after the other as in a program; None if the
    implementation cannot run here.
    """

    def enqueue() -> None:
        for i in range(calls):
            group.perform(implementation.run(layers[i % len(layers)]))

    group = layers[0].group
    try:
        for _ in range(_WARM_UPS):
            if group.perform(implementation.run(layers[0])) is None:
                return None
        with _places_kept(group):
            return group.replays.record(enqueue)
    except (PeerTimeoutError, RankMismatchError):
        raise  # on every rank
    except Exception as error:
        log.info("%s is not measured: %r", implementation.name, error)
        return None


@contextlib.contextmanager
def _places_kept(group: Group) -> Iterator[None]:
    """Count no epochs of mapped outputs within the context: a rank that fails to capture some would
    be in another one than its peers.
    """
    outputs = [made.output for made in group.kept.values() if isinstance(made, Fused)]
    places = [output.place for output in outputs]
    try:
        yield
    finally:
        for output, place in zip(outputs, places, strict=True):
            output.go_back(place)


def _median_us(graph: torch.cuda.CUDAGraph, call: GemmCall, samples: int) -> float:
    """Return the median time of a graph on this rank's GPU, in microseconds."""
    meeting, times = torch.zeros(1, device=call.group.device), []
    with call.group.running():
        graph.replay()  # the first replay uploads the graph
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The hosts enqueue while the GPUs sleep, so their time does not count; nor does the time by
        # which one GPU begins earlier than another.
        torch.cuda._sleep(_SLEEP_CYCLES)
        dist.all_reduce(meeting, group=call.process_group)
        with call.group.running():
            start.record()
            graph.replay()
            end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3)
    return statistics.median(times)
