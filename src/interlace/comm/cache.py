"""Remember the earlier calls of a group, in one place."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from interlace.comm.replays import Replays
from interlace.comm.streams import Streams
from interlace.comm.tables import DeviceTables

_MAX_COMPUTED = 4096

T = TypeVar("T")

Answers = list[dict[str, Any]]
"""Answers of all ranks in an exchange of named values, in rank order."""


class Recoverable(Protocol):
    """Describe an object that a program keeps, and that ``Group.recover`` must reset."""

    def reset(self) -> None:
        """Forget every epoch that has begun, on every rank."""


class CallCache:
    """Remember what earlier calls of a group have agreed on, computed, made and enqueued.

    Entries of the first three dictionaries come from exchanges. They must be equal on all ranks,
    so only collective calls forget them. The remaining entries are local: a hit on one rank and a
    miss on another do no harm. Lives of the entries::

        memory       key                               forgotten by
        agreed       operator and arguments            clear
        gathered     operator, name, shared arguments  clear
        settled      question                          clear
        measured     what ranks agreed on              clear
        computed     arguments of a call               clear; all entries when there are 4096
        kept         chosen by the operator            clear; the operator, least recent first
        replays      addresses, numbers, settings      clear; growth of a workspace; 256 graphs
        tables       numbers                           least recent beyond 256; the group's end
        recoverable  the object itself                 the object's end

    :meth:`clear` is called by ``Group.release`` and ``Group.recover``, which are collective.
    Workspaces and outputs are memory, not knowledge; they belong to :class:`SymmetricMemory`.

    Attributes:
        agreed: Marks of the calls that :meth:`Agreement.agree` has compared.
        gathered: This rank's values and all answers of :meth:`Agreement.gather`.
        settled: Results of :meth:`Agreement.any_rank` that cannot change any more.
        measured: What ranks have measured together, by what they have agreed on.
        kept: Objects that operators keep from call to call, such as mapped outputs.
        replays: CUDA graphs of calls that came twice with the same addresses.
        tables: Small tables of numbers on the device.
        recoverable: Objects that the program keeps, and that ``Group.recover`` resets.
    """

    def __init__(self, streams: Streams) -> None:
        """Create an empty cache of calls that run on the device of ``streams``."""
        self.agreed: dict[tuple[Hashable, ...], int] = {}
        self.gathered: dict[tuple[Hashable, ...], tuple[dict[str, Any], Answers]] = {}
        self.settled: dict[str, bool] = {}
        self.measured: dict[tuple[Hashable, ...], Any] = {}
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

    def clear(self) -> None:
        """Forget all entries whose life ends with ``clear``; on every rank at once."""
        # The graphs go first: they may be running, and refer to memory of other entries.
        self.replays.clear()
        self.agreed.clear()
        self.gathered.clear()
        self.settled.clear()
        self.measured.clear()
        self._computed.clear()
        self.kept.clear()
