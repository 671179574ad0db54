"""Copy small tables of numbers that kernels read to the device, once per set of numbers."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch

from interlace.comm.replay.replays import Replays
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.comm.runtime.streams import Streams
from interlace.errors import WorkspaceError

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
                table = self.alive[key] = _make(key, self._streams.device)
            self.recent[key] = table
            if len(self.recent) > _MAX_RECENT:
                self.recent.popitem(last=False)
        if capturing and not self._replays.capturing:
            self.captured[key] = table
        self._replays.refer_to(table)
        return table


@makes_ordinary_tensors
def _make(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """Return the numbers as an int64 tensor on ``device``."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)
