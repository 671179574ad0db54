"""The network between explored ranks of several nodes: messages that arrive in order, at any time.

It stands in for :class:`interlace.comm.network.Network`. A message is stored in a slot of its own
in the receiver's simulated memory, and a flag behind it; so what is sent is ordered before what the
receiver does with it, and nothing else is. The k-th message from one rank to another meets the k-th
receive, as with NCCL, which has no tags.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from interlace.comm.slices import Message, SliceThread, has_reached
from interlace.errors import ArgumentError
from interlace.testing.memory import PART_BYTES, process_memory
from interlace.testing.operations import Kind
from interlace.units import next_power_of_2

if TYPE_CHECKING:
    from interlace.testing.ranks import ExploredGroup, Run

_SLOTS = 256  # messages from one rank to another in a run
_SLOT_BYTES = 4096


class ExploredNetwork:
    """What a group of several nodes has for its slices; see the module.

    Attributes:
        carrier: This object, which sends and receives.
        watch: None, as no deadline expires.
    """

    watch = None

    def __init__(self, run: Run, group: ExploredGroup) -> None:
        """Allocate the slots. Collective."""
        self._run, self._rank = run, group.rank
        self._base = run.tree.view.base
        ranks = group.world_size
        self._slots = self._offset(group.allocate(ranks * _SLOTS * _SLOT_BYTES).address)
        self._flags = self._offset(group.allocate(ranks * _SLOTS * 4).address)
        self._sent, self._received = [0] * ranks, [0] * ranks
        self._counters: dict[str, torch.Tensor] = {}
        self.carrier = self

    def _offset(self, address: int) -> int:
        """Return the offset of an address within a rank's memory."""
        return (address - self._base) % PART_BYTES

    def counters(self, operator: str, count: int) -> torch.Tensor:
        """Return int32 counters of ``operator``, at least ``count``."""
        key = f"{operator} {next_power_of_2(count)}"
        return self._counters.setdefault(
            key, torch.zeros(next_power_of_2(count), dtype=torch.int32)
        )

    def close(self) -> None:
        """Do nothing: a run's memory ends with the run."""

    def exchange(
        self, departures: Sequence[Message], arrivals: Sequence[Message], tag: int = 0
    ) -> list[tuple[int, _Arrival]]:
        """Send messages, and return what is to be waited for; see ``Carrier.exchange``.

        Raises:
            ArgumentError: A message is too large, or a rank has sent too many.
        """
        for peer, data in departures:
            flags, slot = self._next(self._sent, peer, peer, self._rank, data.nbytes)
            values = process_memory(data.data_ptr(), data.nbytes)
            grain = self._run.tree.cells.grain
            self._run.send(_steps(slot, data.nbytes, grain), values.view(f"u{grain}"), "network")
            number = np.array([self._sent[peer]], np.int32)
            self._run.send(flags, number, "network release")
        return [(peer, self._arrival(peer, data)) for peer, data in arrivals]

    def _arrival(self, peer: int, data: torch.Tensor) -> _Arrival:
        flags, slot = self._next(self._received, peer, self._rank, peer, data.nbytes)
        return _Arrival(self._run, flags, self._received[peer], slot, data)

    def _next(
        self, counts: list[int], peer: int, receiver: int, sender: int, nbytes: int
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint64]], int]:
        """Count a message; return the address of its flag, as an array, and that of its slot."""
        number = counts[peer]
        counts[peer] += 1
        if nbytes > _SLOT_BYTES or number >= _SLOTS:
            raise ArgumentError(
                f"an explored program must send at most {_SLOTS} messages of {_SLOT_BYTES} bytes "
                f"from one rank to another; got message {number + 1}, of {nbytes} bytes."
            )
        part = self._base + receiver * PART_BYTES
        index = sender * _SLOTS + number
        flag = np.array([part + self._flags + 4 * index], np.uint64)
        return flag, part + self._slots + index * _SLOT_BYTES


class _Arrival:
    """A message that is awaited."""

    def __init__(
        self,
        run: Run,
        flags: np.ndarray[tuple[int], np.dtype[np.uint64]],
        number: int,
        slot: int,
        data: torch.Tensor,
    ) -> None:
        self._run, self._flags, self._number, self._slot = run, flags, number, slot
        self._data = data

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the message, and copy it to where it was awaited."""
        run, nbytes = self._run, self._data.nbytes
        cells = run.tree.cells.cells_at(run.tree.view.offsets_of(self._flags), 4)
        run.perform(Kind.WAIT, cells, np.array([self._number], np.int32))
        grain = run.tree.cells.grain
        values = run.load(_steps(self._slot, nbytes, grain), f"u{grain}")
        process_memory(self._data.data_ptr(), nbytes)[:] = values.view(np.uint8)
        return True


def _steps(address: int, nbytes: int, step: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the addresses of all cells of some memory."""
    return np.uint64(address) + np.arange(0, nbytes, step, dtype=np.uint64)


class InlineSlices(SliceThread):
    """Exchange slices in the rank's own thread, when it joins them: its kernels have ended by then.

    Explored kernels of a rank run one after another, so a real thread would see nothing else.
    """

    def start(self) -> None:
        """Wait for :meth:`join`."""

    def join(self, timeout: float | None = None) -> None:
        """Exchange all slices, unless no kernel has counted.

        Raises:
            ArgumentError: A counter has not reached its value, so its slice would never leave.
        """
        if self.cancelled:
            return
        for step in self.steps:
            for trigger in step.triggers:
                if not has_reached(trigger):
                    raise ArgumentError(
                        "a slice's counter must have reached its value when the kernel has ended; "
                        f"it must be {trigger.value}. The slice would never leave."
                    )
        self.run()
        if self.failure is not None:
            # Nothing fails here but what the explorer raises.
            raise self.failure[2]
