"""Ranks that really run, each in a thread of its own, one at a time; and the trees of what they do.

A thread stands still at each operation on shared state until it is told what the operation returns.
When a schedule needs a return value that a rank has never got at this point, the rank runs again
from the start, is told what it was told before, and goes on from there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from interlace.comm.group import Group, stand_in
from interlace.errors import RankMismatchError
from interlace.testing.machine import Machine, Violation
from interlace.testing.memory import PART_BYTES, Addresses, CellTable, ExploredHeap, View
from interlace.testing.operations import NO_CELLS, Cells, Kind, Operation, Words

_MOST_OPERATIONS = 100_000  # of one run of a program; one that has more polls memory by itself


class _Abandoned(BaseException):
    """Nobody needs this run any more."""


class _Here(threading.local):
    run: Run | None = None


_here = _Here()


def current() -> Run | None:
    """The run of this thread; None in a thread that is no rank."""
    return _here.run


class Rank:
    """What a program knows of the rank that it is: the argument of every explored program.

    Attributes:
        rank, world_size: this rank, and how many there are.
        group: the group of all of them, which is also the default group.
    """

    def __init__(self, run: Run, group: Group) -> None:
        self.rank, self.world_size, self.group = group.rank, group.world_size, group
        self._run = run

    def ready(self) -> None:
        """Say that preparations are over. Schedules differ only in what follows; all ranks meet
        here, and nothing else does.
        """
        self._run.perform(Kind.READY)

    def generator(self, seed: int = 0) -> torch.Generator:
        """Random numbers that are the same in every run, and others on every rank."""
        return torch.Generator().manual_seed(1000 * seed + self.rank)


class ExploredGroup(Group):
    """One rank's view of the group of all explored ranks."""

    def __init__(self, run: Run, rank: int, world_size: int, view: View) -> None:
        super().__init__(None, torch.device("cpu"))
        self.rank, self.world_size = rank, world_size
        self._heap = ExploredHeap(view)
        self._run = run

    def exchange(self, what: str, value: object, *, deadline_s: float | None = None) -> list[Any]:
        """See :meth:`Group.exchange`; ranks that do not come are a deadlock."""
        if self.world_size == 1:  # it is still being made
            return [value]
        answers = self._run.exchange((what, value))
        if len({call for call, _ in answers}) > 1:
            raise RankMismatchError(
                "ranks must make the same calls in the same order; got "
                f"{[call for call, _ in answers]}."
            )
        return [answer for _, answer in answers]


class Run:
    """One rank's program, from its start to wherever it is needed.

    The details of operations: PUT and RELAXED: whether the memory is the rank's own. ATOMIC: the
    new value as a function of the old one, its type, whether it acquires, whether it releases.
    PROGRAM: its number. POST: the value. COLLECT: which exchange. WORDS: how many values a word
    holds. END: what went wrong.
    """

    def __init__(self, tree: Tree, responses: Sequence[Any]) -> None:
        self.tree = tree
        self.awaited: tuple[Addresses, Words] | None = None
        self.kernel = ""
        self.program = -1
        self._responses = deque(responses)
        self._operations = 0
        self._exchanges = 0
        self._abandoned = False
        self._answer: Any = None
        self._operation: Operation | None = None
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"rank {tree.rank}", daemon=True)

    # From the explorer

    def start(self) -> Operation:
        self._thread.start()
        return self._next()

    def go_on(self, answer: Any) -> Operation:
        self._answer = answer
        self._answered.release()
        return self._next()

    def abandon(self) -> None:
        self._abandoned = True
        self._answered.release()
        self._thread.join()

    def _next(self) -> Operation:
        self._asked.acquire()
        assert self._operation is not None
        return self._operation

    # From the rank

    def _run(self) -> None:
        _here.run = self
        failure: BaseException | None = None
        try:
            with self.tree.surroundings(self):
                group = ExploredGroup(self, self.tree.rank, self.tree.world_size, self.tree.view)
                stand_in(group)
                self.tree.program(Rank(self, group))
        except (
            BaseException
        ) as error:  # C code on the way may have made another exception of _Abandoned
            failure = error
        if self._abandoned:
            return
        with contextlib.suppress(_Abandoned):
            self._responses.clear()
            self.perform(Kind.END, detail=failure)

    def perform(
        self, kind: Kind, cells: Cells = NO_CELLS, values: Words | None = None, detail: Any = None
    ) -> Any:
        """Do an operation, some time; its result."""
        if self._abandoned:
            raise _Abandoned
        if self._responses:
            return self._responses.popleft()
        self._operations += 1
        if self._operations > _MOST_OPERATIONS:
            raise RuntimeError(
                "a kernel must wait by il.wait or for packed words; got one that looks at memory "
                "for ever."
            )
        self._operation = Operation(kind, cells, values, detail, self._site())
        if kind < Kind.RELEASE and self.tree.does_here(self._operation):
            return self.tree.response
        with self.tree.standing_still():
            self._asked.release()
            self._answered.acquire()
        if self._abandoned:
            raise _Abandoned
        return self._answer

    def send(self, addresses: Addresses, values: Words, kind: str) -> None:
        """Store values in symmetric memory."""
        offsets = self.tree.view.offsets_of(addresses)
        parts = offsets // PART_BYTES
        values = np.ascontiguousarray(values)
        for part in np.unique(parts).tolist():
            chosen = parts == part
            cells = self.tree.cells.cells_at(offsets[chosen], values.itemsize)
            words = values[chosen].view(f"u{self.tree.cells.grain}")
            self.perform(_KINDS[kind], cells, words, part == self.tree.rank)

    def load(self, addresses: Addresses, dtype: Any) -> Words:
        """Values of symmetric memory."""
        offsets = self.tree.view.offsets_of(addresses)
        itemsize = np.dtype(dtype).itemsize
        if self.awaited is not None:
            known, values = self.awaited
            places = np.minimum(np.searchsorted(known, addresses), len(known) - 1)
            if (known[places] == addresses).all():
                return values[places]
        cells = self.tree.cells.cells_at(offsets, itemsize)
        return np.frombuffer(self.perform(Kind.LOAD, cells), dtype)

    def exchange(self, value: Any) -> list[Any]:
        which, self._exchanges = self._exchanges, self._exchanges + 1
        self.perform(Kind.POST, detail=value)
        answers: list[Any] = self.perform(Kind.COLLECT, detail=which)
        return answers

    def _site(self) -> str:
        """The innermost line of the program, or of a kernel, that leads here."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if not any(part in name for part in _MACHINERY):
                where = f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno} in {frame.f_code.co_name}"
                return (
                    where
                    if self.program < 0
                    else f"program {self.program} of {self.kernel}, {where}"
                )
            frame = frame.f_back
        return "at its end"


_KINDS = {"put": Kind.PUT, "store": Kind.PUT, "relaxed": Kind.RELAXED, "release": Kind.RELEASE}
_MACHINERY = ("/interlace/testing/", "/interlace/language/", "/interlace/comm/", "/triton/", "/torch/", "/numpy/", "/threading.py",
              "/contextlib.py", "/functools.py")  # fmt: skip


class Tree:
    """All that one rank has been seen to do, and its current run.

    Attributes:
        surroundings: what a run lives in; entered in its thread.
        standing_still: around the time in which a run waits.
        runs: how many there have been.
        response: what the last operation done in the rank's own thread has returned.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        program: Callable[[Rank], Any],
        cells: CellTable,
        surroundings: Callable[[Run], contextlib.AbstractContextManager[None]],
        standing_still: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.rank, self.world_size, self.program, self.cells = rank, world_size, program, cells
        self.surroundings, self.standing_still = surroundings, standing_still
        self.view = View(world_size)
        self.runs = 0
        self.response: Any = None
        self._machine: Machine | None = None
        self._last: tuple[Operation, bytes | None, Any]
        self._root: Operation | None = None
        self._run: Run | None = None
        self._at: Operation | None = None

    def start(self) -> Operation:
        """The program's first operation."""
        if self._root is None:
            self._begin([])
            self._root = self._at
        assert self._root is not None
        return self._root

    def extend(
        self, machine: Machine, node: Operation, key: bytes | None, response: Any
    ) -> Operation:
        """Where a rank next meets others if ``node`` returns ``response``, as it never has before.

        What the rank does until then is done.
        """
        self._machine, self._last = machine, (node, key, response)
        try:
            if self._run is None or self._at is not node:
                self._begin([*node.path(), response])
            else:
                self._at = self._run.go_on(response)
        finally:
            self._machine = None
        assert self._at is not None
        self._append(self._at)
        return self._at

    def does_here(self, operation: Operation) -> bool:
        """Do an operation that no other rank notices in the thread of its own rank; whether it did.

        Threads that take turns cost much where other programs take the processors.
        """
        if self._machine is None:
            return False
        self._machine.make_room()
        try:
            key, self.response = self._machine.effect(self.rank, operation)
        except Violation:
            return False  # the explorer's thread does it again, and is told
        self._append(operation)
        self._last = operation, key, self.response
        return True

    def _append(self, operation: Operation) -> None:
        node, key, response = self._last
        operation.parent, operation.response = node, response
        node.following[key] = operation

    def close(self) -> None:
        self._stop()
        self.view.close()

    def _begin(self, responses: Sequence[Any]) -> None:
        self._stop()
        self.view.reset()
        self.runs += 1
        self._run = Run(self, responses)
        self._at = self._run.start()

    def _stop(self) -> None:
        if self._run is not None:
            self._run.abandon()
            self._run = self._at = None


@contextlib.contextmanager
def all_of(trees: Sequence[Tree]) -> Iterator[Sequence[Tree]]:
    """Trees that are closed at the end."""
    try:
        yield trees
    finally:
        for tree in trees:
            tree.close()
