"""Remember the earlier calls of a group, in one place."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from interlace.comm.replay.replays import Replays
from interlace.comm.replay.tables import DeviceTables
from interlace.comm.runtime.streams import Streams

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

    Entries of the first four dictionaries come from exchanges. They must be equal on all ranks,
    so only collective calls forget them. The remaining entries are local: a hit on one rank and a
    miss on another do no harm. Lives of the entries::

        memory       key                               forgotten by
        agreed       operator and arguments            clear; all entries when there are 16384
        families     operator and common arguments     clear; with agreed
        gathered     operator, name, shared arguments  clear
        settled      question                          clear
        measured     what ranks agreed on              clear; with agreed
        largest      operator, what ranks agreed on    clear; all entries when there are 16384
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

    def count_agreement(self) -> int:
        """Return the number of agreements before this one, of which ranks have made as many.

        Once there are too many, all are forgotten, on every rank in the same agreement; and so is
        what a rank has made of them, as it would not agree again where its peers do.
        """
        if len(self.agreed) + len(self.families) >= _MAX_AGREED:
            self.agreed.clear()
            self.families.clear()
            self.measured.clear()
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
        self._computed.clear()
        self.kept.clear()
