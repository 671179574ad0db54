"""Benchmarks on the CPU backend, whose times mean nothing: every step runs, and none is timed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist


def _run_instead(
    step: Callable[[int], object],
    *,
    period: int,
    samples: int = 15,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Run the step once for every set of operands; return 10 us as its time."""
    from interlace.bench.timing import Timing

    for i in range(period):
        step(i)
    return Timing(10.0, 9.0, 11.0, 1.0, samples)


@contextlib.contextmanager
def untimed() -> Iterator[pytest.MonkeyPatch]:
    """Run steps instead of timing them, within a block; yield a patch for more replacements."""
    # Ranks of the pool import the benchmark only when a test needs it.
    from interlace.bench import benchmark

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "measure", _run_instead)
        # The interpreter takes a while for the fifty calls that the host's time is a median of.
        host_us = functools.partial(benchmark.host_us, calls=1, samples=1)
        patch.setattr(benchmark, "host_us", host_us)
        yield patch
