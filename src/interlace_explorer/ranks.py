"""Ranks that really run, each in a thread of its own, one at a time.

A thread stands still at each operation on shared state until it gets the operation's result. When a
schedule needs a result that a rank has never got at this point, the rank runs again from the start,
gets the same results as before, and goes on from there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from interlace.comm.groups.group import Group
from interlace.comm.groups.process_groups import default_group
from interlace.errors import ArgumentError, RankMismatchError
from interlace_explorer.memory import PART_BYTES, Addresses, ExploredHeap, View
from interlace_explorer.network import ExploredNetwork
from interlace_explorer.operations import NO_CELLS, Cells, Kind, Operation, Words

if TYPE_CHECKING:
    from interlace_explorer.trees import Tree

# Operations of one run. A program that does more polls memory in a loop of its own.
_MOST_OPERATIONS = 20_000


class _Abandoned(BaseException):
    """The explorer needs this run no longer.

    It is a ``BaseException``, so that the program does not catch it.
    """


class _ThreadState(threading.local):
    run: RankRun | None = None


_thread_state = _ThreadState()


def current() -> RankRun | None:
    """Return the run of this thread; None in a thread that is no rank."""
    return _thread_state.run


class Rank:
    """One rank of an explored program, which gets it as its argument.

    Attributes:
        rank: Number of this rank.
        world_size: Number of ranks.
        group: The group of all ranks, which is also the default group.
    """

    def __init__(self, run: RankRun, group: Group) -> None:
        self.rank, self.world_size, self.group = group.rank, group.world_size, group
        self._run = run

    def ready(self) -> None:
        """Say that preparations are over: schedules differ only in the operations that follow.

        All ranks meet at this point. It orders nothing else.
        """
        self._run.perform(Kind.READY)

    def generator(self, seed: int = 0) -> torch.Generator:
        """Return a generator whose numbers are the same in every run, and differ between ranks."""
        return torch.Generator().manual_seed(1000 * seed + self.rank)


class ExploredGroup(Group):
    """One rank's view of the group of all explored ranks."""

    def __init__(self, run: RankRun, rank: int, world_size: int, view: View) -> None:
        super().__init__(None, torch.device("cpu"))
        members = self.members
        members.rank, members.world_size = rank, world_size
        members.node_of_rank = run.tree.node_of_rank
        self.nodes, self.spans_nodes = members.nodes, members.spans_nodes
        self.memory.heap = ExploredHeap(view)
        self._run = run

    def network(self) -> Any:
        """Return the simulated network; see :class:`ExploredNetwork`."""
        if self._network is None:
            # Its slots are allocated where the real one connects.
            self._network = ExploredNetwork(self._run, self)  # type: ignore[assignment]
        return self._network

    def exchange(self, what: str, value: object, *, deadline_s: float | None = None) -> list[Any]:
        """Exchange values on the host, as :meth:`Group.exchange` does.

        A rank that does not come makes a deadlock, which the explorer reports.

        Raises:
            RankMismatchError: ranks exchange values for different calls.
        """
        # The base class's constructor exchanges values, too, before the ranks are known.
        if self.world_size == 1:
            return [value]
        answers = self._run.exchange((what, value))
        if len({call for call, _ in answers}) > 1:
            raise RankMismatchError(
                "ranks must make the same calls in the same order; got "
                f"{[call for call, _ in answers]}."
            )
        return [answer for _, answer in answers]


class RankRun:
    """One rank's program, from its start to the operation that the explorer needs.

    Details of operations, by kind: PUT and RELAXED: True if the memory is the rank's own. ATOMIC
    and PEER_ATOMIC: the new value as a function of the old one, its dtype, True if it acquires,
    True if it releases.
    PROGRAM: the program's number. POST: the value. COLLECT: number of the exchange. WAIT and WORDS:
    number of values per packed word, or 0, and the bytes of a signal or word. END: the exception
    that ended the program, or None.

    Args:
        tree: The rank's tree.
        responses: Results of the first operations, from an earlier run.

    Attributes:
        awaited: Within a wait, sorted addresses and the values that loads from them return.
        kernel, program: The running kernel and program, for messages; -1 on the host.
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

    # Called by the explorer

    def start(self) -> Operation:
        """Start the program and return its first operation."""
        self._thread.start()
        return self._next()

    def go_on(self, answer: Any) -> Operation:
        """Give the program the result of its operation, and return its next operation."""
        self._answer = answer
        self._answered.release()
        return self._next()

    def abandon(self) -> None:
        """End the program and its thread."""
        self._abandoned = True
        self._answered.release()
        self._thread.join()

    def _next(self) -> Operation:
        """Wait until the program stands still, and return its operation."""
        self._asked.acquire()
        assert self._operation is not None
        return self._operation

    # Called in the rank's thread

    def _run(self) -> None:
        """Run the program; its end is an operation, too."""
        _thread_state.run = self
        failure: BaseException | None = None
        try:
            with self.tree.surroundings(self):
                group = ExploredGroup(self, self.tree.rank, self.tree.world_size, self.tree.view)
                # Each rank is a thread, and the variable is of the thread.
                default_group.set(group)
                self.tree.program(Rank(self, group))
        # Any exception: C code between the operation and here may have made another one of
        # _Abandoned.
        except BaseException as error:
            failure = error
        if self._abandoned:
            return
        with contextlib.suppress(_Abandoned):
            self._responses.clear()
            self.perform(Kind.END, detail=failure)

    def perform(
        self, kind: Kind, cells: Cells = NO_CELLS, values: Words | None = None, detail: Any = None
    ) -> Any:
        """Do an operation, at the time that the schedule chooses, and return its result.

        Args:
            kind: Kind of the operation.
            cells: Cells that it touches.
            values: Values that it stores, or epochs that it awaits.
            detail: See the class.

        Raises:
            ArgumentError: the program seems to look at memory for ever.
        """
        if self._abandoned:
            raise _Abandoned
        # The beginning of a run repeats an earlier one, whose results are known.
        if self._responses:
            return self._responses.popleft()
        self._operations += 1
        # The end comes after a refusal, too: without it, the explorer would wait for ever.
        if self._operations > _MOST_OPERATIONS and kind != Kind.END:
            raise ArgumentError(
                "an explored kernel must wait by il.wait, or for packed words or Lamport values; "
                f"got one that looks at memory for ever: {self._site()}."
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
        """Store values in symmetric memory: one operation per rank whose memory it is.

        Args:
            addresses: Uint64, one per value.
            values: Array of values.
            kind: ``"put"``, ``"store"``, ``"release"``, ``"relaxed"``, or ``"network"`` for a
                message.

        Raises:
            ArgumentError: the memory is of a rank of another node, which no store reaches.
        """
        offsets = self.tree.view.offsets_of(addresses)
        parts = offsets // PART_BYTES
        values = np.ascontiguousarray(values)
        for part in np.unique(parts).tolist():
            nodes = self.tree.node_of_rank
            if nodes and nodes[part] != nodes[self.tree.rank] and kind != "network":
                raise ArgumentError(
                    f"a store must stay within its node; got one to rank {part} of node "
                    f"{nodes[part]}. On real nodes it faults."
                )
            of_part = parts == part
            cells = self.tree.cells.cells_at(offsets[of_part], values.itemsize)
            words = values[of_part].view(f"u{self.tree.cells.grain}")
            self.perform(_KINDS[kind], cells, words, part == self.tree.rank)

    def load(self, addresses: Addresses, dtype: Any) -> Words:
        """Load values of ``dtype`` from addresses (uint64) of symmetric memory."""
        offsets = self.tree.view.offsets_of(addresses)
        itemsize = np.dtype(dtype).itemsize
        # A wait has taken place as one operation, so its looks are no operations of their own.
        if self.awaited is not None:
            known, values = self.awaited
            indices = np.minimum(np.searchsorted(known, addresses), len(known) - 1)
            if (known[indices] == addresses).all():
                return values[indices]
        cells = self.tree.cells.cells_at(offsets, itemsize)
        return np.frombuffer(self.perform(Kind.LOAD, cells), dtype)

    def exchange(self, value: Any) -> list[Any]:
        """Exchange values with all ranks on the host; return them in rank order."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self.perform(Kind.POST, detail=value)
        answers: list[Any] = self.perform(Kind.COLLECT, detail=number)
        return answers

    def _site(self) -> str:
        """Return the innermost line of the program, or of a kernel, that leads to the operation."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if not any(part in name for part in _MACHINERY):
                line = f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno} in {frame.f_code.co_name}"
                if self.program < 0:
                    return line
                return f"program {self.program} of {self.kernel}, {line}"
            frame = frame.f_back
        return "at its end"


_KINDS = {
    "put": Kind.PUT,
    "store": Kind.PUT,
    "network": Kind.PUT,
    "relaxed": Kind.RELAXED,
    "release": Kind.RELEASE,
}
# Files whose lines say nothing about the program.
_MACHINERY = (
    "/interlace_explorer/",
    "/interlace/language/",
    "/interlace/comm/",
    "/triton/",
    "/torch/",
    "/numpy/",
    "/threading.py",
    "/contextlib.py",
    "/functools.py",
)
