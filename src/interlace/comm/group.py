"""A process group as the operators see it: who is in it, its memory, its state of health."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import datetime
import json
import os
import socket
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from interlace.comm import context as ctx
from interlace.comm import cpu_faults
from interlace.comm.dlpack import bytes_at
from interlace.comm.identity import identity
from interlace.comm.interpreter import require
from interlace.comm.launches import launches
from interlace.comm.memory import Block, Heap, SoloHeap, call_when_gone
from interlace.comm.ordinary import makes_ordinary_tensors
from interlace.comm.outputs import OutputPool
from interlace.comm.releases import releases
from interlace.comm.rendezvous import meet
from interlace.comm.replays import Replays
from interlace.errors import (
    ArgumentError,
    BackendError,
    GroupError,
    InterlaceError,
    MiscountError,
    PeerTimeoutError,
    RankMismatchError,
    WorkspaceError,
)
from interlace.units import NS_PER_S, next_power_of_2

MAX_PROGRAMS = 4096
"""Programs that one launch of an operator may have: one epoch cell each (see
``interlace.language``).
"""

_DEFAULT_DEADLINE_S = 30.0
_SHARED_GPU_DEADLINE_S = 30.0  # more for each rank of a GPU: their kernels run by time slices
_RECOVERY_DEADLINES = 3  # a rank that has noticed nothing does so one deadline later
_MOST_WORKED_OUT = 4096

T = TypeVar("T")

Answers = list[dict[str, Any]]
"""What every rank said in an exchange of named values, in rank order."""


@dataclasses.dataclass
class Workspace:
    """Symmetric memory that belongs to one operator of one group; see :meth:`Group.workspace`.

    Attributes:
        data: symmetric; two halves of ``half_bytes``, used in turn by the epoch's parity.
        signals: symmetric int32, each written by one rank only: the epoch of its call and the
            call's mark.
        epochs: int32 ``[MAX_PROGRAMS]`` of this rank: the number of the next call, once per
            program.
        side_epochs: the same, for launches that run beside an operator's kernel and may end before
            or after it.
        notes: int32 ``[2]`` of this rank: what an operator's first kernel leaves for what follows
            in the same call.
    """

    data: Block
    half_bytes: int
    signals: Block
    signal_count: int
    epochs: torch.Tensor
    side_epochs: torch.Tensor
    notes: torch.Tensor
    captured: bool = False

    def reset(self, rank: int) -> None:
        """Make this rank's part as new, with no kernel of any rank under way."""
        for block in (self.data, self.signals):
            bytes_at(
                block.address + rank * block.stride,
                (block.nbytes,),
                (1,),
                self.epochs.device,
                block,
            ).zero_()
        self.epochs.fill_(1)
        self.side_epochs.fill_(1)
        self.notes.zero_()


class Recoverable(Protocol):
    """What a program keeps from call to call, and :meth:`Group.recover` must begin anew."""

    def reset(self) -> None:
        """Forget what has begun, on every rank."""


class _StreamOrder:
    """The streams of one GPU, and which of them got a call of any group last.

    Attributes:
        streams: by their handle.
        executed: the stream of the last call that was enqueued to run.
        captured: the stream of the last call that was captured in a CUDA graph.
    """

    def __init__(self) -> None:
        self.streams: dict[int, torch.cuda.Stream] = {}
        self.executed: torch.cuda.Stream | None = None
        self.captured: torch.cuda.Stream | None = None


_stream_orders: dict[int, _StreamOrder] = {}


class Group:
    """One process group on one kind of device.

    Attributes:
        name: the process group's name; ``""`` for a process on its own.
        rank: of this process in the group.
        world_size: ranks in the group.
        device: where this rank's kernels run.
        backend: ``"cuda"`` or ``"cpu"``.
        traffic: what this rank's kernels sent; counted on the CPU backend only.
        outputs: symmetric memory that operators return as tensors.
        replays: what calls that come again have enqueued.
        kept: what operators keep from call to call, until :meth:`release`.
        recoverable: what a program keeps, for :meth:`recover`.
        ranks_per_gpu: how many ranks share a GPU, where that is most; 1 on the CPU backend.
    """

    @makes_ordinary_tensors
    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.device = device
        self.backend = "cuda" if device.type == "cuda" else "cpu"
        self.traffic = cpu_faults.Traffic()
        self._sequence = 0
        self._operators: list[str] = []
        self._contexts: dict[str, torch.Tensor] = {}
        self._agreed: dict[tuple[Hashable, ...], int] = {}
        self._gathered: dict[tuple[Hashable, ...], tuple[dict[str, Any], Answers]] = {}
        self._settled: dict[str, bool] = {}
        self._worked_out: dict[tuple[Hashable, ...], Any] = {}
        self.outputs = OutputPool(self)
        self.replays = Replays(self)
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._workspaces: dict[str, Workspace] = {}
        self._retained: list[Workspace] = []
        self.recoverable: weakref.WeakSet[Recoverable] = weakref.WeakSet()
        self.ranks_per_gpu = 1
        self._side_streams: dict[bool, torch.cuda.Stream] = {}
        self._deadline_s = _default_deadline()
        self._interruption = ""
        if process_group is None:
            self.name, self.rank, self.world_size = "", 0, 1
            self._store: Any = None
        else:
            self.name = process_group.group_name
            self.rank, self.world_size = (
                dist.get_rank(process_group),
                dist.get_world_size(process_group),
            )
            place = f"interlace/{self.name}/{self.world_size}/{self.backend}"
            self._meeting_store = dist.PrefixStore(place, process_group.get_group_store())
            self._meet("joining a group", self._deadline_s)
        if self.backend == "cuda" and device.index is None:
            raise GroupError(
                f"a group's device must have an index; got {device}. Use torch.device('cuda', "
                "local_rank)."
            )
        self._order = _stream_orders.setdefault(
            -1 if device.index is None else device.index, _StreamOrder()
        )
        self._record = torch.zeros(
            ctx.RECORD_LENGTH, dtype=torch.int32, pin_memory=self.backend == "cuda"
        )
        self._record_view = self._record.numpy()
        # One cache line each: the flag that waits look at, and the word that fences write.
        self._state = torch.zeros(64, dtype=torch.int32, device=device)
        # Kernels that are under way when the group goes still use these.
        used = [self._record, self._state, self._contexts, self._workspaces, self._retained]
        call_when_gone(self, device, used.clear)
        self._check_members()
        # Choices of implementations are made by each rank on its own: they must be made by the same
        # code and tables.
        self.compare("joining a group", identity(device))
        self._heap = self._make_heap()

    # Agreement on the host
    #
    # An exchange is collective, so whether one takes place must not depend on what only this rank
    # knows. Whatever is remembered here is remembered under a key that every rank of a right
    # program has alike, and is forgotten by ``release`` and ``recover`` alone, which are
    # collective. docs/architecture.md lists every cache with its key.

    def exchange(self, what: str, value: object, *, deadline_s: float | None = None) -> list[Any]:
        """Every rank's ``value`` (JSON), in rank order. Collective, on the host.

        Args:
            what: Name of the exchange, for errors; it must be the same on every rank.
            value: What this rank contributes.
            deadline_s: Seconds to wait for the slowest rank. Default: the group's deadline. Where
                ranks do work of unbounded length before they meet, such as writing files, give a
                deadline that allows for it.

        Raises:
            PeerTimeoutError: a peer did not join in time; the group is broken then.
            RankMismatchError: on every rank, if ranks came to different exchanges.
        """
        if self.world_size == 1:
            return [value]
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        text = json.dumps([what, value])
        with self.indivisible(what):
            answers = self._exchange(what, text, deadline_s)
        calls = [call for call, _ in answers]
        if len(set(calls)) != 1:
            raise RankMismatchError(
                f"ranks must make the same calls in the same order; got {_by_rank(calls)}. "
                f"Look for a call that depends on the rank."
            )
        return [answer for _, answer in answers]

    def _exchange(self, what: str, text: str, deadline_s: float) -> list[Any]:
        """Every rank's ``text``, which is JSON, read."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        keys = [f"{sequence}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], text)
        try:
            self._store.wait(keys, datetime.timedelta(seconds=deadline_s))
        except (RuntimeError, TimeoutError) as error:  # torch's DistStoreError is a RuntimeError
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            peer = missing[0] if missing else -1
            self._declare_broken(what, peer)
            raise PeerTimeoutError(
                operator=what, rank=self.rank, peer=peer, deadline_s=deadline_s
            ) from error
        answers = [json.loads(self._store.get(key)) for key in keys]
        if sequence > 0:  # everyone has read the exchange before this one
            self._store.delete_key(f"{sequence - 1}/{self.rank}")
        return answers

    @contextlib.contextmanager
    def indivisible(self, what: str) -> Iterator[None]:
        """A step that all ranks take or none: if it is interrupted on this rank, the group is
        broken.

        Interlace's own errors pass: they are raised on every rank alike, or the group is broken
        already.
        """
        try:
            yield
        except InterlaceError:
            raise
        except BaseException as error:
            self._declare_interrupted(what, error)
            raise

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A local step of a collective call: if it fails on one rank, it fails on every rank.
        Collective.

        Without it, a rank that runs out of memory would leave its peers waiting, or let them go on
        with another implementation than its own. What fails between two exchanges of the body must
        be settled within it.

        Args:
            what: What is being done, for errors; the same on every rank.

        Raises:
            ArgumentError, WorkspaceError, BackendError: of the first rank that failed, on every
                rank; the others' message names it. Running out of memory is a WorkspaceError, any
                other foreign error a BackendError.
        """
        failure: InterlaceError | None = None
        try:
            yield
        except (PeerTimeoutError, RankMismatchError):  # of an exchange in the body: on every rank
            raise
        except InterlaceError as error:
            failure = error
        except Exception as error:
            kind = WorkspaceError if isinstance(error, torch.OutOfMemoryError) else BackendError
            failure = kind(f"{what} must succeed; got {type(error).__name__}: {error}")
            failure.__cause__ = error
        answers = self.exchange(
            f"{what} (outcome)", None if failure is None else [type(failure).__name__, str(failure)]
        )
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer is not None:
                told = {"ArgumentError": ArgumentError, "WorkspaceError": WorkspaceError}.get(
                    answer[0], BackendError
                )
                raise told(f"{what} must succeed on every rank; got on rank {rank}: {answer[1]}")

    def agree(self, operator: str, **arguments: Hashable) -> int:
        """Check once per distinct ``arguments`` that every rank calls ``operator`` with the same
        ones.

        The first call with new arguments exchanges them on the host; later ones cost a dictionary
        look-up. Arguments are the same on every rank by contract, so in a right program every rank
        knows them or none does. Ranks that make different calls, each of them agreed on before,
        find out by the deadline: their epochs carry different marks.

        Returns:
            The mark for ``interlace.language.mark``: the same on every rank, another one for each
            of the last 127 calls agreed on.

        Raises:
            RankMismatchError: on every rank, with the arguments that differ.
        """
        key = (operator, *arguments.items())
        mark = self._agreed.get(key)
        if mark is None:
            with self.indivisible(operator):
                self.compare(operator, arguments)
                mark = (1 + len(self._agreed) % 127) << ctx.EPOCH_BITS
                self._agreed[key] = mark
        return mark

    def once(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """What ``make()`` returned when it was first asked for with ``key``: what calls alike need
        not work out again.

        The key may hold what only this rank knows, and entries go when there are too many, so
        ``make`` may exchange nothing but by :meth:`agree`, whose arguments ``key`` must determine.
        """
        if key not in self._worked_out:
            if len(self._worked_out) >= _MOST_WORKED_OUT:
                self._worked_out.clear()
            self._worked_out[key] = make()
        found: T = self._worked_out[key]
        return found

    def gather(
        self,
        operator: str,
        name: str,
        shared: Mapping[str, Hashable],
        own: Mapping[str, Any],
        check: Callable[[Answers], None] | None = None,
    ) -> Answers:
        """Every rank's ``own`` values (JSON), in rank order: what ranks may differ in but must know
        of each other.

        With a name they are exchanged once for each ``operator``, ``name`` and ``shared``, all of
        which are the same on every rank by contract, and then remembered. This rank's own values
        are no part of the key: they may look like those of another call on one rank and not on the
        next, and then some ranks would exchange and others not. Without a name they are exchanged
        in every call, which takes the host a fraction of a millisecond.

        Args:
            operator: Whose call it is, for errors.
            name: Tells calls apart; the same on every rank. ``""``: exchange in every call.
            shared: Values that must be the same on every rank.
            own: Values of this rank. Under one name they must not change.
            check: Looks at the answers before they are remembered; what it raises must depend on
                them alone.

        Raises:
            RankMismatchError: on every rank, if ranks differ in ``name`` or ``shared``.
            ArgumentError: on this rank only, if ``own`` has changed under this name. Nothing was
                sent.
        """
        key = (operator, name, *shared.items())
        known = self._gathered.get(key) if name else None
        if known is not None:
            before, answers = known
            for what, value in own.items():
                if before[what] != value:
                    raise ArgumentError(
                        f"{operator}: calls named {name!r} must always have the same "
                        f"{what.replace('_', ' ')} on this rank; "
                        f"got {value!r}, and {before[what]!r} before. Give other tables another "
                        "name, on every rank."
                    )
            return answers
        with self.indivisible(operator):
            answers = self.exchange(
                f"{operator} (getting to know the ranks)", {"name": name, **shared, **own}
            )
            for what in ("name", *shared):
                _require_same(operator, what, [answer[what] for answer in answers])
            if check is not None:
                check(answers)
            if name:
                self._gathered[key] = dict(own), answers
        return answers

    def any_rank(self, question: str, here: bool, *, final: bool = False) -> bool:
        """Whether ``here`` is true on any rank, in this call or in an earlier one with this
        ``question``.

        True is remembered, by all ranks at once. As long as the answer is False, every call
        exchanges again on every rank: if a rank asked only when its own value changes, it would be
        the only one to come.

        Args:
            question: What is asked; the same on every rank.
            here: This rank's answer.
            final: Remember the answer also if it is False. Whether a call is final must be the same
                on every rank.
        """
        settled = self._settled.get(question)
        if settled is None:
            with self.indivisible(question):
                settled = any(self.exchange(question, here))
                if settled or final:
                    self._settled[question] = settled
        return settled

    def compare(self, operator: str, arguments: Mapping[str, object]) -> None:
        """Exchange ``arguments`` on the host and check that they are the same on every rank.

        Raises:
            RankMismatchError: on every rank, with the arguments that differ.
        """
        answers: Answers = self.exchange(operator, dict(arguments))
        for name in arguments:
            _require_same(operator, name, [answer.get(name) for answer in answers])

    # Memory

    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        """A block of symmetric memory (collective), ``pieces`` times ``nbytes``. Not while a CUDA
        graph is being captured.

        Raises:
            WorkspaceError: on every rank, if the memory does not fit on one.
        """
        if self._capturing():
            raise WorkspaceError(
                "symmetric memory must be allocated before a CUDA graph is captured. "
                "Call the operator once with these shapes first, then capture."
            )
        releases.empty()
        # All ranks have mapped and zeroed the memory when this ends, so anyone may write.
        with self.on_device(), self.together("allocating symmetric memory"):
            return self._heap.allocate(nbytes, pieces)

    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], object]]:
        """Map pieces of symmetric memory once more, one behind the other; see ``Heap.remap``.
        Collective.
        """
        if self._capturing():
            raise WorkspaceError(
                "memory must be mapped before a CUDA graph is captured. Create mapped outputs "
                "first, then capture."
            )
        with self.on_device(), self.together("mapping memory once more"):
            return self._heap.remap(addresses, nbytes)

    @property
    def granularity(self) -> int:
        """Bytes of which pieces for :meth:`remap` must be multiples."""
        return self._heap.granularity

    @property
    def stride(self) -> int:
        """Bytes between two ranks' copies of a symmetric address."""
        return self._heap.stride

    def workspace(self, operator: str, half_bytes: int, signal_count: int = 1) -> Workspace:
        """The memory of ``operator``: allocated once, grown when a call needs more, in agreement on
        all ranks.

        Every rank must ask with the same numbers in the same order, which :meth:`agree` has
        checked. Memory that a captured graph refers to is kept when the workspace grows; the rest
        is freed.

        Raises:
            WorkspaceError: on every rank, if the memory does not fit on one; the workspace is as it
                was.
        """
        old = self._workspaces.get(operator)
        if old is not None and old.half_bytes >= half_bytes and old.signal_count >= signal_count:
            # Those graphs are forgotten when it goes
            old.captured |= self._capturing() and not self.replays.capturing
            return old
        return self._new_workspace(operator, half_bytes, signal_count)

    @makes_ordinary_tensors
    def _new_workspace(self, operator: str, half_bytes: int, signal_count: int) -> Workspace:
        """A workspace of at least these sizes, and of those that it replaces."""
        old = self._workspaces.get(operator)
        if old is not None:
            half_bytes, signal_count = (
                max(half_bytes, old.half_bytes),
                max(signal_count, old.signal_count),
            )
        half_bytes, signal_count = (
            next_power_of_2(max(half_bytes, 4096)),
            next_power_of_2(max(signal_count, 1024)),
        )
        what = f"growing the memory of {operator}"
        with self.indivisible(what):
            data, signals = self.allocate(2 * half_bytes), self.allocate(4 * signal_count)
            with self.together(what):
                new = Workspace(
                    data=data,
                    half_bytes=half_bytes,
                    signals=signals,
                    signal_count=signal_count,
                    epochs=torch.ones(MAX_PROGRAMS, dtype=torch.int32, device=self.device),
                    side_epochs=torch.ones(MAX_PROGRAMS, dtype=torch.int32, device=self.device),
                    notes=torch.zeros(2, dtype=torch.int32, device=self.device),
                )
            self.replays.clear()  # of calls that had the old one
            self._workspaces[operator] = new
            if old is not None and old.captured:
                self._retained.append(old)
        return new

    def workspace_bytes(self) -> dict[str, int]:
        """Symmetric bytes held per operator on this rank."""
        return {name: w.data.nbytes + w.signals.nbytes for name, w in self._workspaces.items()}

    def release(self) -> None:
        """Free all workspaces, and outputs that no tensor refers to.

        Collective: every rank must call it, with no kernel of the group under way. CUDA graphs
        captured before must not be replayed afterwards.
        """
        if self.backend == "cuda":
            torch.cuda.synchronize(self.device)
        self.exchange("release", "idle")  # a peer's kernel may still write here until all are idle
        self._forget()
        releases.empty()

    def _forget(self) -> None:
        """Let go of everything that calls have left, on every rank at once."""
        self.replays.clear()
        self._workspaces.clear()
        self._retained.clear()
        self._agreed.clear()
        self._gathered.clear()
        self._settled.clear()
        self._worked_out.clear()
        self.kept.clear()
        self.outputs.release()

    @makes_ordinary_tensors
    def context(self, operator: str) -> torch.Tensor:
        """The ``ctx`` argument of ``operator``'s kernels: int64 ``[context.LENGTH]`` on the device."""
        if operator not in self._contexts:
            if self._capturing():
                raise WorkspaceError(
                    f"{operator} must be called once before it is captured in a CUDA graph."
                )
            fields = [0] * ctx.LENGTH
            fields[ctx.RANK] = self.rank
            fields[ctx.WORLD_SIZE] = self.world_size
            fields[ctx.STRIDE_BYTES] = self.stride
            fields[ctx.DEADLINE_NS] = int(self._deadline_s * NS_PER_S)
            fields[ctx.OPERATOR] = len(self._operators)
            fields[ctx.BROKEN_ADDRESS] = self._state.data_ptr()
            fields[ctx.RECORD_ADDRESS] = self._record.data_ptr()
            fields[ctx.SCRATCH_ADDRESS] = self._state.data_ptr() + 128
            self._operators.append(operator)
            self._contexts[operator] = torch.tensor(fields, dtype=torch.int64, device=self.device)
        return self._contexts[operator]

    def recover(self, timeout_s: float | None = None) -> None:
        """Make a broken group usable again; see :func:`interlace.recover`."""
        if self._capturing():
            raise WorkspaceError(
                "a group must be recovered outside of a CUDA graph. Finish the capture first."
            )
        if self.backend == "cuda":
            torch.cuda.synchronize(self.device)  # kernels that wait end by their deadline
        if self.world_size > 1:
            # Once all have met, no kernel of any rank is under way that could still write here.
            self._meet(
                "recover",
                _RECOVERY_DEADLINES * self._deadline_s if timeout_s is None else timeout_s,
            )
        self._forget()
        for each in self.recoverable:
            each.reset()
        self._state.zero_()
        self._record.zero_()
        self._interruption = ""
        if self.backend == "cuda":
            torch.cuda.synchronize(self.device)
        self.exchange("recover", "as new")  # nobody may write here before
        releases.empty()

    # Health

    @property
    def deadline_s(self) -> float:
        """Seconds that a wait of this group may last."""
        return self._deadline_s

    @deadline_s.setter
    def deadline_s(self, seconds: float) -> None:
        if not 0 < seconds < 1e6:
            raise ArgumentError(
                f"a deadline must be above 0 and below a million seconds; got {seconds}."
            )
        self._deadline_s = float(seconds)
        for fields in self._contexts.values():
            fields[ctx.DEADLINE_NS] = int(seconds * NS_PER_S)

    @property
    def broken(self) -> bool:
        """Whether a wait has expired, a kernel miscounted, or a call was interrupted. Later results
        mean nothing.
        """
        return bool(self._record_view[ctx.RECORD_CODE])

    def check(self) -> None:
        """Raise the error of the first failure, if there was one.

        Looks at host memory only: it does not wait for kernels under way (see
            :func:`interlace.synchronize`).

        Raises:
            PeerTimeoutError: a wait expired.
            MiscountError: a kernel miscounted.
            GroupError: a call was interrupted on this rank when its kernels might have started.
        """
        record = self._record_view
        if record[ctx.RECORD_CODE] == ctx.INTERRUPTED:
            raise GroupError(
                "a call must not be interrupted once its kernels may run, as ranks then no "
                "longer agree; got "
                f"{self._interruption}. This group is broken now. Call interlace.recover on every "
                "rank."
            )
        if record[ctx.RECORD_CODE] == ctx.MISCOUNTED:
            piece, wanted, seen = (
                int(record[field])
                for field in (ctx.RECORD_SLICE, ctx.RECORD_WANTED, ctx.RECORD_SEEN)
            )
            raise MiscountError(rank=self.rank, piece=piece, wanted=wanted, seen=seen)
        if record[ctx.RECORD_CODE]:
            operator = int(record[ctx.RECORD_OPERATOR])
            wanted, seen = int(record[ctx.RECORD_WANTED]), int(record[ctx.RECORD_SEEN])
            raise PeerTimeoutError(
                operator=self._operators[operator],
                rank=self.rank,
                peer=int(record[ctx.RECORD_PEER]),
                slice=int(record[ctx.RECORD_SLICE]),
                wanted=wanted & ctx.EPOCH_MASK,
                seen=seen & ctx.EPOCH_MASK,
                different_call=wanted != seen and (wanted - seen) & ctx.EPOCH_MASK == 0,
                deadline_s=self._deadline_s,
            )

    def synchronize(self) -> None:
        """Wait until this rank's kernels are done, then :meth:`check`."""
        if self.backend == "cuda":
            torch.cuda.synchronize(self.device)
        self.check()

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Around the launch of an operator's kernels: refuses a broken group, and keeps the calls
        of a GPU in stream order.

        Kernels are launched on the group's GPU, whichever is current. An exception that leaves it
        after something was enqueued breaks the group: the epochs of this rank may not be those of
        its peers any more. On the CPU backend the kernel has ended when this exits, so an expired
        wait raises here.
        """
        self.check()
        if releases:
            releases.empty()
        # What becomes a graph runs in the order of the call that replays it.
        if self.backend == "cuda" and not self.replays.capturing:
            self._follow_last_call()
        return _Running(self)

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the group's GPU the current one."""
        return torch.cuda.device(self.device) if self.elsewhere() else contextlib.nullcontext()

    def elsewhere(self) -> bool:
        """Whether another GPU than the group's is the current one."""
        return self.backend == "cuda" and torch._C._cuda_getDevice() != self.device.index

    def stream(self) -> torch.cuda.Stream:
        """The current stream of the group's GPU: the same object for as long as it is the same
        stream.
        """
        # torch makes a new object in each call, which costs as much as a launch; calls of operators
        # ask many times.
        handle, streams = torch._C._cuda_getCurrentRawStream(self.device.index), self._order.streams
        if handle not in streams:
            streams[handle] = torch.cuda.current_stream(self.device)
        return streams[handle]

    def side_stream(self, first: bool) -> torch.cuda.Stream:
        """A stream for copies beside a kernel, of high priority if ``first``; see
        ``interlace.comm.copies``.
        """
        if first not in self._side_streams:
            self._side_streams[first] = torch.cuda.Stream(self.device, priority=-1 if first else 0)
        return self._side_streams[first]

    # Internals

    def _follow_last_call(self) -> None:
        """Order this call after the last one of any group on this GPU, if that was on another
        stream.

        Two kernels that wait for peers must not overlap: with their order reversed on another rank,
        each could occupy the processors that the other's peer needs. During a capture, only calls
        within the same capture can be ordered; a graph is ordered by where it is replayed.
        """
        stream, order = self.stream(), self._order
        if stream is order.executed:
            return
        capture = self.capture_id()
        if capture is not None:
            for other in (order.executed, order.captured):
                if other is not None and other is not stream and _capture_of(other) == capture:
                    stream.wait_stream(other)
            order.captured = stream
            return
        if order.executed is not None:
            if _capture_of(order.executed) is not None:
                raise WorkspaceError(
                    "calls on one GPU must be ordered; got one while the stream of the last one "
                    "captures a CUDA graph. Finish the capture first."
                )
            stream.wait_stream(order.executed)
        order.executed = stream

    def capture_id(self) -> int | None:
        """Which CUDA graph the current stream of the group's GPU is captured in; None if in none."""
        return _capture_of(self.stream()) if self._capturing() else None

    def _capturing(self) -> bool:
        """Whether the current stream of the group's GPU is being captured in a CUDA graph."""
        if self.backend == "cpu":
            return False
        if self.elsewhere():
            with torch.cuda.device(self.device):
                return torch.cuda.is_current_stream_capturing()
        return torch.cuda.is_current_stream_capturing()

    def _meet(self, what: str, timeout_s: float) -> None:
        """Wait until all ranks are here, and number exchanges anew, under keys that none has used."""
        name = meet(self._meeting_store, what, self.rank, self.world_size, timeout_s)
        self._store, self._sequence = dist.PrefixStore(name, self._meeting_store), 0

    def _declare_broken(self, operator: str, peer: int) -> None:
        if operator not in self._operators:
            self._operators.append(operator)
        self._record_view[ctx.RECORD_OPERATOR] = self._operators.index(operator)
        self._record_view[ctx.RECORD_PEER] = peer
        self._record_view[ctx.RECORD_CODE] = ctx.LATE

    def _declare_interrupted(self, what: str, error: BaseException) -> None:
        if self.world_size > 1 and not self.broken:
            text = f": {error}" if str(error) else ""
            self._interruption = f"{type(error).__name__}{text} in {what}"
            self._record_view[ctx.RECORD_CODE] = ctx.INTERRUPTED

    def _check_members(self) -> None:
        """All members must be on this machine, and on CUDA on GPUs that reach each other, one for
        each of them at best.
        """
        gpu = _gpu_id(self.device) if self.backend == "cuda" else ""
        members = self.exchange("joining a group", [socket.gethostname(), _boot_id(), gpu])
        if len({(host, boot) for host, boot, _ in members}) > 1:
            raise GroupError(
                "all ranks of a group must be on one machine; got "
                f"{_by_rank([host for host, _, _ in members])}. "
                f"Use torch.distributed.new_group to form a group per machine."
            )
        if self.backend == "cuda":
            self._check_gpus([gpu for _, _, gpu in members])

    def _check_gpus(self, gpus: list[str]) -> None:
        """Refuse GPUs that this rank's cannot reach; allow for ranks that share one.

        Args:
            gpus: each rank's, as :func:`_gpu_id` tells them apart.
        """
        here = {_gpu_id(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
        for rank, gpu in enumerate(gpus):
            # Whether a GPU that this process does not see can be reached, the driver says when it
            # maps memory.
            number = here.get(gpu, self.device.index)
            if number != self.device.index and not torch.cuda.can_device_access_peer(
                self.device.index, number
            ):
                raise GroupError(
                    f"GPUs of a group must reach each other's memory; {self.device} cannot reach "
                    f"cuda:{number} of rank {rank}. "
                    f"`interlace doctor` shows the links."
                )
        self.ranks_per_gpu = max(gpus.count(gpu) for gpu in gpus)
        if self.ranks_per_gpu > 1:
            if not os.environ.get("INTERLACE_DEADLINE_S"):
                self._deadline_s = _SHARED_GPU_DEADLINE_S * self.ranks_per_gpu
            if self.rank == 0:
                warnings.warn(
                    f"{self.world_size} ranks share {len(set(gpus))} GPUs by time slices. Results "
                    "are right; times mean nothing.",
                    stacklevel=2,
                )

    def require_own_gpus(self, what: str) -> None:
        """Refuse to measure on GPUs that ranks share.

        Raises:
            BackendError: ranks of the group share a GPU.
        """
        if self.ranks_per_gpu > 1:
            raise BackendError(
                f"{what} must have a GPU for each rank; got {self.ranks_per_gpu} ranks on one. "
                "Times of ranks that share a GPU "
                f"mean nothing; use fewer ranks."
            )

    def _make_heap(self) -> Heap:
        if self.world_size == 1:
            return SoloHeap(self.device)
        if self.backend == "cuda":
            from interlace.comm.memory_cuda import CudaHeap

            return CudaHeap(self, self.device)
        from interlace.comm.memory_cpu import CpuHeap

        return CpuHeap(self)


@contextlib.contextmanager
def _interpreting(traffic: cpu_faults.Traffic) -> Iterator[None]:
    """Run kernels in Triton's interpreter meanwhile, quickly, and count what they send."""
    require("cpu")
    from interlace.comm import shortcuts  # imports Triton

    with cpu_faults.counting(traffic), shortcuts.taken():
        yield


def _capture_of(stream: torch.cuda.Stream) -> int | None:
    """Which CUDA graph a stream is captured in; None if in none."""
    from cuda.bindings import driver

    # Error, status, id; what follows differs between versions.
    _, status, number, *_ = driver.cuStreamGetCaptureInfo(stream.cuda_stream)
    return (
        int(number)
        if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        else None
    )


def _gpu_id(device: torch.device) -> str:
    """What tells a GPU apart from all others; its number depends on what the process sees
    (``CUDA_VISIBLE_DEVICES``).
    """
    return str(torch.cuda.get_device_properties(device).uuid)


class _Running:
    """What :meth:`Group.running` returns: a class rather than a generator, as every call enters
    one.
    """

    __slots__ = ("_before", "_group", "_scope")

    def __init__(self, group: Group) -> None:
        self._group = group
        self._before = launches.value
        self._scope: contextlib.AbstractContextManager[Any] | None = None
        if group.backend == "cpu":
            self._scope = _interpreting(group.traffic)
        elif group.elsewhere():
            self._scope = torch.cuda.device(group.device)

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
        if error is None:
            if self._group.backend == "cpu":
                self._group.check()
        # What the program captures has not run; the graph is lost, and with it the call, but no
        # epoch.
        elif launches.value != self._before and self._group.capture_id() is None:
            self._group._declare_interrupted("an operator's launches", error)


def _require_same(operator: str, name: str, values: list[Any]) -> None:
    if any(value != values[0] for value in values):
        raise RankMismatchError(
            f"{operator}: {name.replace('_', ' ')} must be the same on every rank; got "
            f"{_by_rank(values)}. Nothing was computed."
        )


def _by_rank(values: list[Any]) -> str:
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _default_deadline() -> float:
    text = os.environ.get("INTERLACE_DEADLINE_S", "")
    try:
        seconds = float(text) if text else _DEFAULT_DEADLINE_S
    except ValueError:
        raise ArgumentError(
            f"INTERLACE_DEADLINE_S must be a number of seconds; got {text!r}."
        ) from None
    if not 0 < seconds < 1e6:
        raise ArgumentError(
            f"INTERLACE_DEADLINE_S must be above 0 and below a million; got {text!r}."
        )
    return seconds


def default_device_type() -> str:
    """``"cuda"`` or ``"cpu"``: what ``INTERLACE_BACKEND`` says, else whether there is a GPU."""
    choice = os.environ.get("INTERLACE_BACKEND", "auto")
    if choice not in ("auto", "cuda", "cpu"):
        raise BackendError(f"INTERLACE_BACKEND must be auto, cuda or cpu; got {choice!r}.")
    if choice == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return choice


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Group]] = (
    weakref.WeakKeyDictionary()
)
_solo: dict[torch.device, Group] = {}
_standing_in: contextvars.ContextVar[Group | None] = contextvars.ContextVar(
    "_standing_in", default=None
)
_lock = threading.Lock()


def _kind_of(device: torch.device | str | None) -> torch.device:
    """The device of a group for ``device``: a GPU with its number, or the CPU without one."""
    device = torch.device(default_device_type() if device is None else device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cuda", "cpu"):
        raise BackendError(f"a group's device must be cuda or cpu; got {device}.")
    return torch.device("cpu") if device.type == "cpu" else device


def group_of(
    process_group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> Group:
    """The :class:`Group` of a process group (default: the default one; without one, this process on
    its own).

    The first call for a process group and kind of device is collective.

    Args:
        process_group: a group that this rank belongs to.
        device: where the group's kernels run; default: the current CUDA device, or the CPU if there
            is none.

    Raises:
        GroupError: this rank is not a member, or the group cannot be used.
    """
    stand_in = _standing_in.get()
    if process_group is None and stand_in is not None:
        return stand_in
    device = _kind_of(device)
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    _require_member(process_group)
    if process_group is None:
        return solo_group(device)
    with _lock:
        groups = _groups.setdefault(process_group, {})
        if device not in groups:
            groups[device] = Group(process_group, device)
        return groups[device]


def stand_in(group: Group) -> contextvars.Token[Group | None]:
    """Let ``group`` be the default group of this thread from now on: a rank of several that share a
    process.
    """
    return _standing_in.set(group)


def solo_group(device: torch.device) -> Group:
    """This process on its own on ``device``, whatever process groups there are."""
    device = _kind_of(device)
    with _lock:
        if device not in _solo:
            _solo[device] = Group(None, device)
        return _solo[device]


def group_named(name: str, device: torch.device) -> Group:
    """The group of a process group's name, as operators carry it in graphs; ``""`` is the default
    group.
    """
    return group_of(process_group_named(name), device)


def process_group_named(name: str) -> dist.ProcessGroup | None:
    """The process group of a name; None, which stands for the default group, for ``""``."""
    if not name:
        return None
    from torch.distributed.distributed_c10d import _resolve_process_group

    # Str until torch 2.12
    resolve: Callable[[str], dist.ProcessGroup] = _resolve_process_group  # type: ignore[assignment]
    return resolve(name)


def rank_and_size(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in a group (default: the default one) and the group's size; 0 and 1 for a
    process on its own.

    Raises:
        GroupError: this rank is not a member.
    """
    _require_member(process_group)
    if not torch.compiler.is_compiling():  # which cannot look into a context variable
        stand_in = _standing_in.get()
        if process_group is None and stand_in is not None:
            return stand_in.rank, stand_in.world_size
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def set_deadline(seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """Let every wait of ``group`` last at most ``seconds`` from now on, on this rank.

    The default is 30 s, or ``INTERLACE_DEADLINE_S`` from the environment.
    """
    group_of(group).deadline_s = seconds


def synchronize(group: dist.ProcessGroup | None = None) -> None:
    """Wait for this rank's kernels and raise :class:`PeerTimeoutError` if one of their waits
    expired.
    """
    group_of(group).synchronize()


def recover(group: dist.ProcessGroup | None = None, timeout_s: float | None = None) -> None:
    """Make a group that is broken usable again, without ending a process. Collective: every rank of
    the group calls it.

    After a :class:`PeerTimeoutError` or a :class:`MiscountError`, ranks no longer agree on the
    number of their calls. This waits until all ranks are here and none has a kernel under way, and
    then begins anew: epochs, signals, flags, agreements, and the graphs of calls that come again.
    The next call of each kind is as slow as the first one was.

    A rank that has noticed nothing must come, too. It learns of the failure by its next call on the
    group, one deadline later, which is why this waits for three. It may also be called where
    nothing has failed.

    What is lost: results of calls that have failed (NaN), what :meth:`MappedOutput.exchange` and
    ``fuse`` have returned as views, and CUDA graphs that the program has captured with the group,
    which must be captured again and not be replayed. Tensors that operators have returned,
    symmetric tensors, and mapped outputs that every rank has keep working.

    Args:
        group: default: the default process group.
        timeout_s: seconds to wait for the other ranks; default: three deadlines of the group.

    Raises:
        PeerTimeoutError: a rank did not come, within at most twice the time, on every rank that
            did; the error names it. It is dead, or does something else: the group stays broken.
            Without that rank, build a new process group.
        WorkspaceError: a CUDA graph is being captured.
    """
    group_of(group).recover(timeout_s)


def default_name(group: dist.ProcessGroup | None) -> str:
    """The name under which operators carry ``group``; see :func:`group_named`."""
    _require_member(group)
    return "" if group is None else group.group_name


def _require_member(group: dist.ProcessGroup | None) -> None:
    # Torch's GroupMember.NON_GROUP_MEMBER: what new_group returns to the others
    if isinstance(group, int):
        raise GroupError(
            "the calling rank must be a member of the process group; it is not. Call only on "
            "members."
        )


__all__ = [
    "MAX_PROGRAMS",
    "Group",
    "Workspace",
    "default_device_type",
    "default_name",
    "group_named",
    "group_of",
    "process_group_named",
    "rank_and_size",
    "recover",
    "set_deadline",
    "synchronize",
]
