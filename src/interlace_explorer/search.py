"""The search for a failing schedule: first in order, then at random, then for a shorter one."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Sequence
from typing import Any

from interlace_explorer.failures import (
    DATA_RACES,
    Failure,
    Report,
    Violation,
    wrong_result_of_a_race,
)
from interlace_explorer.machine import ExploredGpus
from interlace_explorer.memory import CellTable, FinerGrain
from interlace_explorer.operations import Kind
from interlace_explorer.schedules import (
    Action,
    Deviating,
    Listed,
    Policy,
    RandomWalk,
    SchedulePlan,
    format_schedule,
    parse_schedule,
    weight,
)
from interlace_explorer.trees import Tree

# Schedules that are tried to make a failing one shorter.
_SHRINKING_ATTEMPTS = 300
# Random schedules differ in how often they go on with the same rank, and let a store arrive.
_STICKINESS = (0.0, 0.5, 0.8, 0.95)
_ARRIVALS = (0.0, 0.02, 0.2)
_EAGER_SHARE = 0.3


class _ScheduleFailed(Exception):
    """A schedule fails.

    Attributes:
        kind, message: As in :class:`Failure`.
        eager: True if stores arrived at once.
        actions: The schedule up to its failure.
    """

    def __init__(self, kind: str, message: str, eager: bool, actions: list[Action]) -> None:
        super().__init__(message)
        self.kind, self.message, self.eager, self.actions = kind, message, eager, actions


class Search:
    """The schedules of one program that have been tried, and those to try next.

    Args:
        trees: One tree of operations per rank.
        cells: Numbers of the cells of simulated memory.
        judge: Tells if a wait is over.
        rng: Source of random numbers.
    """

    def __init__(
        self, trees: Sequence[Tree], cells: CellTable, judge: Any, rng: random.Random
    ) -> None:
        self._trees, self._cells, self._judge, self._random = trees, cells, judge, rng
        self._ranks = range(len(trees))
        self._tried: set[tuple[bool, tuple[Action, ...]]] = set()
        self._start: ExploredGpus | None = None
        self._began = time.monotonic()

    def run(self, schedules: int, preemptions: int) -> Report:
        """Try up to ``schedules`` schedules, until one fails.

        Args:
            schedules: Number of distinct schedules; half of them are tried in order.
            preemptions: Most preemptions of a schedule that is tried in order.
        """
        exhausted = False
        try:
            exhausted = self._try_in_order(max(1, schedules // 2), preemptions)
            # A random schedule may have been tried before. A program with few schedules would make
            # the search go on for ever, so the number of attempts is bounded, too.
            for _ in range(2 * schedules):
                if len(self._tried) >= schedules:
                    break
                self._try(self._random_walk())
        except _ScheduleFailed as failed:
            return self._report(False, self._shorten(failed))
        return self._report(exhausted, None)

    def replay(self, schedule: str) -> Report:
        """Try one schedule, given as text.

        Raises:
            ArgumentError: it is not a schedule of this program.
        """
        eager, actions = parse_schedule(schedule)
        try:
            self._follow(eager, Listed(actions, strict=True))
        except _ScheduleFailed as failed:
            return self._report(False, self._shorten(failed, attempts=0))
        return self._report(False, None)

    def _report(self, exhausted: bool, failure: Failure | None) -> Report:
        runs = sum(tree.runs for tree in self._trees)
        return Report(len(self._tried), exhausted, runs, time.monotonic() - self._began, failure)

    # Choice of schedules

    def _try_in_order(self, limit: int, preemptions: int) -> bool:
        """Try up to ``limit`` schedules, those first that differ least from the default one.

        Returns:
            True if there are no more of them.
        """
        # The queue is ordered by the number of differences. Of equals a random one comes first, so
        # that a limit does not favour mistakes at a program's beginning. The count keeps Python
        # from comparing plans. A plan is made of its parts when its turn comes: most never have it.
        queue: list[tuple[int, float, int, tuple[Any, ...]]] = []
        count = 0
        for eager in (True, False):
            for first in self._ranks:
                heapq.heappush(queue, (0, 0.0, count := count + 1, (eager, first)))
        while queue:
            if len(self._tried) >= limit:
                return False
            plan = SchedulePlan(*heapq.heappop(queue)[3])
            policy = Deviating(plan, len(self._trees))
            self._try((plan.eager, policy))
            # Following a plan shows the actions that were possible after its last difference. Each
            # of them makes a plan with one difference more.
            for step, action, preempts in policy.alternatives:
                if plan.preemptions + preempts <= preemptions:
                    steps = (*plan.steps, (step, action))
                    longer = plan.eager, plan.first, steps, plan.preemptions + preempts
                    heapq.heappush(
                        queue, (len(steps), self._random.random(), count := count + 1, longer)
                    )
        return True

    def _random_walk(self) -> tuple[bool, Policy]:
        eager = self._random.random() < _EAGER_SHARE
        return eager, RandomWalk(
            self._random,
            self._random.choice(_STICKINESS),
            0.0 if eager else self._random.choice(_ARRIVALS),
        )

    def _try(self, schedule: tuple[bool, Policy]) -> None:
        eager, policy = schedule
        self._tried.add((eager, tuple(self._follow(eager, policy))))

    # One schedule

    def _follow(self, eager: bool, policy: Policy, trace: bool = False) -> list[Action]:
        """Follow one schedule to its end and return its actions.

        Args:
            eager: True if stores arrive at once.
            policy: Chooses the actions.
            trace: True if messages shall name the lines of stores, which takes longer.

        Raises:
            _ScheduleFailed: the schedule fails.
        """
        actions: list[Action] = []
        try:
            machine = self._beginning(trace)
            machine.eager = eager
            self._go(machine, policy, actions)
        except Violation as error:
            self._tried.add((eager, tuple(actions)))
            raise _ScheduleFailed(error.kind, str(error), eager, actions) from None
        return actions

    def _beginning(self, trace: bool) -> ExploredGpus:
        """Return the state in which schedules begin to differ.

        It is the start of the program, or the point at which all ranks are ready.
        """
        # Preparations are the same in every schedule, so their result is kept and copied. A trace
        # must see the stores of the preparations, too.
        if self._start is not None and not trace:
            return self._start.copy()
        first = [tree.start() for tree in self._trees]
        machine = ExploredGpus(
            len(self._trees),
            self._cells,
            lambda machine, rank, *node: self._trees[rank].extend(machine, *node),
        )
        machine.at, machine.trace = first, {} if trace else None
        for rank in self._ranks:
            machine.settle(rank)
        start = machine.copy()
        if self._go(
            machine, Deviating(SchedulePlan(True, 0), len(self._trees)), [], until_ready=True
        ):
            start = machine
        start.trace = machine.trace
        self._start = None if trace else start
        return start.copy()

    def _go(
        self,
        machine: ExploredGpus,
        policy: Policy,
        actions: list[Action],
        until_ready: bool = False,
    ) -> bool:
        """Go on to the end of the program, or with ``until_ready`` until all ranks are ready.

        Args:
            machine: The state; it changes.
            policy: Chooses the actions.
            actions: List to which the actions are appended.
            until_ready: True to stop once all ranks are ready.

        Returns:
            True if all ranks are ready, False at the program's end.

        Raises:
            Violation: a rule of the memory model is broken, a rank's program failed, or no rank can
                go on.
        """
        while True:
            at = machine.at
            enabled = [rank for rank in self._ranks if machine.enabled(rank, self._judge)]
            for rank in self._ranks:
                if at[rank].kind == Kind.END and at[rank].detail is not None:
                    raise self._cause(machine, _failure_of(rank, at[rank].detail))
            if not enabled:
                # No rank can go on by itself. Either all are at a common point, or a wait depends
                # on a store that is under way, or the program is over, or it is stuck.
                if all(node.kind == Kind.READY for node in at):
                    for rank in self._ranks:
                        machine.go_on(rank)
                        machine.settle(rank)
                    if until_ready:
                        return True
                    continue
                waiting = [rank for rank in self._ranks if machine.under_way[rank]]
                if waiting:
                    machine.deliver(waiting[0], 0)
                    actions.append((waiting[0], 0))
                    continue
                if all(node.kind == Kind.END for node in at):
                    return False
                raise Violation("deadlock", machine.awaiting())
            rank, store = policy.choose(len(actions), enabled, machine.under_way)
            actions.append((rank, store))
            if store >= 0:
                machine.deliver(rank, store)
            else:
                machine.step(rank)

    # Failures

    def _cause(self, machine: ExploredGpus, failure: BaseException) -> BaseException:
        """Return the race that the schedule of a wrong result comes to, or the failure as it is.

        A rank that does not wait loads before its peer has stored. That is a race only once the
        peer stores, and the rank's assertion may fail earlier. So the other ranks go on, for as
        long as they can without the rank that has failed.

        Args:
            machine: The state in which the failure was seen; it changes.
            failure: The exception to raise.
        """
        if not isinstance(failure, Violation) or failure.kind != "wrong result":
            return failure
        try:
            while True:
                enabled = [rank for rank in self._ranks if machine.enabled(rank, self._judge)]
                waiting = [rank for rank in self._ranks if machine.under_way[rank]]
                if enabled:
                    machine.step(enabled[0])
                elif waiting:
                    machine.deliver(waiting[0], 0)
                else:
                    return failure
        except Violation as later:
            return wrong_result_of_a_race(later, failure) if later.kind in DATA_RACES else failure

    def _shorten(self, failed: _ScheduleFailed, attempts: int = _SHRINKING_ATTEMPTS) -> Failure:
        """Leave out parts of a failing schedule, as long as it fails with the same kind."""
        # Delta debugging: parts of half the schedule first, and smaller ones when none can go.
        best, tried = failed, 0
        size = max(1, len(best.actions) // 2)
        while size and tried < attempts:
            start, shorter = 0, False
            while start < len(best.actions) and tried < attempts:
                kept = best.actions[:start] + best.actions[start + size :]
                tried += 1
                try:
                    self._follow(best.eager, Listed(kept, strict=False))
                except _ScheduleFailed as candidate:
                    if candidate.kind == best.kind and weight(candidate.actions) < weight(
                        best.actions
                    ):
                        best, shorter = candidate, True
                        continue
                start += size
            if not shorter:
                size //= 2
        # Follow the result once more with a trace, for a message that names lines.
        try:
            self._follow(best.eager, Listed(best.actions, strict=True), trace=True)
        except _ScheduleFailed as traced:
            best = traced
        text, (switches, _) = format_schedule(best.eager, best.actions), weight(best.actions)
        return Failure(best.kind, best.message, text, switches)


def _failure_of(rank: int, error: BaseException) -> BaseException:
    """Return the exception to raise for an exception of a rank's program.

    A failed assertion is a wrong result. A request for finer cells is returned as it is, for
    :func:`interlace_explorer.explore` to start again.
    """
    if isinstance(error, FinerGrain):
        return error
    if isinstance(error, AssertionError):
        return Violation("wrong result", f"on rank {rank}: {' '.join(str(error).split())}")
    return Violation(
        "error", f"rank {rank} raised {type(error).__name__}: {' '.join(str(error).split())}"
    )
