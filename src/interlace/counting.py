"""Counts of what Interlace took over in this process, by the program that it runs in."""

from __future__ import annotations

import collections
import logging
import sys

log = logging.getLogger("interlace.integrations")
"""The log with the lines for users of other programs: what is on, fused, and left alone."""


def is_first_rank() -> bool:
    """Return whether this process speaks for all ranks: it is rank 0, or has no process group."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return True
    return bool(dist.get_rank() == 0)


class Calls:
    """Counts by operator and reason.

    Attributes:
        program: The program that they are of, such as ``"vllm"``.
        taken: Number of times that Interlace took a place, by the operator that it runs there.
        left: Number of times that the program's own code stayed, by its operator and the reason.

    Example:
        >>> interlace.counts()["symm_mem"].left
        Counter({('fused_matmul_reduce_scatter', 'it scatters the last dimension'): 2})
    """

    def __init__(self, program: str = "") -> None:
        self.program = program
        self.taken: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[tuple[str, str]] = collections.Counter()

    def take(self, operator: str) -> None:
        """Count a call that Interlace runs, and log the first of each operator on rank 0."""
        if not self.taken[operator] and is_first_rank():
            log.info("interlace: %s: %s is taken over", self.program, operator)
        self.taken[operator] += 1

    def leave(self, operator: str, reason: str) -> None:
        """Count a call that the program's own operator runs, and log the first for each reason on
        rank 0.
        """
        if not self.left[operator, reason] and is_first_rank():
            log.info("interlace: %s: %s left alone: %s", self.program, operator, reason)
        self.left[operator, reason] += 1

    def clear(self) -> None:
        """Set all counts to zero."""
        self.taken.clear()
        self.left.clear()


_PROGRAMS = ("torch.compile", "vllm", "sglang", "symm_mem", "transformers", "torchrec")

_counts = {program: Calls(program) for program in _PROGRAMS}


def calls_of(program: str) -> Calls:
    """Return the counts of a program, for the adapter that keeps them."""
    return _counts[program]


def counts() -> dict[str, Calls]:
    """Return what Interlace took over in this process, and what it left alone, by program.

    ``"torch.compile"`` and ``"vllm"`` count places in the graphs that were compiled in this
    process, by the fused operator and by the collective that was left. Graphs that are taken from a
    cache of compiled graphs are not counted. ``"sglang"`` and ``"symm_mem"`` count calls of the
    host; ``"transformers"`` counts layers of experts, and ``"torchrec"`` tables. The counts go on
    counting, and ``clear()`` sets them to zero.

    Returns:
        For each program its :class:`interlace.counting.Calls`, with the attributes ``taken`` and
        ``left``.

    Example:
        >>> interlace.counts()["vllm"].taken
        Counter({'gemm_all_reduce_norm': 3, 'gemm_all_reduce': 1})
    """
    return dict(_counts)
