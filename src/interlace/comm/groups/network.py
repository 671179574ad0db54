"""Carry a group's slices between nodes: a carrier, counters, and a watch on a GPU."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import torch

from interlace.comm.groups.carrier import Carrier
from interlace.comm.host.channel import HostChannel
from interlace.comm.host.health import Health
from interlace.comm.host.members import Members
from interlace.comm.replay.memory import call_when_gone
from interlace.comm.replay.replays import Replays
from interlace.comm.runtime.deadlines import KERNELS_ABORT_S, watch_pause_s
from interlace.comm.runtime.dlpack import tensor_at
from interlace.comm.runtime.driver import Write, writer
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.units import next_power_of_2

_RELEASED = 2**31 - 1  # a counter's value that no wait is above


class Network:
    """Hold what slices of one group need, from the first of them to :meth:`close`.

    Attributes:
        carrier: Sends and receives messages.
        watch: Ends transfers that are late on a GPU; None on the CPU backend.
    """

    def __init__(
        self,
        members: Members,
        health: Health,
        channel: HostChannel,
        replays: Replays,
    ) -> None:
        """Connect to the ranks of other nodes. Collective.

        Args:
            replays: The group's graphs, which may hold exchanges.
        """
        self._device = members.device
        self._counters: dict[str, torch.Tensor] = {}
        self.carrier = Carrier(members, channel.new_store("slices"), health.deadline_s)
        self.watch: Watch | None = None
        if members.backend == "cuda":
            self.watch = Watch(members, health, channel, self)
        end = functools.partial(_end, replays, self.carrier)
        self._finalizer = call_when_gone(self, self._device, end, at_exit=True)

    @makes_ordinary_tensors
    def counters(self, operator: str, count: int) -> torch.Tensor:
        """Return int32 counters of ``operator``, at least ``count``; their content is undefined.

        They live as long as the network, as captured graphs refer to them.
        """
        key = f"{operator} {next_power_of_2(count)}"
        if key not in self._counters:
            size = next_power_of_2(count)
            self._counters[key] = torch.zeros(size, dtype=torch.int32, device=self._device)
        return self._counters[key]

    def counter_addresses(self) -> list[int]:
        """Return the addresses of all counters."""
        return [
            counters.data_ptr() + 4 * i
            for counters in list(self._counters.values())
            for i in range(counters.numel())
        ]

    def close(self) -> None:
        """End all transfers; on every rank at once, with no kernel of the group running."""
        self._finalizer.detach()
        if self.watch is not None:
            self.watch.stop()
        self.carrier.abort()


def _end(replays: Replays, carrier: Carrier) -> None:
    """End the transfers of a network that is gone, or of a process that ends."""
    # NCCL keeps a communicator for as long as a graph has its kernels.
    replays.clear()
    carrier.abort()


class Watch:
    """Find out that slices are late on a GPU, whose streams wait without a deadline.

    Each call writes the number of calls into the host's memory when it begins, and the next number
    when all its slices have arrived; kernels do both, so replays of a CUDA graph do it as well. A
    thread looks at the two numbers: they are equal while a call is under way. If they stay so for
    longer than the deadline, it breaks the group, aborts the carrier, and releases the streams that
    wait for counters. Received data are not valid then, and results become NaN.

    Attributes:
        operator: Name of the operator whose slices are under way, for errors.
    """

    @makes_ordinary_tensors
    def __init__(
        self,
        members: Members,
        health: Health,
        channel: HostChannel,
        network: Network,
    ) -> None:
        self._members, self._health, self._channel = members, health, channel
        self._network = weakref.proxy(network)
        self.operator = ""
        self._calls = torch.zeros(1, dtype=torch.int32, device=members.device)
        # The words differ until the first call begins: equal ones mean that a call is under way.
        words = torch.tensor([-1, 0], dtype=torch.int32).pin_memory()
        self._view = words.numpy()
        # Kernels write to the host's memory: a copy engine takes 15 us to begin behind a kernel.
        self._words = tensor_at(words.data_ptr(), (2,), torch.int32, members.device, words)
        self._seen, self._since = -2, 0.0
        self._stopped = threading.Event()
        target = weakref.WeakMethod(self._look)
        threading.Thread(
            target=_watch, args=(target, self._stopped), name="interlace watch", daemon=True
        ).start()

    def begin(self, operator: str) -> None:
        """Enqueue the beginning of a call on the current stream."""
        self.operator = operator
        self._write(0)

    def end(self) -> None:
        """Enqueue the end of the call, after the current stream has waited for all slices."""
        # The device counts, so that replays of a CUDA graph do as well.
        self._calls.add_(1)
        self._write(1)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _write(self, word: int) -> None:
        """Enqueue a kernel that writes the number of calls into the host's memory."""
        torch.add(self._calls, 0, out=self._words[word : word + 1])

    def _look(self) -> float:
        """Give up if a call is late; return the seconds until the next look."""
        deadline_s, now = self._health.deadline_s, time.monotonic()
        begun, ended = map(int, self._view)
        if begun != ended or begun != self._seen:
            self._seen, self._since = (begun if begun == ended else -2), now
        # Where a kernel has waited in vain, the deadline is over already.
        elif self._health.broken or now - self._since > deadline_s:
            self._give_up()
            self._stopped.set()
        return watch_pause_s(deadline_s)

    def _give_up(self) -> None:
        """Break the group, release every stream that waits, and find out meanwhile who is late.

        What explains the failure may fail itself, or never end, as it asks the store, which may be
        gone with the rank that is late. So it neither delays nor stops what releases.
        """
        try:
            if not self._health.broken:
                # Which slice did not come is not known here: the streams have not got that far.
                self._health.declare_broken(self.operator, -1, 1, is_explained=False)
                explaining = threading.Thread(
                    target=self._explain, name="interlace explaining", daemon=True
                )
                explaining.start()
        finally:
            self._release()

    def _explain(self) -> None:
        """Say which rank is late: all others have given up as well, and say so."""
        late = -1
        try:
            late = self._channel.first_not_waiting()
        finally:
            self._health.explain(late)

    def _release(self) -> None:
        """Release every stream that waits; a step that fails stops none of the others.

        Raises:
            Exception: The first error, once all has been tried.
        """
        failures: list[Exception] = []

        @contextlib.contextmanager
        def trying() -> Iterator[None]:
            try:
                yield
            except ReferenceError:  # the network is gone, and so is what waits for it
                pass
            except Exception as error:
                failures.append(error)

        with contextlib.ExitStack() as resources:
            write: Write | None = None
            # The streams that wait, and those that wait for them, may block all queues to the
            # device.
            with trying():
                write = resources.enter_context(writer(self._members.device))
                # The flag comes first: kernels that run once the streams go on must find the group
                # broken, and make their results NaN.
                write(self._health.broken_address, _RELEASED)
            aborting: threading.Thread | None = None
            # The carrier is aborted before the streams that wait for counters go on, so that no
            # slice leaves that is not complete. Its abort may wait for these streams in turn.
            with trying():
                aborting = threading.Thread(target=self._network.carrier.abort, daemon=True)
                aborting.start()
                time.sleep(KERNELS_ABORT_S)
            addresses: list[int] = []
            with trying():
                addresses = self._network.counter_addresses()
            for address in addresses if write is not None else ():
                with trying():
                    write(address, _RELEASED)
            with trying():
                if aborting is not None:
                    aborting.join()
        if failures:
            raise failures[0]


def _watch(look: weakref.WeakMethod[Callable[[], float]], stopped: threading.Event) -> None:
    """Look again and again, until the watch is stopped or gone."""
    pause_s = 0.0
    while not stopped.wait(pause_s):
        method = look()
        if method is None:
            return
        pause_s = method()
        del method
