"""The part of ``interlace doctor --network`` that tries GPU-initiated puts (gin)."""

from __future__ import annotations

import dataclasses
from typing import Any

from interlace.comm import Group


def try_on(group: Group) -> dict[str, Any] | None:
    """Run the self-test on a rank, in a process of its own. Collective.

    Returns:
        The outcome of all ranks, for :func:`sentences`; None on the CPU backend and on one node,
        where there is nothing to try.
    """
    if group.backend == "cpu" or not group.spans_nodes:
        return None
    from interlace.testing.gin_check import try_gin  # imports Triton

    return dataclasses.asdict(try_gin(group))


def sentences(outcome: dict[str, Any] | None) -> list[str]:
    """Return what the self-test has shown, in one sentence; none if it was not run."""
    if outcome is None:
        return []
    if not outcome["passed"]:
        return [
            f"GPU-initiated puts (gin) cannot be used here: {outcome['reason'].rstrip('.')}. "
            "Nothing uses them unless it is asked to."
        ]
    times = ", ".join(
        f"{size(int(nbytes))} in {us:.0f} us" for nbytes, us in outcome["exchange_us"].items()
    )
    return [
        f"GPU-initiated puts (gin) passed their self-test, by {outcome['carrier']}: one exchange "
        f"with every remote rank {times}. Nothing uses them unless it is asked to "
        "(interlace.open_gin). Please report it: they have run nowhere else."
    ]


def size(nbytes: int) -> str:
    """Return a power of two of bytes in words."""
    for unit, unit_bytes in (("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= unit_bytes:
            return f"{nbytes // unit_bytes} {unit}"
    return f"{nbytes} B"
