"""The roles of the times in a benchmark result; no GPU, no torch.

A time's role says which claims it counts for. Results carry it as ``"role"``, and as ``"impl"`` the
value of ``impl`` by which the operator runs what was timed, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from interlace.errors import ArgumentError

Role = Literal["ours", "pair", "compute", "communication"]
"""An implementation of the operator; a compute step and a collective that a program without
Interlace would run; compute without communication; communication without compute.
"""

PAIR_NAMES = {
    "unfused": "cuBLAS + NCCL",
    "one_shot": "cuBLAS + torch one-shot",
    "two_shot": "cuBLAS + torch two-shot",
    "async_tp": "torch async-TP",
}
"""Display name of each stock pair, by the value of ``impl`` that runs it."""

_DISTURBED = 1.15
"""Ratio of the median to the 10th percentile of a time's samples, above which most samples met
other work on the machine. On machines without any, fewer than one time of a thousand is above it.
"""


def is_disturbed(time: Mapping[str, Any]) -> bool:
    """Return whether other work on the machine has lengthened a time in a result.

    Such a time is measured again, and no prediction is fitted to it; where it stays so, it counts
    like any other: what made it so may be the implementation itself.

    Args:
        time: Its entry in the result.
    """
    return bool(time["median_us"] > _DISTURBED * time.get("p10_us", time["median_us"]))


def role_of(time: Mapping[str, Any]) -> tuple[str, str]:
    """Return the role of a time and the value of ``impl`` that runs it; empty if none does.

    Args:
        time: Its entry in the result.

    Raises:
        ArgumentError: The entry has no role, as those of versions before 0.2 had none.
    """
    if "role" not in time:
        raise ArgumentError(
            "every time of a result must have a role, as `interlace bench --json` writes them; "
            f"got one with {', '.join(time) or 'nothing'}. Measure again."
        )
    return str(time["role"]), str(time.get("impl", ""))
