"""Carry messages between nodes: torch's point-to-point operations on process groups of our own.

The process groups have communicators of their own, so that messages neither wait for the program's
collectives nor get mixed up with them, and so that they can be aborted without the program's
groups. They are NCCL's on the CUDA backend and Gloo's on the CPU backend, by the same calls.

A communicator carries one exchange after another, and each takes its time to begin and to end,
while the network idles. So there are two *lanes* on a GPU, each with a communicator, and an
exchange on one of them begins while that on the other ends.

Another carrier is a class that has ``lanes``, ``exchange`` and ``abort`` as :class:`Carrier` has
them, and that :class:`interlace.comm.groups.network.Network` takes in its place.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from interlace.comm.host.members import Members
from interlace.comm.runtime.deadlines import ABORT_S, LEAST_CONNECT_S, NEVER
from interlace.errors import BackendError

LANES = 2
"""Number of exchanges that are under way at a time on a GPU."""

CHANNELS = 2
"""Largest number of SMs that NCCL takes for an exchange, each of which moves several GB/s."""


class Message(NamedTuple):
    """Describe one direction of a message.

    Attributes:
        peer: Rank of another node that receives or sends it.
        data: Contiguous tensor of this rank's device that is sent or written.
    """

    peer: int
    data: torch.Tensor


class Waitable(Protocol):
    """Describe a transfer that was enqueued, as torch returns it."""

    def wait(self, timeout: datetime.timedelta = ...) -> bool:
        """Wait on the host (Gloo), or make the current stream wait (NCCL)."""


class Carrier:
    """Send messages to any rank of a group that spans nodes, and receive theirs.

    Messages from one rank to another arrive in the order in which they are sent on a lane. The k-th
    exchange of a rank on a lane must fit the k-th exchange of each of its peers on that lane.

    Attributes:
        lanes: Number of lanes: ``LANES`` on a GPU, 1 on the CPU backend.
    """

    def __init__(self, members: Members, store: dist.Store, deadline_s: float) -> None:
        """Connect to the ranks of all other nodes. Collective.

        Args:
            members: The group, which spans nodes.
            store: A store of the group under a prefix that was never used.
            deadline_s: Seconds in which Gloo must have connected; NCCL has a minute, or these.

        Raises:
            RuntimeError: A peer did not come in time.
        """
        self._on_gpu, self._device = members.backend == "cuda", members.device
        self.lanes = LANES if self._on_gpu else 1
        deadline = datetime.timedelta(seconds=deadline_s)
        self._backends: list[Any] = []
        self._process_groups: list[dist.ProcessGroup] = []
        for lane in range(self.lanes):
            self._add_lane(members, dist.PrefixStore(f"lane {lane}", store), deadline)
        peers = [peer for peer in range(members.world_size) if peer != members.rank]
        if self._on_gpu:
            # NCCL waits for its peers in the host's code, for as long as they take.
            def greet() -> None:
                with torch.cuda.device(self._device):  # a new thread has the first one
                    self._greet(peers, deadline)

            run_within(max(deadline_s, LEAST_CONNECT_S), greet, "NCCL between nodes")
        else:
            self._greet(peers, deadline)

    def _add_lane(self, members: Members, store: dist.Store, deadline: datetime.timedelta) -> None:
        """Make the backend of a lane, and the process group that calls it."""
        rank, ranks, kind = members.rank, members.world_size, dist.ProcessGroup.BackendType
        process_group = dist.ProcessGroup(store, rank, ranks)
        backend: Any
        if self._on_gpu:
            backend, backend_type = _nccl(store, rank, ranks), kind.NCCL
        else:  # on the interfaces of GLOO_SOCKET_IFNAME
            backend = dist.ProcessGroupGloo(store, rank, ranks, timeout=deadline)
            backend_type = kind.GLOO
        process_group._set_default_backend(backend_type)
        backend._set_sequence_number_for_group()
        process_group._register_backend(torch.device(self._device.type), backend_type, backend)
        self._backends.append(backend)
        self._process_groups.append(process_group)

    def _greet(self, peers: Sequence[int], deadline: datetime.timedelta) -> None:
        """Send each peer one message on every lane and wait for its own.

        NCCL makes a connection with the first message, and would make it beside a kernel that
        leaves it no SM (NVIDIA/nccl#2031).
        """
        sent = torch.zeros(16, dtype=torch.uint8, device=self._device)
        received = [torch.empty_like(sent) for _ in peers]
        for lane in range(self.lanes):
            works = self.exchange(
                [Message(peer, sent) for peer in peers],
                [Message(peer, data) for peer, data in zip(peers, received, strict=True)],
                lane=lane,
            )
            for _, work in works:
                if self._on_gpu:
                    work.wait()
                else:
                    work.wait(deadline)
            if self._on_gpu:
                torch.cuda.synchronize(self._device)

    def exchange(
        self,
        departures: Sequence[Message],
        arrivals: Sequence[Message],
        tag: int = 0,
        lane: int = 0,
    ) -> list[tuple[int, Waitable]]:
        """Begin to send and to receive, all messages at once; on the current stream of a GPU.

        Args:
            departures: Messages that leave.
            arrivals: Messages that are awaited; from one peer, in the order in which it sends them.
            tag: Number that sender and receiver must have in common (Gloo only; NCCL has none).
            lane: Lane that carries them.

        Returns:
            Each awaited transfer with its peer. NCCL has one for all of them, of peer -1.
        """
        group = self._process_groups[lane]
        works: list[tuple[int, Waitable]] = []
        if self._on_gpu:
            # One group of NCCL: a send and the matching receive never wait for each other's rank.
            group._start_coalescing(self._device)
        for message in arrivals:
            works.append((message.peer, group.recv([message.data], message.peer, tag)))
        for message in departures:
            works.append((message.peer, group.send([message.data], message.peer, tag)))
        if self._on_gpu:
            return [(-1, group._end_coalescing(self._device))]
        return works

    def abort(self) -> None:
        """End all transfers, whatever the peers do; this carrier carries nothing afterwards.

        NCCL's kernels end at once, but a communicator lives until no CUDA graph has its kernels. If
        the program keeps such a graph, the communicator is left behind, to end with it.
        """
        # Gloo's connections end with the objects; a transfer that is waited for has ended by its
        # deadline.
        if self._on_gpu:
            # When the process ends, no thread can begin any more, and torch itself ends its
            # backends.
            with contextlib.suppress(RuntimeError):
                _end_within(
                    ABORT_S, [backend.abort for backend in self._backends], "interlace aborting"
                )


def run_within(seconds: float, function: Callable[[], None], connection: str) -> None:
    """Run a function that connects to peers, and that may never return if one does not come.

    Args:
        seconds: Seconds after which it is given up; the thread that runs it is left behind.
        function: What to run.
        connection: Name of what it connects, for the error.

    Raises:
        RuntimeError: The time is over; or whatever the function raises.
    """
    if not _end_within(seconds, [function], "interlace connecting"):
        raise RuntimeError(
            f"{connection} must be connected within {seconds:g} s; a rank is late or dead, or its "
            "network is not reached. NCCL_DEBUG=INFO says what NCCL does."
        )


def _end_within(seconds: float, functions: Sequence[Callable[[], object]], name: str) -> bool:
    """Run functions in a thread each; return whether all end in time, or raise what one raises.

    Raises:
        RuntimeError: The process ends, so that no thread can begin.
    """
    failures: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(function,), name=name, daemon=True)
        for function in functions
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        return False
    if failures:
        raise failures[0]
    return True


def _nccl(store: dist.Store, rank: int, ranks: int) -> Any:
    """Return a backend of NCCL that takes few SMs, and takes them before other kernels.

    Raises:
        BackendError: torch was built without NCCL.
    """
    if not dist.is_nccl_available():
        raise BackendError(
            "messages between nodes must have NCCL on GPUs; this torch was built without it."
        )
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = NEVER
    options.config.max_ctas = CHANNELS
    return dist.ProcessGroupNCCL(store, rank, ranks, options)
