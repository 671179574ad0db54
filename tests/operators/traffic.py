"""Calls of an operator whose traffic is counted, or that follow one another under faults.

``run_one(call)`` makes a call on a rank and returns its result; each operator has its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.costs.registry import Cost

RunOne = Callable[[Any], torch.Tensor]


def with_traffic(run_one: RunOne, calls: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return each call's result, and what its kernel sent."""
    traffic = interlace.group_of().traffic
    answers = []
    for call in calls:
        traffic.reset()
        y = run_one(call)
        answers.append(
            (y, traffic.message_bytes, traffic.messages, traffic.signals, dict(traffic.bytes_to))
        )
    return answers


def check_traffic(
    calls: Sequence[Any],
    answers: list[list[tuple[Any, ...]]],
    check_all: Callable[[Sequence[Any], list[list[torch.Tensor]]], None],
    cost: Callable[[Any, int], Cost],
) -> None:
    """Check what :func:`with_traffic` has returned on each rank.

    Args:
        calls: The calls.
        answers: For each rank, the answer of each call.
        check_all: Checks each rank's results of the calls.
        cost: Returns the cost of a call on a rank.
    """
    check_all(calls, [[answer[0] for answer in answers_of_rank] for answers_of_rank in answers])
    for rank, answers_of_rank in enumerate(answers):
        for call, (_, *sent, bytes_to) in zip(calls, answers_of_rank, strict=True):
            predicted = cost(call, rank)
            assert sent == [predicted.link_bytes, predicted.messages, predicted.signals], (
                rank,
                call,
            )
            assert sum(bytes_to.values()) == predicted.link_bytes
            assert rank not in bytes_to


def changing_shapes(run_one: RunOne, calls: Sequence[Any], count: int) -> list[int]:
    """Make the calls in turn, under faults of this rank's own; return which of ``count`` differ
    from the first ones.
    """
    expected = [run_one(call).clone() for call in calls]
    faults = interlace.Faults(seed=dist.get_rank(), max_delay_s=0.002, reorder_puts=True)
    with interlace.inject(faults):
        return [
            i
            for i in range(count)
            if not run_one(calls[i % len(calls)]).equal(expected[i % len(calls)])
        ]


def held_up(look: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return ``look``, the primitive by which waits look at signals, slower by ``seconds``."""

    def late(*args: Any) -> Any:
        time.sleep(seconds)
        return look(*args)

    return late
