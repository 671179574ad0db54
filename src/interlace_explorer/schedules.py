"""Schedules: the order in which ranks go on and stores arrive, and policies that choose it.

A schedule is a list of actions. An action lets a rank do its next step, or lets one of its stores
under way arrive. As text it reads ``"eager 0x12 1x5 0!2"``: stores arrive at once; rank 0 does
twelve steps, rank 1 five, and then the third store of rank 0 that is under way arrives.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from interlace.errors import ArgumentError

Action = tuple[int, int]
"""A rank, and the index of its store under way that arrives; :data:`STEP` for its next step."""

STEP = -1


@dataclasses.dataclass(frozen=True)
class SchedulePlan:
    """A schedule to be tried, given as differences from the default one.

    Attributes:
        eager: True if stores arrive at once, unless the plan says when.
        first: The rank that begins.
        steps: The differences: number of a step, and the action that replaces the default one.
        preemptions: Number of differences that interrupt a rank which could have gone on.
    """

    eager: bool
    first: int
    steps: tuple[tuple[int, Action], ...] = ()
    preemptions: int = 0


class Policy(ABC):
    """Chooses the actions of a schedule, one after another."""

    @abstractmethod
    def choose(self, step: int, enabled: list[int], under_way: Sequence[Sequence[Any]]) -> Action:
        """Return the next action.

        Args:
            step: Number of the step.
            enabled: Ranks that can do their next step; at least one.
            under_way: By rank, the stores that have left and not arrived.
        """


class Deviating(Policy):
    """The default schedule, except for the steps of a plan.

    By default a rank goes on until it must wait, and then the next rank that can. A rank that the
    plan interrupts stands still until no other rank can go on, so that the others get as far ahead
    of it as they can: most mistakes show only when one rank is far behind.

    Attributes:
        alternatives: Other actions that were possible after the plan's last step: number of the
            step, the action, and 1 if the action interrupts a rank or delays a store, else 0.
    """

    def __init__(self, plan: SchedulePlan, ranks: int) -> None:
        self._steps = dict(plan.steps)
        self._last = max(self._steps, default=-1)
        self._ranks, self._rank = ranks, plan.first
        self._interrupted: set[int] = set()
        self.alternatives: list[tuple[int, Action, int]] = []

    def choose(self, step: int, enabled: list[int], under_way: Sequence[Sequence[Any]]) -> Action:
        """Return the plan's action for this step, or the default one."""
        could_go_on = self._rank in enabled
        chosen = self._steps.get(step)
        if chosen is None:
            rank = self._rank
            if not could_go_on:
                candidates = [
                    candidate for candidate in enabled if candidate not in self._interrupted
                ] or enabled
                rank = min(candidates, key=lambda candidate: (candidate - self._rank) % self._ranks)
            chosen = rank, STEP
            # Earlier alternatives belong to plans with fewer differences, which came before.
            if step > self._last:
                for alternative in enabled:
                    if alternative != rank:
                        self.alternatives.append((step, (alternative, STEP), int(could_go_on)))
                for owner, stores in enumerate(under_way):
                    if stores:
                        self.alternatives.append((step, (owner, 0), 1))
        elif could_go_on and chosen[1] < 0:
            self._interrupted.add(self._rank)
        if chosen[1] < 0:
            self._rank = chosen[0]
            self._interrupted.discard(self._rank)
        return chosen


class RandomWalk(Policy):
    """A random schedule.

    Args:
        rng: Source of random numbers.
        stickiness: Probability of going on with the same rank.
        arrivals: Probability that a store under way arrives, per step.
    """

    def __init__(self, rng: random.Random, stickiness: float, arrivals: float) -> None:
        self._random, self._stickiness, self._arrivals = rng, stickiness, arrivals
        self._rank = -1

    def choose(self, step: int, enabled: list[int], under_way: Sequence[Sequence[Any]]) -> Action:
        """Return a random action."""
        if self._arrivals and self._random.random() < self._arrivals:
            arrivals = [
                (rank, index)
                for rank, stores in enumerate(under_way)
                for index in range(len(stores))
            ]
            if arrivals:
                return self._random.choice(arrivals)
        if self._rank not in enabled or self._random.random() >= self._stickiness:
            self._rank = self._random.choice(enabled)
        return self._rank, STEP


class Listed(Policy):
    """The actions of a list, and after them the default schedule.

    Args:
        actions: The list.
        strict: True: an action that is not possible is an error. False: it is left out, as happens
            when a schedule is shortened.
    """

    def __init__(self, actions: Sequence[Action], *, strict: bool) -> None:
        self._actions: Iterator[Action] = iter(actions)
        self._strict = strict
        self._rank = 0

    def choose(self, step: int, enabled: list[int], under_way: Sequence[Sequence[Any]]) -> Action:
        """Return the next action of the list that is possible.

        Raises:
            ArgumentError: the list is strict, and its next action is not possible.
        """
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
        return self._rank, STEP


def weight(actions: Sequence[Action]) -> tuple[int, int]:
    """Return a measure of a schedule's complexity: switches and arrivals first, then steps."""
    switches = sum(before != after for before, after in itertools.pairwise(actions))
    return switches, len(actions)


def format_schedule(eager: bool, actions: Sequence[Action]) -> str:
    """Write a schedule as text."""
    words = ["eager" if eager else "lazy"]
    count = 0
    for i, (rank, store) in enumerate(actions):
        if store >= 0:
            words.append(f"{rank}!{store}")
            continue
        count += 1
        if i + 1 == len(actions) or actions[i + 1] != (rank, STEP):
            words.append(f"{rank}x{count}")
            count = 0
    return " ".join(words)


def parse_schedule(schedule: str) -> tuple[bool, list[Action]]:
    """Read a schedule from text: True if stores arrive at once, and the actions.

    Raises:
        ArgumentError: the text is no schedule.
    """
    first, *words = schedule.split()
    matches = [re.fullmatch(r"(\d+)([x!])(\d+)", word) for word in words]
    if first not in ("eager", "lazy") or not all(matches):
        raise ArgumentError(f"explore: replay must be the schedule of a failure; got {schedule!r}.")
    actions: list[Action] = []
    for match in matches:
        assert match is not None
        rank, number = int(match[1]), int(match[3])
        actions += [(rank, number)] if match[2] == "!" else [(rank, STEP)] * number
    return first == "eager", actions
