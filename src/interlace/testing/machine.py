"""Simulated memory of several ranks, and what operations do to it: values, stores under way, and
what happened before what.

Order is kept by vector clocks, one for each program of each rank. A release publishes what a
program knows in the cells it stores to, a wait takes it over. Every ordinary load must come after
the store that it sees, every store after the loads and stores of other ranks that it follows;
anything else is a race, whichever way it went in this schedule. Packed words need no order of their
own: who has seen one knows only that the store, and what its program had awaited before it, is
over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from interlace.testing.memory import CellTable
from interlace.testing.operations import Cells, Kind, Operation, Words

PROGRAMS = 32  # of a rank that are told apart; beyond them, numbers are used again
_EVERYTHING = -1
_SPARE = 64
_ARRAYS = ("_data", "_write_thread", "_write_clock", "_sync", "_read_thread", "_read_clock")
_LISTS = (
    "_published", "_released", "_observed", "_fenced", "_clock", "_seen", "_covers", "_thread",
    "_posted", "_launched", "_launch", "at",
)  # fmt: skip
_ALWAYS = np.iinfo(np.int64).max

Clocks = npt.NDArray[np.int64]


class Violation(Exception):
    """A rule of the memory model is broken."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Store(NamedTuple):
    """A store that has left its program.

    Attributes:
        clock: of its program when it left.
        released, seen: what had been released to its program then, and that with what it had
            observed; with all of its own rank.
        published: by whom it is seen: what was released, or None, and what was observed.
        program: a bit for the program that must order it; all bits once its launch has ended.
    """

    thread: int
    clock: int
    released: Clocks
    seen: Clocks
    published: tuple[Clocks | None, Clocks]
    cells: Cells
    values: Words
    program: int
    node: Operation


class Machine:
    """The state between two steps of a schedule.

    Attributes:
        at: the operation that each rank does next.
        under_way: by rank, stores that have left and not arrived.
    """

    def __init__(
        self,
        ranks: int,
        table: CellTable,
        extend: Callable[[Machine, int, Operation, bytes | None, Any], Operation],
    ) -> None:
        self.ranks = ranks
        self._table, self._extend = table, extend
        cells = table.count + _SPARE
        self._threads = ranks * (1 + PROGRAMS)
        self._slices = [
            slice(rank * (1 + PROGRAMS), (rank + 1) * (1 + PROGRAMS)) for rank in range(ranks)
        ]
        self._data = np.zeros(cells, f"u{table.grain}")
        self._write_thread = np.zeros(cells, np.intp)
        self._write_clock = np.zeros(cells, np.int64)
        self._read_thread = np.zeros((ranks, cells), np.intp)
        self._read_clock = np.zeros((ranks, cells), np.int64)
        self._sync = np.zeros(cells, np.intp)
        nothing = np.zeros(self._threads, np.int64)
        self._published: list[tuple[Clocks | None, Clocks]] = [(None, nothing)]
        self._released = [nothing] * self._threads
        self._observed = [nothing] * self._threads
        self._fenced: list[Clocks | None] = [None] * self._threads
        self._clock = [1] * self._threads
        self._seen: list[tuple[Clocks, Clocks] | None] = [None] * self._threads
        self._covers = [0] * self._threads
        self._covered_at: list[dict[int, int]] = [{} for _ in range(ranks)]
        self._launched: list[tuple[int, ...]] = [()] * ranks
        self._launch: list[tuple[Clocks, Clocks]] = [(nothing, nothing)] * ranks
        self._thread = [rank * (1 + PROGRAMS) for rank in range(ranks)]
        self._posted: list[tuple[tuple[Any, Clocks, Clocks], ...]] = [()] * ranks
        self.under_way: list[list[_Store]] = [[] for _ in range(ranks)]
        self.at: list[Operation] = []
        self.eager = True
        self.trace: dict[int, str] | None = None

    def copy(self) -> Machine:
        """The same state, for another schedule."""
        new = object.__new__(Machine)
        new.__dict__.update(self.__dict__)
        for name in _ARRAYS:
            setattr(new, name, getattr(self, name).copy())
        for name in _LISTS:
            setattr(new, name, list(getattr(self, name)))
        new._covered_at = [dict(each) for each in self._covered_at]
        new.under_way = [list(each) for each in self.under_way]
        new.make_room()
        return new

    def make_room(self) -> None:
        """Have arrays for all the cells that there are now, and some more."""
        if self._table.count < len(self._data):
            return
        for name in _ARRAYS:
            old = getattr(self, name)
            new = np.zeros((*old.shape[:-1], self._table.count + _SPARE), old.dtype)
            new[..., : old.shape[-1]] = old
            setattr(self, name, new)

    # Steps

    def enabled(self, rank: int, judge: Callable[[Operation, Words], bool]) -> bool:
        """Whether a rank's next operation may take place; ``judge`` says whether a wait is over, by
        what it would see.
        """
        node = self.at[rank]
        kind = node.kind
        if kind == Kind.WAIT or kind == Kind.WORDS:
            seen = self._data[node.cells]
            key = seen.tobytes()
            holds = node.known.get(key)
            if holds is None:
                holds = node.known[key] = judge(node, seen)
            return holds
        if kind == Kind.COLLECT:
            return all(len(posted) > node.detail for posted in self._posted)
        return kind not in (Kind.READY, Kind.END)

    def step(self, rank: int) -> None:
        """Do a rank's next operation, and then those that no other rank can tell from it."""
        self._do(rank, self.at[rank])
        node = self.at[rank]
        while node.kind < Kind.RELEASE:
            self._do(rank, node)
            node = self.at[rank]

    def settle(self, rank: int) -> None:
        """Go to the first point at which a schedule may go on with another rank."""
        while self.at[rank].kind < Kind.RELEASE:
            self._do(rank, self.at[rank])

    def go_on(self, rank: int) -> None:
        """Leave the point at which all ranks were ready."""
        self._follow(rank, self.at[rank], None, None)

    def deliver(self, rank: int, which: int) -> None:
        """Let a store that is under way arrive."""
        self._arrive(rank, self.under_way[rank].pop(which))

    def _do(self, rank: int, node: Operation) -> None:
        key, response = self.effect(rank, node)
        self._follow(rank, node, key, response)

    def effect(self, rank: int, node: Operation) -> tuple[bytes | None, Any]:
        """What an operation does, and returns: as bytes, which tell returns apart, and as it is."""
        thread, kind, cells = self._thread[rank], node.kind, node.cells
        if kind == Kind.PUT or kind == Kind.RELAXED:
            assert node.values is not None
            clock, knowledge = self._clock[thread], self._knowledge(thread, rank)
            published = (
                self._fenced[thread] if kind == Kind.RELAXED else None,
                self._publish(thread)[1],
            )
            store = _Store(
                thread,
                clock,
                *knowledge,
                published,
                cells,
                node.values,
                self._own_bit(rank, thread),
                node,
            )
            if node.detail or self.eager:
                self._arrive(rank, store)
            else:
                self.under_way[rank].append(store)
        elif kind == Kind.LOAD:
            released = self._knowledge(thread, rank)[0]
            writers = self._write_thread[cells]
            early = self._write_clock[cells] > released[writers]
            if early.any():
                self._report_load(rank, node, cells[early])
            self._read_thread[rank, cells] = thread
            self._read_clock[rank, cells] = self._clock[thread]
            response = self._data[cells].tobytes()
            return response, response
        elif kind == Kind.RELEASE:
            assert node.values is not None
            self._order(rank, self._covers_of(rank, thread))
            clock, knowledge = self._clock[thread], self._knowledge(thread, rank)
            published = self._publish(thread)
            self._arrive(
                rank, _Store(thread, clock, *knowledge, published, cells, node.values, 0, node)
            )
        elif kind == Kind.WAIT:
            self._acquire(thread, cells, released=True)
        elif kind == Kind.WORDS:
            self._acquire(thread, cells, released=False)
            response = self._data[cells].tobytes()
            return response, response
        elif kind == Kind.ATOMIC:
            response = self._atomic(rank, thread, node)
            return response, response
        elif kind == Kind.FENCE:
            self._order(rank, self._covers_of(rank, thread))
            self._fenced[thread] = self._publish(thread)[0]
        elif kind == Kind.PROGRAM:
            self._begin_program(rank, thread, node.detail)
        elif kind == Kind.RETURN:
            self._end_launch(rank)
        elif kind == Kind.POST:
            self._order(rank, _EVERYTHING)
            self._posted[rank] = (*self._posted[rank], (node.detail, *self._publish(thread)))
        elif kind == Kind.COLLECT:
            parts = [posted[node.detail] for posted in self._posted]
            for _, released, observed in parts:
                self._join(thread, released, observed)
            values = [value for value, _, _ in parts]
            return repr(values).encode(), values
        return None, None

    def _follow(self, rank: int, node: Operation, key: bytes | None, response: Any) -> None:
        found = node.following.get(key)
        if found is None:
            found = self._extend(self, rank, node, key, response)
            self.make_room()
        self.at[rank] = found

    # Stores

    def _arrive(self, rank: int, store: _Store) -> None:
        cells, seen = store.cells, store.seen
        early = self._write_clock[cells] > seen[self._write_thread[cells]]
        if early.any():
            self._report_store(rank, store, cells[early], "stored to", None)
        for other in range(self.ranks):
            if other != rank:
                early = (
                    self._read_clock[other, cells] > store.released[self._read_thread[other, cells]]
                )
                if early.any():
                    self._report_store(rank, store, cells[early], "loaded", other)
        self._data[cells] = store.values
        self._write_thread[cells] = store.thread
        self._write_clock[cells] = store.clock
        self._sync[cells] = len(self._published)
        self._published.append(store.published)
        if self.trace is not None:
            self.trace.update(dict.fromkeys(cells.tolist(), f"rank {rank}, {store.node.site}"))

    def _order(self, rank: int, programs: int) -> None:
        """Let all stores arrive that these programs have made."""
        stores = self.under_way[rank]
        if stores:
            self.under_way[rank] = [each for each in stores if not each.program & programs]
            for each in stores:
                if each.program & programs:
                    self._arrive(rank, each)

    def _own_bit(self, rank: int, thread: int) -> int:
        program = thread - self._slices[rank].start - 1
        return 1 << program if program >= 0 else _EVERYTHING

    def _covers_of(self, rank: int, thread: int) -> int:
        """Bits of the programs whose stores a release by this one covers."""
        return self._covers[thread] if thread != self._slices[rank].start else _EVERYTHING

    def _atomic(self, rank: int, thread: int, node: Operation) -> bytes:
        function, dtype, acquires, releases = node.detail
        cells, covered = node.cells, self._covered_at[rank]
        first = int(cells[0])
        if acquires:
            self._acquire(thread, cells, released=True)
            self._covers[thread] |= covered.get(first, 0)
        before = self._data[cells].tobytes()
        after = function(np.frombuffer(before, dtype)).view(self._data.dtype)
        clock = self._clock[thread]
        knowledge = self._knowledge(thread, rank)
        released, observed = self._publish(thread)
        if releases:
            covered[first] = covered.get(first, 0) | self._covers[thread]
        # A read-modify-write goes on with what was released there before.
        earlier, _ = self._published[self._sync[first]]
        kept = released if releases else None
        if earlier is not None:
            kept = earlier if kept is None else np.maximum(kept, earlier)
        self._arrive(
            rank, _Store(thread, clock, *knowledge, (kept, observed), cells, after, 0, node)
        )
        return before

    # Clocks

    def _publish(self, thread: int) -> tuple[Clocks, Clocks]:
        """What a program knows now; what it does next is later."""
        released, observed = self._released[thread].copy(), self._observed[thread].copy()
        released[thread] = observed[thread] = self._clock[thread]
        self._clock[thread] += 1
        return released, observed

    def _acquire(self, thread: int, cells: Cells, *, released: bool) -> None:
        for number in {*self._sync[cells].tolist()}:
            ordered, observed = self._published[number]
            self._join(thread, ordered if released else None, observed)

    def _join(self, thread: int, released: Clocks | None, observed: Clocks) -> None:
        if released is not None:
            self._released[thread] = np.maximum(self._released[thread], released)
        self._observed[thread] = np.maximum(self._observed[thread], observed)
        self._seen[thread] = None

    def _knowledge(self, thread: int, rank: int) -> tuple[Clocks, Clocks]:
        """What has been released to a program, and what that and observation tell it, with all of
        its own rank.
        """
        found = self._seen[thread]
        if found is None:
            released = self._released[thread].copy()
            released[self._slices[rank]] = _ALWAYS
            found = self._seen[thread] = released, np.maximum(released, self._observed[thread])
        return found

    def _begin_program(self, rank: int, thread: int, program: int) -> None:
        host = self._slices[rank].start
        if thread == host:
            self._launch[rank] = self._publish(host)
        new = host + 1 + program % PROGRAMS
        self._released[new], self._observed[new] = self._launch[rank]
        self._seen[new] = self._fenced[new] = None
        self._covers[new] = self._own_bit(rank, new)
        self._launched[rank] = (*self._launched[rank], new)
        self._thread[rank] = new

    def _end_launch(self, rank: int) -> None:
        host = self._slices[rank].start
        for thread in self._launched[rank]:
            self._join(host, *self._publish(thread))
        self._launched[rank], self._thread[rank] = (), host
        self._covered_at[rank].clear()
        self.under_way[rank] = [each._replace(program=_EVERYTHING) for each in self.under_way[rank]]

    # Reports

    def _report_load(self, rank: int, node: Operation, cells: Cells) -> None:
        raise Violation("race", f"rank {rank}, {node.site}, loads what may still be written: it does not come after the store by "
                                f"{self._writer(cells)}")  # fmt: skip

    def _report_store(
        self, rank: int, store: _Store, cells: Cells, what: str, reader: int | None
    ) -> None:
        if reader is None:
            raise Violation("two writers", f"rank {rank}, {store.node.site}, stores where another rank has stored before, and "
                                           f"nothing orders the two: {self._writer(cells)}")  # fmt: skip
        raise Violation("race", f"rank {rank}, {store.node.site}, stores what rank {reader} may still load: nothing says that its "
                                f"load is over")  # fmt: skip

    def _writer(self, cells: Cells) -> str:
        if self.trace is None:
            return f"rank {int(self._write_thread[cells[0]]) // (1 + PROGRAMS)}"
        return self.trace.get(int(cells[0]), "nobody")

    def awaiting(self) -> str:
        """What every rank is waiting for."""
        lines = []
        for rank, node in enumerate(self.at):
            if node.kind == Kind.END:
                lines.append(f"rank {rank} has ended")
                continue
            seen = ""
            if node.kind == Kind.WAIT and node.values is not None:
                words = self._data[node.cells].view(np.int32)
                seen = f" for {_epochs(node.values)}, and sees {_epochs(words)}"
            what = {
                Kind.WAIT: "waits",
                Kind.WORDS: "waits for packed words",
                Kind.COLLECT: "waits in an exchange on the host",
            }
            lines.append(f"rank {rank} {what.get(node.kind, 'stands')}{seen}, {node.site}")
        return "; ".join(lines)


def _epochs(words: Words) -> str:
    """Epochs and their marks, in the order of the signals."""
    parts = [
        f"{int(word) & 0xFFFFFF}"
        + (f" of call {int(word) >> 24 & 0xFF}" if int(word) >> 24 else "")
        for word in words
    ]
    return "[" + ", ".join(parts) + "]"
