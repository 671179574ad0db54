"""Remember the earlier calls of a group, in one place."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from interlace.comm.replay.replays import Replays
from interlace.comm.runtime.streams import Streams
from interlace.errors import WorkspaceError

_MAX_COMPUTED = 4096
_MAX_AGREED = 16384  # kinds of calls; each is some hundred bytes

T = TypeVar("T")

Answers = list[dict[str, Any]]
"""Answers of all ranks in an exchange of named values, in rank order."""


class Recoverable(Protocol):
    """Describe an object that a program keeps, and that ``Group.recover`` must reset."""

    def reset(self) -> None:
        """Forget every epoch that has begun, on every rank."""


class CallCache:
    """Remember what earlier calls of a group have agreed on, computed, made and enqueued.

    Entries of the first seven dictionaries must be equal on all ranks, so ranks forget them in the
    same call. The remaining entries are local: a hit on one rank and a miss on another do no harm.
    Lives of the entries::

        memory       key                               forgotten by
        agreed       operator and arguments            clear; all entries when there are 16384
        families     operator and common arguments     clear; with agreed
        gathered     operator, name, shared arguments  clear
        settled      question                          clear
        measured     what ranks agreed on              clear; with agreed
        largest      operator, what ranks agreed on    clear; all entries when there are 16384
        decisions    what decides a call               clear; all entries when there are 4096;
                                                       with agreed
        computed     arguments of a call               clear; all entries when there are 4096;
                                                       with agreed
        kept         chosen by the operator            clear; the operator, least recent first
        replays      addresses, numbers, settings      clear; growth of a workspace; 256 graphs
        tables       numbers                           least recent beyond 256; the group's end
        recoverable  the object itself                 the object's end

    :meth:`clear` is called by ``Group.release`` and ``Group.recover``, which are collective.
    Workspaces and outputs are memory, not knowledge; they belong to :class:`SymmetricMemory`.

    Attributes:
        agreed: Marks of the calls that :meth:`Agreement.agree` has compared, and rank 0's choices.
        families: What :meth:`Agreement.family` has compared, for calls of all sizes.
        gathered: This rank's values and all answers of :meth:`Agreement.gather`.
        settled: Results of :meth:`Agreement.any_rank` that cannot change any more.
        measured: What ranks have measured together, by what they have agreed on.
        largest: Results of :meth:`Agreement.largest`.
        kept: Objects that operators keep from call to call, such as mapped outputs.
        replays: CUDA graphs of calls that came twice with the same addresses.
        tables: Small tables of numbers on the device.
        recoverable: Objects that the program keeps, and that ``Group.recover`` resets.
    """

    def __init__(self, streams: Streams) -> None:
        """Create an empty cache of calls that run on the device of ``streams``."""
        self.agreed: dict[tuple[Hashable, ...], tuple[int, Any]] = {}
        self.families: dict[tuple[Hashable, ...], Any] = {}
        self._agreements = 0
        self.gathered: dict[tuple[Hashable, ...], tuple[dict[str, Any], Answers]] = {}
        self.settled: dict[str, bool] = {}
        self.measured: dict[tuple[Hashable, ...], Any] = {}
        self.largest: dict[tuple[Hashable, ...], tuple[int, ...]] = {}
        self._decisions: dict[tuple[Hashable, ...], Any] = {}
        self._computed: dict[tuple[Hashable, ...], Any] = {}
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.replays = Replays(streams.device)
        self.tables = DeviceTables(streams, self.replays)
        self.recoverable: weakref.WeakSet[Recoverable] = weakref.WeakSet()

    def once(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """Return the result of ``make()``, which is called once per ``key``.

        The key may hold values that only this rank knows, and entries are evicted, so ``make`` may
        exchange nothing except by :meth:`Agreement.agree`, whose arguments ``key`` must determine.
        """
        if key not in self._computed:
            # All entries go at once: an order of use would cost every look-up.
            if len(self._computed) >= _MAX_COMPUTED:
                self._computed.clear()
            self._computed[key] = make()
        result: T = self._computed[key]
        return result

    def decided(self, key: tuple[Hashable, ...], decide: Callable[[], T]) -> T:
        """Return the result of ``decide()``, which is called once per ``key``, for what ranks go by
        that may change in a call, as memory is missing or times were measured.

        Whether a key is new must be the same on all ranks: all of them forget in the same call,
        with the calls that are remembered, which would pass this over.
        """
        if key not in self._decisions:
            if len(self._decisions) >= _MAX_COMPUTED:
                self._decisions.clear()
                self.replays.forget()
            self._decisions[key] = decide()
        result: T = self._decisions[key]
        return result

    def count_agreement(self) -> int:
        """Return the number of agreements before this one, of which ranks have made as many.

        Once there are too many, all are forgotten, on every rank in the same agreement; and so is
        what a rank has made of them, as it would not agree again where its peers do.
        """
        if len(self.agreed) + len(self.families) >= _MAX_AGREED:
            self.agreed.clear()
            self.families.clear()
            self.measured.clear()
            self._decisions.clear()
            self._computed.clear()
            self.replays.forget()
        number, self._agreements = self._agreements, self._agreements + 1
        return number

    def keep_largest(self, key: tuple[Hashable, ...], values: tuple[int, ...]) -> None:
        """Remember a result of :meth:`Agreement.largest`, which all ranks get at once."""
        if len(self.largest) >= _MAX_AGREED:
            self.largest.clear()
        self.largest[key] = values

    def clear(self) -> None:
        """Forget all entries whose life ends with ``clear``; on every rank at once."""
        # The graphs go first: they may be running, and refer to memory of other entries.
        self.replays.clear()
        self.agreed.clear()
        self.families.clear()
        self._agreements = 0
        self.gathered.clear()
        self.settled.clear()
        self.measured.clear()
        self.largest.clear()
        self._decisions.clear()
        self._computed.clear()
        self.kept.clear()


_MAX_RECENT = 256  # tables that a group remembers although nothing else refers to them

Numbers = tuple[tuple[int, ...], ...]


class DeviceTables:
    """Remember the tables of one group by their numbers.

    The numbers may be known to this rank alone: a miss costs a copy to the device and asks no peer.

    Attributes:
        alive: Every table that is still referred to, by ``recent``, by ``captured``, or by a call
            of the group's replays.
        recent: The tables that were requested last.
        captured: The tables that CUDA graphs of the program refer to.
    """

    def __init__(self, streams: Streams, replays: Replays) -> None:
        """Make tables on the device of ``streams``, and tell ``replays`` of every table in use."""
        self._streams, self._replays = streams, replays
        self.alive: weakref.WeakValueDictionary[Numbers, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self.recent: OrderedDict[Numbers, torch.Tensor] = OrderedDict()
        self.captured: dict[Numbers, torch.Tensor] = {}

    def on_device(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return ``rows`` as int64 ``[len(rows), len(rows[0])]`` on the group's device.

        Equal numbers give the same tensor. A table that a CUDA graph of the program refers to is
        kept as long as the group; a table that a call of the group's replays has used is kept as
        long as that call is remembered, since the call may be captured when it comes again.

        Raises:
            WorkspaceError: The numbers are new, and a CUDA graph is being captured.
        """
        key = tuple(map(tuple, rows))
        table = self.recent.get(key)
        capturing = self._streams.capture_id() is not None
        if table is not None:
            self.recent.move_to_end(key)
        else:
            table = self.alive.get(key)
            # A copy from the host's memory cannot be captured: the graph would copy again from
            # memory that is gone by then.
            if table is None and capturing:
                raise WorkspaceError(
                    "an operator must be called once with these tables or splits before it is "
                    "captured in a CUDA graph; got new ones."
                )
            if table is None:
                table = self.alive[key] = self._streams.upload(key)
            self.recent[key] = table
            if len(self.recent) > _MAX_RECENT:
                self.recent.popitem(last=False)
        if capturing and not self._replays.capturing:
            self.captured[key] = table
        self._replays.refer_to(table)
        return table
