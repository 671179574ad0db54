"""Record what runs on a GPU beside kernels that record events: cuBLAS, NCCL, copy engines.

CUPTI reports it, through torch.profiler, on a clock of its own. Kernels that record events are seen
by both, which gives the distance of the clocks.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from interlace.comm import Group

_KINDS = (
    ("copy", re.compile("^Mem(cpy|set)")),
    ("collective", re.compile("nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.I)),
    ("product", re.compile("gemm|gemv|cutlass|nvjet|xmma|product|multiply", re.I)),
)


_HOLD, _PREPARATION = "hold", "prepare_recording"
"""Kernels of the trace itself: one before all that is traced, and one before each launch."""


class Activity(NamedTuple):
    """One kernel or copy.

    Attributes:
        name: Name of the kernel, or what is copied.
        stream: Number of the stream that it ran on.
        start_ns: When it began.
        duration_ns: How long it took.
    """

    name: str
    stream: int
    start_ns: float
    duration_ns: float

    @property
    def kind(self) -> str:
        """Return what it is by its name: a copy, a collective, a product, or other."""
        return next((kind for kind, pattern in _KINDS if pattern.search(self.name)), "other")


@contextlib.contextmanager
def observed(group: Group) -> Iterator[list[Activity]]:
    """Fill a list with what runs on the group's GPU within the context, on CUPTI's clock.

    The list stays empty on the CPU backend, without CUPTI, and where another profiler is at work.
    """
    activities: list[Activity] = []
    on_gpu = torch.profiler.ProfilerActivity.CUDA
    can_observe = group.backend == "cuda" and on_gpu in torch.profiler.supported_activities()
    if not can_observe or torch.autograd._profiler_enabled():
        yield activities
        return
    profiler = torch.profiler.profile(activities=[on_gpu])
    with profiler:
        yield activities
        torch.cuda.synchronize(group.device)
    results: Any = profiler.profiler
    for event in results.kineto_results.events():
        # Ranges of the host, which are repeated over the kernels that they enclose, are none.
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        if on_device and not event.is_user_annotation():
            activities.append(
                Activity(
                    event.name(), event.device_resource_id(), event.start_ns(), event.duration_ns()
                )
            )


def beside(activities: Sequence[Activity], launches: Sequence[tuple[str, int]]) -> list[Activity]:
    """Return the activities that are neither recorded launches nor the trace's own.

    Its own are its kernels, and all that begins before what holds the calls back has ended. Times
    are those of the device's clock.

    Args:
        activities: What CUPTI has reported.
        launches: Name and first time (ns) of each recorded launch, in the order in which they were
            enqueued; kernels of one name ran in this order.

    Returns:
        An empty list if no launch has been reported: then the clocks' distance is unknown.
    """
    starts: dict[str, list[float]] = {}
    for activity in sorted(activities, key=lambda activity: activity.start_ns):
        starts.setdefault(activity.name, []).append(activity.start_ns)
    distances = []
    for name, first_ns in launches:
        if starts.get(name):
            distances.append(first_ns - int(starts[name].pop(0)))
    if not distances:
        return []
    # One that was measured: the mean of two would have to be a float, which lacks the digits.
    ahead_ns = statistics.median_low(distances)
    held_ns = max(
        (
            int(activity.start_ns) + int(activity.duration_ns)
            for activity in activities
            if activity.name == _HOLD
        ),
        default=0,
    )
    apart = {_HOLD, _PREPARATION, *(name for name, _ in launches)}
    return [
        activity._replace(start_ns=int(activity.start_ns) + ahead_ns)
        for activity in activities
        if activity.name not in apart and activity.start_ns >= held_ns
    ]
