"""The network between explored ranks of several nodes: messages that arrive in order, at any time.

It stands in for :class:`interlace.comm.groups.network.Network`. A message is stored as packed words
in a slot of its own in the receiver's simulated memory: whoever has seen it knows its contents, and
nothing of what else its sender had stored by then, since a slice may leave before that. The k-th
message from one rank to another meets the k-th receive, as with NCCL, which has no tags.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from interlace.comm.groups.slices import Message, SliceThread, has_reached
from interlace.errors import ArgumentError
from interlace.units import ceil_div, next_power_of_2
from interlace_explorer.memory import PART_BYTES, Addresses, process_memory
from interlace_explorer.operations import Kind

if TYPE_CHECKING:
    from interlace_explorer.ranks import ExploredGroup, RankRun

_SLOTS = 256  # messages from one rank to another in a run
_SLOT_WORDS = 1024  # of four bytes of a message each


class ExploredNetwork:
    """The network of an explored group of several nodes; see the module.

    Attributes:
        carrier: This object, which sends and receives.
        lanes: 1, as on the CPU backend.
        watch: None, as no deadline expires.
    """

    lanes = 1
    watch = None

    def __init__(self, run: RankRun, group: ExploredGroup) -> None:
        """Allocate the slots. Collective."""
        self._run, self._rank = run, group.rank
        self._base = run.tree.view.base
        ranks = group.world_size
        address = group.allocate(ranks * _SLOTS * _SLOT_WORDS * 8).address
        self._slots = (address - self._base) % PART_BYTES
        self._sent, self._received = [0] * ranks, [0] * ranks
        self._counters: dict[str, torch.Tensor] = {}
        self.carrier = self

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
            addresses, number = self._next(self._sent, peer, peer, self._rank, data.nbytes)
            values = np.zeros(len(addresses) * 4, np.uint8)
            values[: data.nbytes] = process_memory(data.data_ptr(), data.nbytes)
            words = (values.view(np.uint32).astype(np.uint64) << np.uint64(32)) | np.uint64(number)
            self._run.send(addresses, words, "network")
        return [
            (
                peer,
                _Arrival(
                    self._run,
                    *self._next(self._received, peer, self._rank, peer, data.nbytes),
                    data,
                ),
            )
            for peer, data in arrivals
        ]

    def _next(
        self, counts: list[int], peer: int, receiver: int, sender: int, nbytes: int
    ) -> tuple[Addresses, int]:
        """Count a message; return the addresses of its words, and its number, from 1."""
        index = sender * _SLOTS + counts[peer]
        counts[peer] += 1
        words = ceil_div(nbytes, 4)
        if words > _SLOT_WORDS or counts[peer] > _SLOTS:
            raise ArgumentError(
                f"an explored program must send at most {_SLOTS} messages of {4 * _SLOT_WORDS} "
                f"bytes from one rank to another; got message {counts[peer]}, of {nbytes} bytes."
            )
        slot = self._base + receiver * PART_BYTES + self._slots + index * _SLOT_WORDS * 8
        return np.uint64(slot) + np.arange(0, 8 * words, 8, dtype=np.uint64), counts[peer]


class _Arrival:
    """A message that is awaited."""

    def __init__(self, run: RankRun, addresses: Addresses, number: int, data: torch.Tensor) -> None:
        self._run, self._addresses, self._number, self._data = run, addresses, number, data

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the message, and copy it to where it was awaited."""
        tree, nbytes = self._run.tree, self._data.nbytes
        cells = tree.cells.cells_at(tree.view.offsets_of(self._addresses), 8)
        numbers = np.full(len(self._addresses), self._number, np.int32)
        words = np.frombuffer(self._run.perform(Kind.WORDS, cells, numbers, (1, 8)), np.uint64)
        values = (words >> np.uint64(32)).astype(np.uint32).view(np.uint8)
        process_memory(self._data.data_ptr(), nbytes)[:] = values[:nbytes]
        return True


class InlineSlices(SliceThread):
    """Exchange slices in the rank's own thread, when it waits for them: its kernels have ended by
    then.

    Explored kernels of a rank run one after another, so a real thread would see nothing else.
    """

    _ended = 0
    """Number of steps that have ended."""

    def start(self) -> None:
        """Wait for :meth:`await_step` and :meth:`join`."""

    def await_step(self, number: int) -> None:
        """Exchange the slices of all steps up to this one.

        Raises:
            AssertionError: A counter has not reached its value, so its slice would never leave.
        """
        for index in range(self._ended, number + 1):
            step = self.steps[index]
            for trigger in step.triggers:
                if not has_reached(trigger):
                    raise AssertionError(
                        "a slice's counter must have reached its value when the kernel has ended; "
                        f"it must be {trigger.value}. The slice would never leave."
                    )
            self.exchange(index, step)
            if self.failure is not None:
                # Nothing fails here but what the explorer raises.
                raise self.failure[2]
            self._ended = index + 1

    def join(self, timeout: float | None = None) -> None:
        """Exchange all slices, unless no kernel has counted."""
        if not self.cancelled:
            self.await_step(len(self.steps) - 1)
