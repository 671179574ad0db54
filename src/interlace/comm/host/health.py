"""Watch over a group: its deadline, the record of its first failure, and its running calls."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from interlace.comm.cpu import cpu_faults
from interlace.comm.host import flight_recorder
from interlace.comm.host.members import Members
from interlace.comm.replay.memory import call_when_gone, releases
from interlace.comm.replay.replays import Replays
from interlace.comm.runtime import context as ctx
from interlace.comm.runtime.conditions import Condition, returns
from interlace.comm.runtime.deadlines import EXPLANATION_S, checked_deadline_s, default_deadline_s
from interlace.comm.runtime.interpreter import require
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.comm.runtime.streams import Streams, launches
from interlace.errors import (
    GroupError,
    InterlaceError,
    MiscountError,
    PeerTimeoutError,
    WorkspaceError,
)
from interlace.units import NS_PER_S

_STATE_LENGTH = 64
_SCRATCH_OFFSET_BYTES = 128


class Health:
    """Watch over the calls of one group: deadlines, failures, and interruptions.

    Kernels and the host write the first failure into a record in host memory. Every call looks at
    the record before it starts, so a failure of a kernel is raised by the next call.

    Contexts of operators are made once and live as long as the group, since captured graphs refer
    to them; neither ``Group.release`` nor ``Group.recover`` forgets them.

    Attributes:
        lost_store: Whether the process group's store was gone when the host used it.
    """

    def __init__(
        self, members: Members, streams: Streams, replays: Replays, traffic: cpu_faults.Traffic
    ) -> None:
        """Create the record of a group in which nothing has failed.

        Args:
            members: The group.
            streams: Streams of its device, whose calls are ordered.
            replays: Graphs of the group; calls that are captured for them are not ordered.
            traffic: Counts what kernels send on the CPU backend.

        Raises:
            ArgumentError: ``INTERLACE_DEADLINE_S`` is not a number above 0 and below a million.
        """
        self._members, self._streams, self._replays = members, streams, replays
        self._traffic = traffic
        self._deadline_s = default_deadline_s()
        # By their number in the record: name, and the ranks that its kernels number from 0; none if
        # those are all ranks.
        self._operators: list[tuple[str, tuple[int, ...]]] = []
        self._contexts: dict[str, torch.Tensor] = {}
        self._interruption, self.lost_store = "", False
        self._first_late: weakref.WeakMethod[Callable[[int], int]] | None = None
        self._traced: int | None = None
        self._explained = threading.Event()
        self._explained.set()
        on_gpu = members.backend == "cuda"
        self._record = torch.zeros(ctx.RECORD_LENGTH, dtype=torch.int32, pin_memory=on_gpu)
        self._record_view = self._record.numpy()
        # The flag that waits look at, and the word that fences write, have a cache line each.
        self._state = torch.zeros(_STATE_LENGTH, dtype=torch.int32, device=members.device)
        # Kernels that are running when the group goes still use these.
        held = [self._record, self._state, self._contexts]
        call_when_gone(self, members.device, held.clear)

    # Deadline and kernels' context

    @property
    def deadline_s(self) -> float:
        """Return the number of seconds that a wait of this group may last."""
        return self._deadline_s

    @deadline_s.setter
    def deadline_s(self, seconds: float) -> None:
        self._deadline_s = checked_deadline_s(seconds)
        for fields in self._contexts.values():
            fields[ctx.DEADLINE_NS] = int(self._deadline_s * NS_PER_S)

    def context(self, operator: str, stride: int, ranks: tuple[int, ...] = ()) -> torch.Tensor:
        """Return the ``ctx`` argument of ``operator``'s kernels: int64 ``[context.LENGTH]``.

        Args:
            operator: Name of the operator, which the error of a failed wait will give.
            stride: Bytes between two ranks' copies of a symmetric address.
            ranks: Ranks that the kernels number from 0, this one among them; empty for all ranks.

        Raises:
            WorkspaceError: The operator is new, and a CUDA graph is being captured.
        """
        key = operator if not ranks else f"{operator}, of ranks {ranks}"
        if key not in self._contexts:
            # A copy from the host's memory cannot be part of the graph.
            if self._streams.capturing():
                raise WorkspaceError(
                    f"{operator} must be called once before it is captured in a CUDA graph."
                )
            self._contexts[key] = self._make_context(operator, stride, ranks)
        return self._contexts[key]

    @makes_ordinary_tensors
    def _make_context(self, operator: str, stride: int, ranks: tuple[int, ...]) -> torch.Tensor:
        """Return a new ``ctx`` argument; see :meth:`context`."""
        rank, fields = self._members.rank, [0] * ctx.LENGTH
        fields[ctx.RANK] = ranks.index(rank) if ranks else rank
        fields[ctx.WORLD_SIZE] = len(ranks) or self._members.world_size
        fields[ctx.STRIDE_BYTES] = stride
        fields[ctx.DEADLINE_NS] = int(self._deadline_s * NS_PER_S)
        fields[ctx.OPERATOR] = len(self._operators)
        fields[ctx.BROKEN_ADDRESS] = self._state.data_ptr()
        fields[ctx.RECORD_ADDRESS] = self._record.data_ptr()
        fields[ctx.SCRATCH_ADDRESS] = self._state.data_ptr() + _SCRATCH_OFFSET_BYTES
        self._operators.append((operator, ranks))
        return self._streams.upload(fields)

    def has_made(self, context: torch.Tensor) -> bool:
        """Return whether a tensor is one of this group's contexts."""
        return any(context is made for made in self._contexts.values())

    # Failures

    @property
    def broken(self) -> bool:
        """Return whether a wait expired, a kernel miscounted, or a call was interrupted.

        The results of later calls mean nothing.
        """
        return bool(self._record_view[ctx.RECORD_CODE])

    def condition(self) -> Condition:
        """Return the condition that the group is not broken, where it is not."""
        return returns(self._record_view.item, ctx.RECORD_CODE)

    def check(self) -> None:
        """Raise the error of the first failure, if there was one.

        This looks at host memory only and does not wait for running kernels (see
        :func:`interlace.synchronize`).

        Raises:
            PeerTimeoutError: A wait expired.
            MiscountError: A kernel miscounted.
            GroupError: A call was interrupted on this rank when its kernels might have started.
        """
        record = self._record_view
        code = record[ctx.RECORD_CODE]
        if not code:
            return
        if not self._explained.wait(EXPLANATION_S):
            self._explained.set()
        if code == ctx.INTERRUPTED:
            raise GroupError(
                "a call must not be interrupted once its kernels may run, as ranks then no "
                "longer agree; got "
                f"{self._interruption}. This group is broken now. Call interlace.recover on every "
                "rank."
            )
        piece, expected, seen = (
            int(record[field]) for field in (ctx.RECORD_SLICE, ctx.RECORD_WANTED, ctx.RECORD_SEEN)
        )
        if code == ctx.MISCOUNTED:
            raise MiscountError(rank=self._members.rank, piece=piece, wanted=expected, seen=seen)
        operator, ranks = self._operators[int(record[ctx.RECORD_OPERATOR])]
        peer = int(record[ctx.RECORD_PEER])
        awaited = ranks[peer] if ranks and peer >= 0 else peer
        peer = self._first_late_behind(awaited) if expected else awaited
        error = PeerTimeoutError(
            operator=operator,
            rank=self._members.rank,
            peer=peer,
            through=None if peer == awaited else awaited,
            node=self._members.node_of(peer),
            slice=piece,
            wanted=expected & ctx.EPOCH_MASK,
            seen=seen & ctx.EPOCH_MASK,
            different_call=bool(record[ctx.RECORD_OTHER_CALL]),
            deadline_s=self._deadline_s,
            # A kernel that has waited for the rank needs no store to name it.
            lost_store=not (expected and peer == awaited) and self.lost_store_of(peer),
        )
        flight_recorder.add(error)
        raise error

    def _first_late_behind(self, peer: int) -> int:
        """Return the rank that was late first, given the one that a kernel has waited for."""
        if self._traced is None:
            self._traced = peer
            first_late = None if self._first_late is None else self._first_late()
            if first_late is not None:
                self._traced = first_late(peer)
        return self._traced

    def trace_by(self, first_late: Callable[[int], int]) -> None:
        """Find out by a method who was late first, before an error names the rank that a kernel has
        waited for in vain. It is not kept alive.
        """
        self._first_late = weakref.WeakMethod(first_late)

    def lost_store_of(self, peer: int) -> bool:
        """Return whether ``peer`` is named for no other reason than that the store is gone."""
        return self.lost_store and peer == self._members.store_rank

    def declare_broken(
        self, operator: str, peer: int, slice: int = 0, *, is_explained: bool = True
    ) -> None:
        """Record that a peer did not come to an exchange on the host, or did not send its slices.

        Args:
            operator: Name of the exchange or of the operator.
            peer: Rank that did not come; -1 if that is not known.
            slice: Number of the slice that did not come, from 1; 0 for an exchange on the host.
            is_explained: Whether all is known. If not, :meth:`check` waits for :meth:`explain`, but
                not for long.
        """
        entry = operator, ()
        if entry not in self._operators:
            self._operators.append(entry)
        self._record_view[ctx.RECORD_OPERATOR] = self._operators.index(entry)
        self._record_view[ctx.RECORD_PEER] = peer
        self._record_view[ctx.RECORD_SLICE] = slice
        self._record_view[ctx.RECORD_WANTED] = self._record_view[ctx.RECORD_SEEN] = 0
        if not is_explained:
            self._explained.clear()
        # The code comes last: a thread that sees it finds the rest of the record written.
        self._record_view[ctx.RECORD_CODE] = ctx.LATE
        if is_explained:
            self._explained.set()

    def explain(self, peer: int) -> None:
        """Say which rank did not come in a failure that was declared without that.

        Nothing happens if that is known, or if the group was reset meanwhile.
        """
        if not self._explained.is_set():
            self._record_view[ctx.RECORD_PEER] = peer
            self._explained.set()

    def declare_launches_interrupted(self, error: BaseException) -> None:
        """Record that ``error`` has ended a call behind its first launch.

        A launch that is captured by the program has not run: the graph is lost, and the call with
        it, but no epoch. A launch that may have run has advanced this rank's epochs.
        """
        if self._streams.capture_id() is None:
            self.declare_interrupted("an operator's launches", error)

    def declare_interrupted(self, step: str, error: BaseException) -> None:
        """Record that ``error`` interrupted a step that other ranks may have completed."""
        # A process on its own has no peers to disagree with. The first failure is not replaced.
        if self._members.world_size > 1 and not self.broken:
            text = f": {error}" if str(error) else ""
            self._interruption = f"{type(error).__name__}{text} in {step}"
            self._record_view[ctx.RECORD_CODE] = ctx.INTERRUPTED

    @contextlib.contextmanager
    def indivisible(self, step: str) -> Iterator[None]:
        """Break the group if a step that all ranks take or none is interrupted on this rank.

        Interlace's own errors pass: they are raised on every rank alike, or the group is broken
        already.

        Args:
            step: Name of the step, for the error message.
        """
        try:
            yield
        except InterlaceError:
            raise
        except BaseException as error:
            self.declare_interrupted(step, error)
            raise

    @property
    def broken_address(self) -> int:
        """Return the address of the flag, int32, at which every wait on this device ends."""
        return self._state.data_ptr()

    def reset(self) -> None:
        """Forget the first failure, while no kernel of any rank is running."""
        self._state.zero_()
        self._record.zero_()
        self._interruption, self.lost_store = "", False
        self._traced = None
        self._explained.set()

    # Running calls

    def running(self, check: Callable[[], None]) -> Running:
        """Return the context in which an operator launches its kernels; see ``Group.running``.

        Args:
            check: Raises the error of the first failure. It is called before the launches, and on
                the CPU backend after them as well.
        """
        check()
        if releases:
            releases.empty()
        # What becomes a graph runs in the order of the call that replays it.
        if self._members.backend == "cuda" and not self._replays.capturing:
            self._streams.follow_last_call()
        return Running(self, self._streams, self._traffic, check)


class Launching:
    """Surround the launches of a call that has nothing to wait for and nothing to check.

    This is a class and not a generator, which would cost the host more, as every call enters one.
    """

    __slots__ = ("_health", "_launches_before")

    def __init__(self, health: Health) -> None:
        self._health, self._launches_before = health, launches.value

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and launches.value != self._launches_before:
            self._health.declare_launches_interrupted(error)


class Running(Launching):
    """Surround the launches of one call, on the GPU of its group or in the interpreter."""

    __slots__ = ("_check", "_on_cpu", "_scope")

    def __init__(
        self,
        health: Health,
        streams: Streams,
        traffic: cpu_faults.Traffic,
        check: Callable[[], None],
    ) -> None:
        super().__init__(health)
        self._check, self._on_cpu = check, not streams.on_gpu
        self._scope: contextlib.AbstractContextManager[Any] | None = None
        if self._on_cpu:
            self._scope = _interpreting(traffic)
        elif streams.current_device_differs():
            self._scope = torch.cuda.device(streams.device)

    def __enter__(self) -> None:
        if self._scope is not None:
            self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._scope is not None:
            self._scope.__exit__(kind, error, traceback)
        # In the interpreter the kernels have ended by now.
        if self._on_cpu and error is None:
            self._check()
        super().__exit__(kind, error, traceback)
        if self._on_cpu and error is not None:
            _raise_refusal(error)


def _raise_refusal(error: BaseException) -> None:
    """Raise the error of Interlace that a kernel in the interpreter has ended with, if it has.

    Triton wraps the error of a kernel once for each function that the kernel was in.
    """
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, InterlaceError):
        inner = inner.__cause__
    if inner is not None and inner is not error:
        raise inner from None


@contextlib.contextmanager
def _interpreting(traffic: cpu_faults.Traffic) -> Iterator[None]:
    """Run kernels in Triton's interpreter within the context, and count what they send."""
    require("cpu")
    from interlace.comm.cpu import shortcuts  # imports Triton

    with cpu_faults.counting(traffic), shortcuts.taken():
        yield
