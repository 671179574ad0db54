"""``explore``: many schedules of one program on several ranks, in one process; see
``docs/explorer.md``.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from interlace.comm.interpreter import require
from interlace.errors import ArgumentError, ProtocolError
from interlace.testing.machine import Machine, Violation
from interlace.testing.memory import CellTable, FinerGrain
from interlace.testing.operations import Kind
from interlace.testing.ranks import Rank, Tree, all_of

_SHRINKING = 300  # schedules tried to make a failing one shorter
_STICKINESS = (0.0, 0.5, 0.8, 0.95)  # how often a random schedule goes on with the same rank
_ARRIVALS = (0.0, 0.02, 0.2)  # how often it lets a store arrive


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a program does wrong in one schedule.

    Attributes:
        kind: ``"wrong result"``; ``"deadlock"``; ``"race"``: a load of what may still be written,
            or a store to what may still be loaded; ``"two writers"``: two ranks store to the same
            memory in no order; ``"error"``: the program raised an exception.
        message: which rank, program and line, or what everybody awaits.
        schedule: the shortest one found, for ``explore(..., replay=schedule)``.
        switches: how often it goes on with another rank.
    """

    kind: str
    message: str
    schedule: str
    switches: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} (schedule {self.schedule})"


@dataclasses.dataclass(frozen=True)
class Report:
    """What exploring has shown.

    Attributes:
        schedules: how many distinct ones were tried.
        exhausted: whether these were all with so many preemptions.
        runs: how often a rank's program really ran; schedules beyond that were followed in memory.
        seconds: how long it took.
        failure: the first one found, in the shortest schedule found for it; None if every schedule
            was right.
    """

    schedules: int
    exhausted: bool
    runs: int
    seconds: float
    failure: Failure | None

    def raise_if_failed(self) -> None:
        """Raise what was found.

        Raises:
            ProtocolError: a schedule failed.
        """
        if self.failure is not None:
            raise ProtocolError(self.failure.kind, self.failure.message, self.failure.schedule)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A schedule to be tried: the default one, but for some steps.

    Attributes:
        eager: stores arrive at once, unless the plan says when.
        first: the rank that begins.
        steps: by step, what is done instead.
        preemptions: in how many of these steps the default one's rank could have gone on.
    """

    eager: bool
    first: int
    steps: tuple[tuple[int, _Action], ...] = ()
    preemptions: int = 0


_Action = tuple[int, int]  # a rank, and which of its stores under way arrives; -1: its next step


class _Failed(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def explore(
    program: Callable[[Rank], Any],
    *,
    ranks: int = 2,
    schedules: int = 1000,
    preemptions: int = 2,
    seed: int = 0,
    replay: str | None = None,
) -> Report:
    """Run ``program`` on several ranks in this process, under many schedules, until one fails.

    Ranks run one at a time; a schedule says who goes on at each signal, wait and exchange, and when
    a store that nothing orders arrives. Half of the schedules are tried in order: by default a rank
    goes on until it must wait, and then the next one; then come schedules that differ from this in
    one step, in two, and so on. A rank that is interrupted then waits until no other can go on. The
    other half is random. Kernels really run only where a rank gets to see something new; nothing
    expires.

    Args:
        program: called with a :class:`Rank` for each rank. It calls operators, or launches kernels
            within ``rank.group.running()``, with CPU tensors, on the default group, and checks
            their results (``torch.testing.assert_close``). It must do the same in every run: random
            numbers come from ``rank.generator()``. Call ``rank.ready()`` once everything has been
            called once, so that schedules differ in what follows, where nothing is agreed on any
            more.
        ranks: how many there are.
        schedules: how many are tried at most.
        preemptions: how often one of those that are tried in order interrupts a rank that could go
            on, at most.
        seed: of the random ones.
        replay: try only this schedule, of a failure.

    Returns:
        The report. It is no error here if a schedule fails; see :meth:`Report.raise_if_failed`.

    Raises:
        ArgumentError: an argument is out of range, or the program does what cannot be explored.
        BackendError: Triton was imported without its interpreter.

    Example:
        >>> def program(rank):
        ...     x = torch.full((1, 32), float(rank.rank + 1))
        ...     for last in (False, True):
        ...         y = interlace.gemv_all_reduce(x, torch.ones(16, 32))
        ...         torch.testing.assert_close(y, torch.full((1, 16), 96.0))
        ...         rank.ready() if not last else None
        >>> interlace.testing.explore(program, ranks=2, schedules=200).raise_if_failed()
    """
    if ranks < 2 or schedules < 1 or preemptions < 0:
        raise ArgumentError(
            "explore: ranks must be at least 2, schedules at least 1, preemptions not negative; "
            f"got {ranks}, {schedules}, "
            f"{preemptions}."
        )
    require("cpu")
    from interlace.testing import hooks  # imports Triton

    grain = 4
    with hooks.installed(), torch.random.fork_rng(devices=[]):
        while True:
            cells = CellTable(ranks, grain)
            trees = [
                Tree(rank, ranks, program, cells, hooks.surroundings, hooks.standing_still)
                for rank in range(ranks)
            ]
            try:
                with all_of(trees):
                    search = _Search(trees, cells, hooks.Judge(), random.Random(seed))
                    return search.replay(replay) if replay else search.run(schedules, preemptions)
            except FinerGrain as finer:
                grain = finer.grain


class _Search:
    """The schedules of one program that have been tried, and those that will be."""

    def __init__(
        self, trees: Sequence[Tree], cells: CellTable, judge: Any, rng: random.Random
    ) -> None:
        self._trees, self._cells, self._judge, self._random = trees, cells, judge, rng
        self._ranks = range(len(trees))
        self._tried: set[tuple[bool, tuple[_Action, ...]]] = set()
        self._start: Machine | None = None
        self._began = time.monotonic()

    def run(self, schedules: int, preemptions: int) -> Report:
        exhausted = False
        try:
            exhausted = self._in_order(max(1, schedules // 2), preemptions)
            # The same random schedule may come twice; where there are few, it will.
            for _ in range(2 * schedules):
                if len(self._tried) >= schedules:
                    break
                self._try(self._random_walk())
        except _Failing as failing:
            return self._report(False, self._shorten(failing))
        return self._report(exhausted, None)

    def replay(self, schedule: str) -> Report:
        eager, actions = _parse(schedule)
        try:
            self._follow(eager, _Listed(actions, strict=True))
        except _Failing as failing:
            return self._report(False, self._shorten(failing, attempts=0))
        return self._report(False, None)

    def _report(self, exhausted: bool, failure: Failure | None) -> Report:
        runs = sum(tree.runs for tree in self._trees)
        return Report(len(self._tried), exhausted, runs, time.monotonic() - self._began, failure)

    # Which schedules

    def _in_order(self, most: int, preemptions: int) -> bool:
        """Try schedules, those first that differ least from the default one; whether there are no
        more.
        """
        # By how often they differ from the default one
        queue: list[tuple[int, float, int, _Plan]] = []
        count = 0
        for eager in (True, False):
            for first in self._ranks:
                heapq.heappush(queue, (0, 0.0, count := count + 1, _Plan(eager, first)))
        while queue:
            if len(self._tried) >= most:
                return False
            _, _, _, plan = heapq.heappop(queue)
            policy = _Deviating(plan, len(self._trees))
            self._try((plan.eager, policy))
            for step, action, preempts in policy.others:
                if plan.preemptions + preempts <= preemptions:
                    steps = (*plan.steps, (step, action))
                    new = dataclasses.replace(
                        plan, steps=steps, preemptions=plan.preemptions + preempts
                    )
                    heapq.heappush(
                        queue, (len(steps), self._random.random(), count := count + 1, new)
                    )
        return True

    def _random_walk(self) -> tuple[bool, _Policy]:
        eager = self._random.random() < 0.3
        return eager, _Random(
            self._random,
            self._random.choice(_STICKINESS),
            0.0 if eager else self._random.choice(_ARRIVALS),
        )

    def _try(self, schedule: tuple[bool, _Policy]) -> None:
        eager, policy = schedule
        self._tried.add((eager, tuple(self._follow(eager, policy))))

    # One schedule

    def _follow(self, eager: bool, policy: _Policy, trace: bool = False) -> list[_Action]:
        """Follow one schedule to its end; what was done.

        Raises:
            _Failing: it failed.
        """
        done: list[_Action] = []
        try:
            machine = self._beginning(trace)
            machine.eager = eager
            self._go(machine, policy, done)
        except (_Failed, Violation) as error:
            self._tried.add((eager, tuple(done)))
            raise _Failing(error.kind, str(error), eager, done) from None
        return done

    def _beginning(self, trace: bool) -> Machine:
        """The state in which schedules begin to differ: at the start, or once all ranks are
        ready.
        """
        if self._start is not None and not trace:
            return self._start.copy()
        first = [tree.start() for tree in self._trees]
        machine = Machine(
            len(self._trees),
            self._cells,
            lambda machine, rank, *node: self._trees[rank].extend(machine, *node),
        )
        machine.at, machine.trace = first, {} if trace else None
        for rank in self._ranks:
            machine.settle(rank)
        start = machine.copy()
        if self._go(machine, _Deviating(_Plan(True, 0), len(self._trees)), [], until_ready=True):
            start = machine
        start.trace = machine.trace
        self._start = None if trace else start
        return start.copy()

    def _go(
        self, machine: Machine, policy: _Policy, done: list[_Action], until_ready: bool = False
    ) -> bool:
        """Go on to the end, or until all ranks are ready; whether that is why."""
        while True:
            at = machine.at
            enabled = [rank for rank in self._ranks if machine.enabled(rank, self._judge)]
            for rank in self._ranks:
                if at[rank].kind == Kind.END and at[rank].detail is not None:
                    raise _failure_of(rank, at[rank].detail)
            if not enabled:
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
                    done.append((waiting[0], 0))
                    continue
                if all(node.kind == Kind.END for node in at):
                    return False
                raise _Failed("deadlock", machine.awaiting())
            rank, store = policy.choose(len(done), enabled, machine.under_way)
            done.append((rank, store))
            if store >= 0:
                machine.deliver(rank, store)
            else:
                machine.step(rank)

    # Failures

    def _shorten(self, failing: _Failing, attempts: int = _SHRINKING) -> Failure:
        """Leave out pieces of a failing schedule for as long as it fails alike."""
        best, tried = failing, 0
        size = max(1, len(best.done) // 2)
        while size and tried < attempts:
            start, shorter = 0, False
            while start < len(best.done) and tried < attempts:
                rest = best.done[:start] + best.done[start + size :]
                tried += 1
                try:
                    self._follow(best.eager, _Listed(rest, strict=False))
                except _Failing as other:
                    if other.kind == best.kind and _weight(other.done) < _weight(best.done):
                        best, shorter = other, True
                        continue
                start += size
            if not shorter:
                size //= 2
        try:
            self._follow(best.eager, _Listed(best.done, strict=True), trace=True)
        except _Failing as told:
            best = told
        return Failure(best.kind, best.message, _text(best.eager, best.done), _weight(best.done)[0])


class _Failing(Exception):
    """A schedule that fails, with what was done until then."""

    def __init__(self, kind: str, message: str, eager: bool, done: list[_Action]) -> None:
        super().__init__(message)
        self.kind, self.message, self.eager, self.done = kind, message, eager, done


def _failure_of(rank: int, error: BaseException) -> BaseException:
    """What an exception of a rank's program means; what cannot be explored is raised as it is."""
    if isinstance(error, FinerGrain):
        return error
    if isinstance(error, AssertionError):
        return _Failed("wrong result", f"on rank {rank}: {' '.join(str(error).split())}")
    return _Failed(
        "error", f"rank {rank} raised {type(error).__name__}: {' '.join(str(error).split())}"
    )


# Who goes on


class _Policy(ABC):
    """Chooses the next action of a schedule."""

    @abstractmethod
    def choose(self, step: int, enabled: list[int], under_way: Sequence[Sequence[Any]]) -> _Action:
        """The action of step number ``step``, of a rank in ``enabled`` or of what is under way."""


class _Deviating(_Policy):
    """A rank goes on until it must wait, then the next one that can; but for the steps of a plan.

    A rank that a plan interrupts stands still until no other one can go on, so that these get as
    far ahead of it as they can.

    Attributes:
        others: what else could have been done at later steps: the step, the action, whether it
            preempts a rank.
    """

    def __init__(self, plan: _Plan, ranks: int) -> None:
        self._steps = dict(plan.steps)
        self._last = max(self._steps, default=-1)
        self._ranks, self._rank = ranks, plan.first
        self._interrupted: set[int] = set()
        self.others: list[tuple[int, _Action, int]] = []

    def choose(self, step: int, enabled: list[int], under_way: Sequence[Sequence[Any]]) -> _Action:
        could_go_on = self._rank in enabled
        chosen = self._steps.get(step)
        if chosen is None:
            rank = self._rank
            if not could_go_on:
                able = [each for each in enabled if each not in self._interrupted] or enabled
                rank = min(able, key=lambda each: (each - self._rank) % self._ranks)
            chosen = rank, -1
            if step > self._last:
                for other in enabled:
                    if other != rank:
                        self.others.append((step, (other, -1), int(could_go_on)))
                for other, stores in enumerate(under_way):
                    if stores:
                        self.others.append((step, (other, 0), 1))
        elif could_go_on and chosen[1] < 0:
            self._interrupted.add(self._rank)
        if chosen[1] < 0:
            self._rank = chosen[0]
            self._interrupted.discard(self._rank)
        return chosen


class _Random(_Policy):
    def __init__(self, rng: random.Random, stickiness: float, arrivals: float) -> None:
        self._random, self._stickiness, self._arrivals = rng, stickiness, arrivals
        self._rank = -1

    def choose(self, step: int, enabled: list[int], under_way: Sequence[Sequence[Any]]) -> _Action:
        if self._arrivals and self._random.random() < self._arrivals:
            stores = [
                (rank, which) for rank, each in enumerate(under_way) for which in range(len(each))
            ]
            if stores:
                return self._random.choice(stores)
        if self._rank not in enabled or self._random.random() >= self._stickiness:
            self._rank = self._random.choice(enabled)
        return self._rank, -1


class _Listed(_Policy):
    """The actions of a list, as far as they can be done; then as by default."""

    def __init__(self, actions: Sequence[_Action], *, strict: bool) -> None:
        self._actions: Iterator[_Action] = iter(actions)
        self._strict = strict
        self._rank = 0

    def choose(self, step: int, enabled: list[int], under_way: Sequence[Sequence[Any]]) -> _Action:
        for rank, store in self._actions:
            if rank < len(under_way) and (
                rank in enabled if store < 0 else store < len(under_way[rank])
            ):
                self._rank = rank if store < 0 else self._rank
                return rank, store
            if self._strict:
                raise ArgumentError(
                    "explore: replay must be a schedule of this program; got one that it cannot "
                    "follow."
                )
        self._rank = self._rank if self._rank in enabled else enabled[0]
        return self._rank, -1


# Schedules as text: "eager 0x12 1x5 0!2": rank 0 twelve steps, rank 1 five, then the third store of
# rank 0 that is under way arrives.


def _weight(done: Sequence[_Action]) -> tuple[int, int]:
    """How complicated a schedule is: switches between ranks, and arrivals; then steps."""
    switches = sum(before != after for before, after in itertools.pairwise(done))
    return switches, len(done)


def _text(eager: bool, done: Sequence[_Action]) -> str:
    words = ["eager" if eager else "lazy"]
    count = 0
    for i, (rank, store) in enumerate(done):
        if store >= 0:
            words.append(f"{rank}!{store}")
            continue
        count += 1
        if i + 1 == len(done) or done[i + 1] != (rank, -1):
            words.append(f"{rank}x{count}")
            count = 0
    return " ".join(words)


def _parse(schedule: str) -> tuple[bool, list[_Action]]:
    first, *words = schedule.split()
    found = [re.fullmatch(r"(\d+)([x!])(\d+)", word) for word in words]
    if first not in ("eager", "lazy") or not all(found):
        raise ArgumentError(f"explore: replay must be the schedule of a failure; got {schedule!r}.")
    actions: list[_Action] = []
    for match in found:
        assert match is not None
        rank, number = int(match[1]), int(match[3])
        actions += [(rank, number)] if match[2] == "!" else [(rank, -1)] * number
    return first == "eager", actions
