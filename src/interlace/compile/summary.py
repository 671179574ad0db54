"""The line in the log that says what the pass did with a program's graphs, and its counts.

A line is written when PyTorch has finished a compilation, by Dynamo's callback for it: a program
such as vLLM hands a model to the compiler in dozens of pieces, all within one compilation, so the
line sums up the model. A model with graph breaks is several compilations. Lines have the totals of
the process, and are written after the first, second, fourth, eighth, ... compilation, and after one
with an operator or a reason that is new: at most a few lines per model, however many layers it has.

PyTorch says nothing of the end where a program compiles ahead of time (``aot_compile``, as vLLM
does) or calls Inductor itself. There a line is written when no graph has come for some seconds.
"""

from __future__ import annotations

import collections
import logging
import re
import threading
from collections.abc import Iterable
from typing import Any

from torch._dynamo.callback import callback_handler
from torch._guards import CompileContext

from interlace.compile.findings import PRODUCTS, Finding
from interlace.counting import Calls, calls_of, is_first_rank
from interlace.units import format_count

log = logging.getLogger("interlace.compile")

QUIET_S = 10.0
"""Seconds without a graph after which a model is taken to be compiled, if PyTorch does not say."""

_MOST_REASONS = 4
_NUMBERED = re.compile(r"\b([a-z][a-z_]*)_\d+\b")


class GraphSummary:
    """What the pass did with all graphs of this process, and whether the log has it.

    Attributes:
        program: The program in whose counts graphs are; see :func:`interlace.counts`.
        title: The program's name in the log.
    """

    def __init__(self) -> None:
        self.program, self.title = "torch.compile", "torch.compile"
        self._graphs = self._compilations = self._merged = 0
        self._is_new = self._was_asked = self._was_called = self._has_told_of_cache = False
        self._timer: threading.Timer | None = None

    def name_program(self, program: str, title: str) -> None:
        """Count the graphs that are compiled from now on for another program."""
        self.program, self.title = program, title

    @property
    def calls(self) -> Calls:
        """The program's counts."""
        return calls_of(self.program)

    def count(self, findings: Iterable[Finding]) -> None:
        """Count what the pass has found in a graph."""
        self._listen()
        self._was_called = True
        calls, new = self.calls, list(findings)
        self._graphs += bool(new)
        for finding in new:
            if finding.collective == PRODUCTS:
                self._merged += 1
                continue
            counter: collections.Counter[Any] = calls.taken if finding.operator else calls.left
            # Nodes of equal layers have numbers, such as add_3, and are left for one reason.
            reason = _NUMBERED.sub(r"\1", finding.reason)
            key = finding.operator or (finding.collective, reason)
            self._is_new |= not counter[key]
            counter[key] += 1
        if CompileContext.current_compile_id() is None:
            self._wait()

    def expect(self) -> None:
        """Note that Inductor has asked for the pass's key, with which it looks for a graph."""
        self._listen()
        self._was_asked = True

    def _listen(self) -> None:
        # torch.compiler.reset() forgets all callbacks.
        if self._say not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(self._say)

    def _wait(self) -> None:
        """Write a line once no graph has come for some seconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(QUIET_S, self._say_what_is_there)
        self._timer.daemon = True
        self._timer.start()

    def _say_what_is_there(self) -> None:
        self._was_called = self._is_new = False
        if self._graphs and is_first_rank():
            log.info("%s", self)

    def _say(self, _: Any) -> None:
        """Write a line if one is due, at the end of a compilation."""
        was_called, was_asked = self._was_called, self._was_asked
        self._was_called = self._was_asked = False
        if was_called and self._graphs:
            self._compilations += 1
            # Powers of two.
            is_due = self._is_new or not self._compilations & (self._compilations - 1)
            self._is_new = False
            if is_due and is_first_rank():
                log.info("%s", self)
        elif was_asked and not was_called and not self._has_told_of_cache:
            self._has_told_of_cache = True
            if is_first_rank():
                log.info(
                    "interlace: %s: graphs were taken from Inductor's cache with what was fused in "
                    "them when they were compiled; they are not counted", self.title,
                )  # fmt: skip

    def __str__(self) -> str:
        taken, left = self.calls.taken, self.calls.left
        total = taken.total() + left.total()
        operators = ", ".join(f"{name} {count}" for name, count in taken.most_common())
        text = f"interlace: {self.title}: {taken.total()} of {total} collectives fused"
        text += f" ({operators})" if operators else ""
        text += f" in {format_count(self._graphs, 'graph')}, equal ones once"
        if self._merged:
            merged = format_count(self._merged, "group")
            text += f"; {merged} of products with one input merged"
        reasons = [
            f"{count} {collective} ({reason})"
            for (collective, reason), count in left.most_common(_MOST_REASONS)
        ]
        if len(left) > _MOST_REASONS:
            reasons.append(f"{len(left) - _MOST_REASONS} more reasons")
        return text + (f"; left alone: {', '.join(reasons)}" if reasons else "")


summary = GraphSummary()
"""The summary of this process."""
