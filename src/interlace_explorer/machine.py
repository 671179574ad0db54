"""Simulated memory of several ranks: values, stores under way, and the order of operations.

Order is kept by vector clocks, one for each program of each rank. A release publishes a program's
knowledge in the cells that it stores to, and a wait takes the knowledge over. Every ordinary load
must come after the store that it sees, and every store after the loads and stores of other ranks
that it follows. Anything else is a race, even if no wrong value was loaded in this schedule. Packed
words need no order of their own: a program that has seen one knows only that this store is over,
and everything that its program had awaited before it.

In the terms of this module, a *thread* is a program of a rank, or the rank's host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from interlace_explorer.failures import (
    describe_wait,
    early_load,
    early_store,
    unordered_stores,
)
from interlace_explorer.memory import CellTable
from interlace_explorer.operations import Cells, Kind, Operation, Words

Clocks = npt.NDArray[np.int64]
"""By thread (a program of a rank, or the rank's host), the number of its known releases."""

# A clock that is never ahead: a rank knows everything about its own programs.
_ALWAYS = np.iinfo(np.int64).max

# Programs of a rank that have a clock each. A launch of more programs uses clocks again, and then a
# mistake between two programs of one clock is not seen.
PROGRAMS = 32
# The bits of all programs.
_EVERYTHING = -1
# Cells for which arrays have room before they must grow.
_SPARE = 64
# Attributes that a copy of a machine must copy, too. Tuples and arrays within the lists are never
# changed, only replaced.
_ARRAYS = (
    "_data",
    "_write_thread",
    "_write_clock",
    "_is_atomic",
    "_sync",
    "_read_thread",
    "_read_clock",
)
_LISTS = (
    "_published",
    "_fenced",
    "_covers",
    "_thread",
    "_posted",
    "_launched",
    "_launch",
    "at",
)


class Knowledge:
    """The clocks of all threads: a thread's own clock, and the clocks of others that it knows.

    *Released* knowledge has come by releases and waits. *Observed* knowledge has come by packed
    words, too: a word tells that stores are over, but not that loads are. Arrays are never changed,
    only replaced, so copies share them.

    Args:
        slices: By rank, the threads that are the rank's.
        threads: Number of threads.
    """

    def __init__(self, slices: list[slice], threads: int) -> None:
        nothing = np.zeros(threads, np.int64)
        self.nothing = nothing
        self.clock = [1] * threads
        self._slices = slices
        self._released = [nothing] * threads
        self._observed = [nothing] * threads
        # Computed on demand, because most operations of a thread add nothing to its knowledge.
        self._seen: list[tuple[Clocks, Clocks] | None] = [None] * threads

    def copy(self) -> Knowledge:
        """Return a copy, for another schedule."""
        new = object.__new__(Knowledge)
        new.__dict__.update(self.__dict__)
        new.clock, new._seen = list(self.clock), list(self._seen)
        new._released, new._observed = list(self._released), list(self._observed)
        return new

    def begin(self, thread: int, released: Clocks, observed: Clocks) -> None:
        """Let a thread begin with this knowledge."""
        self._released[thread], self._observed[thread] = released, observed
        self._seen[thread] = None

    def publish(self, thread: int) -> tuple[Clocks, Clocks]:
        """Return a thread's released and observed knowledge, and advance its clock.

        Later operations of the thread are not part of the returned knowledge.
        """
        released, observed = self._released[thread].copy(), self._observed[thread].copy()
        released[thread] = observed[thread] = self.clock[thread]
        self.clock[thread] += 1
        return released, observed

    def join(self, thread: int, released: Clocks | None, observed: Clocks) -> None:
        """Add to a thread's knowledge; None adds no released knowledge."""
        if released is not None:
            self._released[thread] = np.maximum(self._released[thread], released)
        self._observed[thread] = np.maximum(self._observed[thread], observed)
        self._seen[thread] = None

    def of(self, thread: int, rank: int) -> tuple[Clocks, Clocks]:
        """Return a thread's released knowledge, and that together with the observed knowledge.

        Both include everything about the thread's own rank, ``rank``.
        """
        knowledge = self._seen[thread]
        if knowledge is None:
            released = self._released[thread].copy()
            released[self._slices[rank]] = _ALWAYS
            knowledge = released, np.maximum(released, self._observed[thread])
            self._seen[thread] = knowledge
        return knowledge


class _Store(NamedTuple):
    """A store that has left its program.

    Attributes:
        thread: The program that made it.
        clock: The program's clock when the store left.
        released, seen: The knowledge that had been released to the program by then, and that
            together with the observed knowledge; both include all of its own rank.
        published: The knowledge for those who see the store: the released (or None) and the
            observed part.
        cells, values: The cells that it writes, and the values.
        program: A bit for the program that must order it; all bits once its launch has ended.
        node: The operation, for messages.
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


class ExploredGpus:
    """The state between two steps of a schedule.

    Attributes:
        ranks: Number of ranks.
        at: The operation that each rank does next.
        under_way: By rank, the stores that have left and not arrived.
        eager: True if stores arrive when they leave.
        trace: By cell, the line of the last store to it, and by rank and cell, the line of that
            rank's last load of it; None if no lines are kept.
    """

    def __init__(
        self,
        ranks: int,
        table: CellTable,
        extend: Callable[[ExploredGpus, int, Operation, bytes | None, Any], Operation],
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
        self._is_atomic = np.zeros(cells, np.bool_)
        self._read_thread = np.zeros((ranks, cells), np.intp)
        self._read_clock = np.zeros((ranks, cells), np.int64)
        self._sync = np.zeros(cells, np.intp)
        self._knowledge = Knowledge(self._slices, self._threads)
        nothing = self._knowledge.nothing
        self._published: list[tuple[Clocks | None, Clocks]] = [(None, nothing)]
        self._fenced: list[Clocks | None] = [None] * self._threads
        self._covers = [0] * self._threads
        self._covered_at: list[dict[int, int]] = [{} for _ in range(ranks)]
        self._launched: list[tuple[int, ...]] = [()] * ranks
        self._launch: list[tuple[Clocks, Clocks]] = [(nothing, nothing)] * ranks
        self._thread = [rank * (1 + PROGRAMS) for rank in range(ranks)]
        self._posted: list[tuple[tuple[Any, Clocks, Clocks], ...]] = [()] * ranks
        self.under_way: list[list[_Store]] = [[] for _ in range(ranks)]
        self.at: list[Operation] = []
        self.eager = True
        self.trace: dict[int | tuple[int, int], str] | None = None

    def copy(self) -> ExploredGpus:
        """Return a copy of the state, for another schedule."""
        new = object.__new__(ExploredGpus)
        new.__dict__.update(self.__dict__)
        for name in _ARRAYS:
            setattr(new, name, getattr(self, name).copy())
        for name in _LISTS:
            setattr(new, name, list(getattr(self, name)))
        new._knowledge = self._knowledge.copy()
        new._covered_at = [dict(covered) for covered in self._covered_at]
        new.under_way = [list(stores) for stores in self.under_way]
        new.make_room()
        return new

    def make_room(self) -> None:
        """Let the arrays grow to hold all cells of the table, and some more."""
        if self._table.count < len(self._data):
            return
        for name in _ARRAYS:
            array = getattr(self, name)
            larger = np.zeros((*array.shape[:-1], self._table.count + _SPARE), array.dtype)
            larger[..., : array.shape[-1]] = array
            setattr(self, name, larger)

    # Steps

    def enabled(self, rank: int, judge: Callable[[Operation, Words], bool]) -> bool:
        """Tell if a rank's next operation can take place.

        Args:
            rank: The rank.
            judge: Tells if a wait is over, from the operation and the values that it would see.
        """
        node = self.at[rank]
        kind = node.kind
        if kind == Kind.WAIT or kind == Kind.WORDS:
            seen = self._data[node.cells]
            # The judge runs a kernel, so its answer is kept with the operation.
            key = seen.tobytes()
            holds = node.known.get(key)
            if holds is None:
                holds = node.known[key] = judge(node, seen)
            return holds
        if kind == Kind.COLLECT:
            return all(len(posted) > node.detail for posted in self._posted)
        return kind not in (Kind.READY, Kind.END)

    def step(self, rank: int) -> None:
        """Do a rank's next operation, and those after it that no other rank can notice."""
        self._do(rank, self.at[rank])
        self.settle(rank)

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
        """Do an operation.

        Returns:
            Its result twice: as bytes, by which the tree tells results apart, and as it is for the
            program. None and None for kinds without a result.
        """
        thread, kind, cells = self._thread[rank], node.kind, node.cells
        if kind == Kind.PUT or kind == Kind.RELAXED:
            assert node.values is not None
            clock, knowledge = self._knowledge.clock[thread], self._knowledge.of(thread, rank)
            # A relaxed signal releases what the last fence has ordered; a plain put releases
            # nothing.
            published = (
                self._fenced[thread] if kind == Kind.RELAXED else None,
                self._knowledge.publish(thread)[1],
            )
            bit = self._own_bit(rank, thread)
            store = _Store(thread, clock, *knowledge, published, cells, node.values, bit, node)
            # Stores to the rank's own memory are never under way.
            if node.detail or self.eager:
                self._arrive(rank, store)
            else:
                self.under_way[rank].append(store)
        elif kind == Kind.LOAD:
            released = self._knowledge.of(thread, rank)[0]
            writers = self._write_thread[cells]
            early = self._write_clock[cells] > released[writers]
            # On few cells any() takes five times as long.
            if np.count_nonzero(early):
                raise early_load(rank, node, self._writer(cells[early]))
            # Remembered for stores: they must come after the last load of each rank.
            self._read_thread[rank, cells] = thread
            self._read_clock[rank, cells] = self._knowledge.clock[thread]
            if self.trace is not None:
                site = f"rank {rank}, {node.site},"
                self.trace.update(((rank, cell), site) for cell in cells.tolist())
            response = self._data[cells].tobytes()
            return response, response
        elif kind == Kind.RELEASE:
            assert node.values is not None
            # Everything that the release covers arrives before the signal does.
            self._order(rank, self._covers_of(rank, thread))
            clock, knowledge = self._knowledge.clock[thread], self._knowledge.of(thread, rank)
            published = self._knowledge.publish(thread)
            self._arrive(
                rank, _Store(thread, clock, *knowledge, published, cells, node.values, 0, node)
            )
        elif kind == Kind.WAIT:
            self._acquire(thread, cells, released=True)
        elif kind == Kind.WORDS:
            self._acquire(thread, cells, released=False)
            response = self._data[cells].tobytes()
            return response, response
        elif kind == Kind.ATOMIC or kind == Kind.PEER_ATOMIC:
            response = self._atomic(rank, thread, node)
            return response, response
        elif kind == Kind.FENCE:
            self._order(rank, self._covers_of(rank, thread))
            self._fenced[thread] = self._knowledge.publish(thread)[0]
        elif kind == Kind.PROGRAM:
            self._begin_program(rank, thread, node.detail)
        elif kind == Kind.RETURN:
            self._end_launch(rank)
        elif kind == Kind.POST:
            self._order(rank, _EVERYTHING)
            self._posted[rank] = (
                *self._posted[rank],
                (node.detail, *self._knowledge.publish(thread)),
            )
        elif kind == Kind.COLLECT:
            parts = [posted[node.detail] for posted in self._posted]
            for _, released, observed in parts:
                self._knowledge.join(thread, released, observed)
            values = [value for value, _, _ in parts]
            return repr(values).encode(), values
        return None, None

    def _follow(self, rank: int, node: Operation, key: bytes | None, response: Any) -> None:
        """Go to the next operation of a rank; let the rank run if that is not known yet."""
        following = node.following.get(key)
        if following is None:
            following = self._extend(self, rank, node, key, response)
            self.make_room()
        self.at[rank] = following

    # Stores

    def _arrive(self, rank: int, store: _Store) -> None:
        """Let a store arrive in memory.

        Raises:
            Violation: the store does not come after another rank's store or load of its cells.
        """
        cells = store.cells
        early = self._write_clock[cells] > store.seen[self._write_thread[cells]]
        is_atomic = store.node.kind in (Kind.ATOMIC, Kind.PEER_ATOMIC)
        # Several ranks may add to a counter, a lock or a histogram, in no order.
        if is_atomic:
            early &= ~self._is_atomic[cells]
        if np.count_nonzero(early):
            raise unordered_stores(rank, store.node, self._writer(cells[early]))
        # Seeing a packed word does not tell that a load is over, so loads need released knowledge.
        # Of the rank's own loads it has all.
        reads = self._read_clock.take(cells, 1)
        early = reads > store.released.take(self._read_thread.take(cells, 1))
        if np.count_nonzero(early):
            reader = int(early.any(1).argmax())
            raise early_store(rank, store.node, self._reader(reader, cells[early[reader]]))
        self._data[cells] = store.values
        self._write_thread[cells] = store.thread
        self._write_clock[cells] = store.clock
        self._is_atomic[cells] = is_atomic
        self._sync[cells] = len(self._published)
        self._published.append(store.published)
        if self.trace is not None:
            self.trace.update(dict.fromkeys(cells.tolist(), f"rank {rank}, {store.node.site}"))

    def _order(self, rank: int, programs: int) -> None:
        """Let all stores arrive that these programs (bits) have made."""
        stores = self.under_way[rank]
        if stores:
            self.under_way[rank] = [store for store in stores if not store.program & programs]
            for store in stores:
                if store.program & programs:
                    self._arrive(rank, store)

    def _own_bit(self, rank: int, thread: int) -> int:
        """Return the bit of a program; all bits for the host."""
        program = thread - self._slices[rank].start - 1
        return 1 << program if program >= 0 else _EVERYTHING

    def _covers_of(self, rank: int, thread: int) -> int:
        """Return the bits of the programs whose stores a release by this program covers."""
        return self._covers[thread] if thread != self._slices[rank].start else _EVERYTHING

    def _atomic(self, rank: int, thread: int, node: Operation) -> bytes:
        """Do an atomic operation and return the values before it, as bytes."""
        function, dtype, acquires, releases = node.detail
        cells, covered = node.cells, self._covered_at[rank]
        first = int(cells[0])
        # A program that sees another's count may signal on its behalf: its release then covers the
        # other program's stores, too (``il.arrive_last``).
        if acquires:
            self._acquire(thread, cells, released=True)
            self._covers[thread] |= covered.get(first, 0)
        before = self._data[cells].tobytes()
        after = function(np.frombuffer(before, dtype)).view(self._data.dtype)
        clock = self._knowledge.clock[thread]
        knowledge = self._knowledge.of(thread, rank)
        released, observed = self._knowledge.publish(thread)
        if releases:
            covered[first] = covered.get(first, 0) | self._covers[thread]
        # A read-modify-write continues a release sequence: whoever acquires its value acquires the
        # knowledge that was released there before, too.
        earlier, _ = self._published[self._sync[first]]
        kept = released if releases else None
        if earlier is not None:
            kept = earlier if kept is None else np.maximum(kept, earlier)
        self._arrive(
            rank, _Store(thread, clock, *knowledge, (kept, observed), cells, after, 0, node)
        )
        return before

    def _acquire(self, thread: int, cells: Cells, *, released: bool) -> None:
        """Take over the knowledge that is published in cells; without ``released``, observe it."""
        for number in {*self._sync[cells].tolist()}:
            ordered, observed = self._published[number]
            self._knowledge.join(thread, ordered if released else None, observed)

    def _begin_program(self, rank: int, thread: int, program: int) -> None:
        """Begin the next program of a launch, with the host's knowledge at the launch."""
        host = self._slices[rank].start
        if thread == host:
            self._launch[rank] = self._knowledge.publish(host)
        new = host + 1 + program % PROGRAMS
        self._knowledge.begin(new, *self._launch[rank])
        self._fenced[new] = None
        self._covers[new] = self._own_bit(rank, new)
        self._launched[rank] = (*self._launched[rank], new)
        self._thread[rank] = new

    def _end_launch(self, rank: int) -> None:
        """End a launch: the host knows all that its programs knew, and orders all their stores."""
        host = self._slices[rank].start
        for thread in self._launched[rank]:
            self._knowledge.join(host, *self._knowledge.publish(thread))
        self._launched[rank], self._thread[rank] = (), host
        self._covered_at[rank].clear()
        self.under_way[rank] = [
            store._replace(program=_EVERYTHING) for store in self.under_way[rank]
        ]

    # Reports

    def _writer(self, cells: Cells) -> str:
        """Name the rank, and with a trace the line, that stored to the first of these cells."""
        if self.trace is None:
            return f"rank {int(self._write_thread[cells[0]]) // (1 + PROGRAMS)}"
        return self.trace.get(int(cells[0]), "nobody")

    def _reader(self, rank: int, cells: Cells) -> str:
        """Name the rank, and with a trace the line, that loaded the first of these cells."""
        return (self.trace or {}).get((rank, int(cells[0])), f"rank {rank}")

    def awaiting(self) -> str:
        """Describe the point at which every rank stands, in one line."""
        lines = []
        for rank, node in enumerate(self.at):
            is_wait = node.kind == Kind.WAIT and node.values is not None
            seen = self._data[node.cells].view(np.int32) if is_wait else None
            lines.append(describe_wait(rank, node, seen))
        return "; ".join(lines)
