"""Give operators a process group: its identity, and the parts that work for it."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from interlace.comm.cpu.cpu_faults import Traffic
from interlace.comm.groups.machine_rates import (
    measure_unknown,
    measure_unknown_network,
    share_profile,
)
from interlace.comm.groups.network import Network
from interlace.comm.groups.process_groups import (
    default_group,
    device_of_group,
    named_condition,
    note_default_group,
    process_group_named,
    require_alone,
    require_member,
)
from interlace.comm.groups.reservation import Reservation
from interlace.comm.groups.symmetric_memory import MAX_PROGRAMS, SymmetricMemory, Workspace
from interlace.comm.host.agreement import Agreement
from interlace.comm.host.cache import Answers, CallCache
from interlace.comm.host.channel import HostChannel
from interlace.comm.host.health import Health, Launching, Running
from interlace.comm.host.identity import identity, settings
from interlace.comm.host.members import meet_members, members_of
from interlace.comm.replay import recording as recordings
from interlace.comm.replay import tapes
from interlace.comm.replay.deferred import DeferredCall, PerformedCall, addresses
from interlace.comm.replay.memory import releases
from interlace.comm.runtime.deadlines import checked_deadline_s, default_deadline_s, recovery_s
from interlace.comm.runtime.ordinary import in_inductors_run, makes_ordinary_tensors
from interlace.comm.runtime.streams import Streams
from interlace.errors import BackendError, GroupError, WorkspaceError

T = TypeVar("T")


class Group:
    """Represent a process group, with one device per rank; operators reach its parts through it.

    Each part is constructed with the parts above it that it needs, and never with the group.

    Attributes:
        name: Name of the process group; ``""`` for a process on its own.
        device: Device that runs this rank's kernels.
        backend: ``"cuda"`` or ``"cpu"``.
        members: The identity above with rank and size, as all parts know it.
        nodes: Number of nodes that the ranks are on.
        spans_nodes: Whether there are several. Ranks of one node reach each other's memory; a store
            to the memory of a rank of another node faults.
        traffic: Count of what this rank's kernels sent; kept on the CPU backend only.
        streams: Order of calls on the GPU, side streams, and captures.
        cache: Everything that earlier calls have left, with the life of each entry.
        health: Deadline, first failure, and running calls.
        channel: Exchange of values on the host.
        agreement: Comparison of arguments, gathered values, and joint decisions.
        memory: Symmetric memory: the heap, workspaces and outputs.
        replays: CUDA graphs of calls that come again; part of the cache.
        kept: Objects that operators keep until :meth:`release`; part of the cache.
        outputs: Symmetric memory that operators return as tensors; part of the memory.
        once: Method of the cache.
        check, indivisible: Methods of the health.
        allocate, remap, workspace: Methods of the memory.
        on_device, capture_id: Methods of the streams.
    """

    @makes_ordinary_tensors
    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Join a group. Collective.

        Args:
            process_group: A process group that this rank belongs to; None for this process alone.
            device: Device of this rank's kernels; a GPU has an index.

        Raises:
            GroupError: GPUs of one node do not reach each other.
            PeerTimeoutError: A rank did not come.
            RankMismatchError: Ranks have different versions, tuned tables or GPU models.
        """
        # The order of these steps matters: ranks meet when the channel is made, and each later step
        # with an exchange comes at the same point on every rank.
        self.members = members = members_of(process_group, device)
        self.name, self.device, self.backend = members.name, device, members.backend
        self.traffic = Traffic()
        self.streams = Streams(device)
        self.cache = CallCache(self.streams)
        # Attributes and not properties, since every call asks for them.
        self.replays, self.kept = self.cache.replays, self.cache.kept
        self.once = self.cache.once
        self.on_device, self.capture_id = self.streams.on_device, self.streams.capture_id
        self.health = Health(members, self.streams, self.cache.replays, self.traffic)
        self.check, self.indivisible = self.health.check, self.health.indivisible
        store = None if process_group is None else process_group.get_group_store()
        self.channel = HostChannel(members, self.health, store)
        # The method, not the channel's: interlace_explorer overrides it with its own exchange.
        self.agreement = Agreement(members, self.cache, self.health, self.exchange)
        meet_members(members, self.exchange, store)
        self.nodes, self.spans_nodes = members.nodes, members.spans_nodes
        if store is not None:
            self.health.trace_by(self.channel.first_late)
        self.health.deadline_s = default_deadline_s(members.ranks_per_gpu)
        self.agreement.compare("joining a group", settings())
        with self.channel.reaching_store("joining a group"):
            share_profile(members, self.exchange)
        # Each rank chooses by itself, so all must choose by the same code, tables and profiles.
        self.agreement.compare("joining a group", identity(device))
        self.memory = SymmetricMemory(
            self.channel, self.agreement, self.health, self.streams, self.cache.replays
        )
        self.outputs = self.memory.outputs
        self.allocate, self.remap = self.memory.allocate, self.memory.remap
        self.workspace = self.memory.workspace
        self._network: Network | None = None
        measure_unknown(self)
        measure_unknown_network(self)

    # Identity

    @property
    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self.members.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the group."""
        return self.members.world_size

    def require_own_gpus(self, activity: str) -> None:
        """Refuse to measure on GPUs that ranks share.

        Args:
            activity: Name of the measurement, for the error message.

        Raises:
            BackendError: Ranks of the group share a GPU.
        """
        if self.members.ranks_per_gpu > 1:
            raise BackendError(
                f"{activity} must have a GPU for each rank; got {self.members.ranks_per_gpu} ranks "
                "on one. Times of ranks that share a GPU mean nothing; use fewer ranks."
            )

    def require_size(self, operator: str, most: int) -> None:
        """Refuse a group of one node with more ranks than an operator's kernels take.

        A group of several nodes may have any number: its operators need not run those kernels.

        Raises:
            GroupError: The group has more than ``most`` ranks.
        """
        if self.world_size > most and not self.spans_nodes:
            raise GroupError(
                f"{operator}: a group must have at most {most} ranks; got {self.world_size}."
            )

    def require_one_node(self, subject: str) -> None:
        """Refuse a group whose ranks do not all share memory.

        Args:
            subject: What needs shared memory, for the error.

        Raises:
            GroupError: The ranks are on several nodes.
        """
        if self.spans_nodes:
            raise GroupError(
                f"{subject}: ranks of the group must share memory; they are on {self.nodes} nodes "
                f"({', '.join(map(str, self.members.node_of_rank))} by rank). Form a group per "
                "node, by torch.distributed.new_group, and give that one."
            )

    # Agreement

    def exchange(self, label: str, value: object, *, deadline_s: float | None = None) -> list[Any]:
        """Return every rank's ``value``, in rank order; see :meth:`HostChannel.exchange`."""
        return self.channel.exchange(label, value, deadline_s=deadline_s)

    def agree(self, operator: str, **arguments: Hashable) -> int:
        """Check that all ranks make this call, and return its mark; see :meth:`Agreement.agree`."""
        return self.agreement.agree(operator, arguments)[0]

    # Calls that come again

    def perform(self, work: Any, operands: Hashable = None) -> Any:
        """Run a call's work on the current stream, and return the call's result. Collective where
        symmetric memory must grow.

        Args:
            work: A :class:`DeferredCall`; of a call that has run a :class:`PerformedCall`, or just
                its result.
            operands: By what :meth:`recall` finds the call when it comes again; None for nothing.
        """
        if not isinstance(work, DeferredCall):
            return work.result if isinstance(work, PerformedCall) else work
        memory = work.take(self)
        enqueue = work.prepare(*memory)
        with self.running():
            if not self.replays.perform(work, memory, enqueue, operands):
                work.replayed(self, *memory)
        return work.result(*memory)

    def recall(self, operands: Hashable) -> Any:
        """Run a call that has come before with these operands; return its result, or None if there
        is no graph with the memory that the call gets, or something is to be done before it.

        It does what :meth:`perform` does, at the least cost to the host.

        Args:
            operands: By what the call was remembered.
        """
        work = self.replays.remembered(operands)
        if work is None or self.health.broken or not self.may_recall():
            return None
        return self._replay(work, operands)

    def _replay(self, work: DeferredCall, operands: Hashable) -> Any:
        """Replay a remembered call that nothing keeps from it; return its result, or None if there
        is no graph with the memory that the call gets.
        """
        memory = work.take(self)
        with self.launching():
            is_found = self.replays.replay(operands, memory)
        if not is_found:
            return None
        work.replayed(self, *memory)
        return work.result(*memory)

    def recall_form(self, form: Hashable, operands: Hashable, *tensors: torch.Tensor | None) -> Any:
        """Run a call like an earlier one, past what does not differ between them; return its
        result, or None where there is no such call, or something is to be done before it.

        Args:
            form: What the calls have in common; see :meth:`Replays.remember_form`.
            operands: By what :meth:`recall` is to find this one when it comes again; None for
                nothing.
            tensors: The operands.
        """
        again = self.replays.alike(form)
        if again is None or self.health.broken or not self.may_recall():
            return None
        return again(self, operands, *tensors)

    def recall_known(self, known: tuple[Hashable, Hashable], *tensors: torch.Tensor | None) -> Any:
        """Run a call that has come before, or else one like an earlier one; return its result, or
        None if it must take the long way.

        Args:
            known: The call's form, and what tells it from the others of that form; both are for
                :meth:`recall`, and the form for :meth:`recall_form`.
            tensors: The operands.
        """
        recorder = tapes.recorder()
        if recorder is not None:
            return self._recall_recorded(recorder, known, *tensors)
        result = self.recall(known)
        return self.recall_form(known[0], known, *tensors) if result is None else result

    def _recall_recorded(
        self,
        recorder: tapes.CallRecorder,
        known: tuple[Hashable, Hashable],
        *tensors: torch.Tensor | None,
    ) -> Any:
        """Run a call that is being recorded, by the steps of its form, which cost the host least;
        where calls of that form have turned out to be no recording, by its graph as one step.
        Return None where something is to be done before it, which no tape does.
        """
        if self.health.broken or not self.may_recall():
            return None
        form, where = known
        replay = self.replays.graphs_of(form)
        if replay is not None and where == addresses(*tensors):
            result = tapes.attempt(replay, *tensors)
            if result is not None:
                # The form says whether an operand is symmetric memory, which a tape cannot.
                self.has_recorded(reads_in_place=True)
                return result
        result = self.recall_form(form, known, *tensors)
        if not recorder.is_complete:
            self.replays.play_graphs_of(form, functools.partial(_replay_in_tape, weakref.ref(self)))
        return result

    def may_recall(self) -> bool:
        """Return whether a call may go past what comes before a call's first launch: nothing is to
        be freed or ordered, and nobody captures or records it.
        """
        return not releases and self.streams.continues() and self.replays.may_replay()

    def has_recorded(self, *, reads_in_place: bool = False) -> None:
        """Say that all that a call has done from its arguments on was a step of its recording, if
        there is one; see :mod:`interlace.comm.replay.tapes`.

        Args:
            reads_in_place: Whether another implementation may run where an operand is symmetric
                memory, of which an address says nothing to a tape.
        """
        recorder = tapes.recorder()
        if recorder is None or not self.replays.is_enabled:
            return
        if torch.is_grad_enabled() and not recorder.knows_gradients:
            return
        reference = weakref.ref(self.health)

        def failed(error: BaseException) -> None:
            health = reference()
            if health is not None:
                health.declare_launches_interrupted(error)

        # A process on its own has no name.
        if not self.name or known_group(process_group_named(self.name), self.device) is not self:
            return
        conditions = (
            named_condition(self.name),
            self.health.condition(),
            releases.condition(),
            recordings.condition(),
            *self.streams.conditions(),
            *([self.memory.has_no_tensors()] if reads_in_place else []),
        )
        # Last, as a kernel may break the group at any time, and conditions are what is so now.
        if not self.health.broken and self.may_recall():
            recorder.complete(self.replays, conditions, failed)

    # Symmetric memory

    @property
    def stride(self) -> int:
        """Return the bytes between two ranks' copies of a symmetric address."""
        return self.memory.heap.stride

    @property
    def granularity(self) -> int:
        """Return the bytes of which pieces for :meth:`remap` must be multiples."""
        return self.memory.heap.granularity

    def shortage(self, reserve: Callable[[], Reservation | None]) -> str | None:
        """Return why the memory of a call within a node does not fit under the group's limit, in
        words; None if it fits, or is not known. All ranks get the same answer.

        Args:
            reserve: Returns the memory; called where there is a limit.
        """
        if self.memory.limit_bytes is None or self.spans_nodes:
            return None
        return self.memory.shortage(reserve())

    def workspace_bytes(self) -> dict[str, int]:
        """Return the symmetric bytes that operators hold on this rank, by operator and
        implementation; docs/costs.md says what they add up to, and how to limit it.

        A name is an operator's, mostly with a dot and the implementation's. ``"outputs"`` are the
        buffers that all operators return results in. Symmetric tensors and mapped outputs that the
        program has made itself do not count.

        Example:
            >>> interlace.group_of().workspace_bytes()
            {'gemm_reduce_scatter': 58720256, 'gemm_all_reduce.pushed': 6291456}
        """
        return self.memory.held_bytes()

    # Between nodes

    def network(self) -> Network:
        """Return what slices to other nodes need, made by the first call. Collective.

        Raises:
            WorkspaceError: It must be made, and a CUDA graph is being captured.
            BackendError: A rank cannot connect; raised on every rank.
        """
        if self._network is None:
            if self.streams.capturing():
                raise WorkspaceError(
                    "nodes must be connected before a CUDA graph is captured. Call the operator "
                    "once with these shapes first, then capture."
                )
            with self.on_device(), self.agreement.together("connecting nodes"):
                self._network = Network(self.members, self.health, self.channel, self.replays)
        return self._network

    # Health

    @property
    def deadline_s(self) -> float:
        """Return the number of seconds that a wait of this group may last."""
        return self.health.deadline_s

    @deadline_s.setter
    def deadline_s(self, seconds: float) -> None:
        self.health.deadline_s = seconds

    @property
    def broken(self) -> bool:
        """Return whether a call has failed, so that later results mean nothing."""
        return self.health.broken

    def context(self, operator: str) -> torch.Tensor:
        """Return the ``ctx`` argument of ``operator``'s kernels; see :meth:`Health.context`."""
        context = self.health.context(operator, self.stride)
        recording = recordings.active()
        return context if recording is None else recording.context(context, operator)

    def running(self) -> Running:
        """Return the context in which an operator launches its kernels.

        It refuses a broken group, orders the call after the previous one on this GPU, and makes the
        group's GPU the current one. An exception that leaves it after a launch breaks the group:
        the epochs of this rank may no longer be those of its peers. On the CPU backend the kernels
        have ended when the context exits, so an expired wait raises there.
        """
        return self.health.running(self.check)

    def launching(self) -> Launching:
        """Return the context in which a call launches its kernels again that :meth:`may_recall` has
        let pass: there is nothing to order, and torch's current GPU is the group's.

        An exception that leaves it after a launch breaks the group, as in :meth:`running`.
        """
        return Launching(self.health)

    # What concerns all parts

    def synchronize(self) -> None:
        """Wait until this rank's kernels are done, then :meth:`check`."""
        self.streams.synchronize(lambda: self.broken)
        self.check()

    def release(self) -> None:
        """Free all workspaces, and outputs that no tensor refers to.

        Collective: every rank must call it, with no kernel of the group running. CUDA graphs
        that were captured before must not be replayed afterwards.
        """
        self.streams.synchronize()
        # A peer's kernel may write to this rank's memory until all ranks are idle.
        self.exchange("release", "idle")
        self._forget()
        releases.empty()

    def recover(self, timeout_s: float | None = None) -> None:
        """Make a broken group usable again; see :func:`interlace.recover`."""
        patience_s = recovery_s(self.deadline_s)
        if timeout_s is not None:
            patience_s = checked_deadline_s(timeout_s, "recover: timeout_s")
        if self.streams.capturing():
            raise WorkspaceError(
                "a group must be recovered outside of a CUDA graph. Finish the capture first."
            )
        self.streams.synchronize()  # kernels that wait end by their deadline
        if self.world_size > 1:
            # Once all ranks have met, no rank has a kernel running that could write to a peer.
            self.channel.meet("recover", patience_s)
        self._forget()
        for recoverable in self.cache.recoverable:
            recoverable.reset()
        self.health.reset()
        self.streams.synchronize()
        # No rank may write to a peer before that peer's memory is reset.
        self.exchange("recover", "as new")
        releases.empty()

    def _forget(self) -> None:
        """Let go of everything that calls have left, on every rank at once."""
        self.cache.clear()
        self.memory.clear()
        if self._network is not None:
            self._network.close()
            self._network = None


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Group]] = (
    weakref.WeakKeyDictionary()
)
_solo: dict[torch.device, Group] = {}
_lock = threading.Lock()


def group_of(
    process_group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> Group:
    """Return the :class:`Group` of a process group.

    The first call for a process group and kind of device is collective.

    Args:
        process_group: A group that this rank belongs to. Default: the default process group; this
            process on its own if there is none, and it is not one of several.
        device: Device of the group's kernels. Default: the current CUDA device, or the CPU if there
            is none.

    Raises:
        GroupError: This rank is not a member, the group cannot be used, or none was given and there
            is no default one, though ``WORLD_SIZE`` is above 1 or there was one.
    """
    substitute: Group | None = default_group.get()
    if process_group is None and substitute is not None:
        return substitute
    device = device_of_group(device)
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    require_member(process_group)
    if process_group is None:
        require_alone()
        return solo_group(device)
    with _lock:
        groups = _groups.setdefault(process_group, {})
        if device not in groups:
            note_default_group(dist.get_world_size())
            made = groups[device] = Group(process_group, device)
            # A tape knows a process group by its name and place, and another one may get both
            # before the group is collected as garbage.
            weakref.finalize(process_group, tapes.forget, made.replays).atexit = False
        return groups[device]


def known_group(process_group: dist.ProcessGroup | None, device: torch.device) -> Group | None:
    """Return the :class:`Group` of a process group, or None before its first call."""
    if process_group is None:
        substitute: Group | None = default_group.get()
        if substitute is not None:
            return substitute
        process_group = dist.group.WORLD if dist.is_available() else None
    # What a caller has given may be anything; it is refused later.
    if process_group is None or not isinstance(process_group, dist.ProcessGroup):
        return None
    groups = _groups.get(process_group)
    return None if groups is None else groups.get(device)


def known_nodes(process_group: dist.ProcessGroup | None) -> int | None:
    """Return the number of nodes that the ranks of a group are on; None before its first call.

    Nothing is exchanged, so a rank may ask alone.
    """
    substitute: Group | None = default_group.get()
    if process_group is None and substitute is not None:
        return substitute.nodes
    process_group = process_group or dist.group.WORLD
    with _lock:
        groups = _groups.get(process_group, {}) if process_group is not None else {}
        return max((group.nodes for group in groups.values()), default=None)


def solo_group(device: torch.device) -> Group:
    """Return the group of this process alone on ``device``, regardless of process groups."""
    device = device_of_group(device)
    with _lock:
        if device not in _solo:
            _solo[device] = Group(None, device)
        return _solo[device]


def group_named(name: str, device: torch.device) -> Group:
    """Return the group of a process group's name, which operators carry in graphs.

    The name ``""`` stands for the default group.
    """
    process_group = process_group_named(name)
    # A group that is known was valid when it was made, and its name is gone when it is destroyed.
    known = known_group(process_group, device)
    return group_of(process_group, device) if known is None else known


def set_deadline(seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """Let every wait of ``group`` last at most ``seconds`` from now on, on this rank.

    The default is 30 s, or ``INTERLACE_DEADLINE_S`` from the environment.

    Raises:
        ArgumentError: ``seconds`` is not above 0 and below a million.
    """
    group_of(group).deadline_s = seconds


def synchronize(group: dist.ProcessGroup | None = None) -> None:
    """Wait for this rank's kernels and raise the error of the first failure, if there was one.

    Raises:
        PeerTimeoutError: A wait of a kernel expired.
        MiscountError: A kernel miscounted.
        GroupError: A call was interrupted on this rank when its kernels might have started.
    """
    group_of(group).synchronize()


def recover(group: dist.ProcessGroup | None = None, timeout_s: float | None = None) -> None:
    """Make a broken group usable again without ending a process. Collective.

    After a :class:`PeerTimeoutError` or a :class:`MiscountError`, ranks no longer agree on the
    number of their calls. This waits until all ranks are here and none has a kernel running, and
    then begins anew: epochs, signals, flags, agreements, and the graphs of calls that come again.
    The next call of each kind is as slow as the first one was.

    A rank that has not noticed the failure must come, too. It learns of the failure by its next
    call on the group, one deadline later, which is why this waits for three deadlines. It may also
    be called when nothing has failed.

    These are lost: results of calls that have failed (NaN), views that
    :meth:`MappedOutput.exchange` and ``fuse`` have returned, and CUDA graphs that the program has
    captured with the group, which must be captured again and not be replayed. Tensors that
    operators have returned, symmetric tensors, and mapped outputs that every rank has keep working.

    Args:
        group: Process group. Default: the default process group.
        timeout_s: Seconds to wait for the other ranks. Default: three deadlines of the group.

    Raises:
        ArgumentError: ``timeout_s`` is not above 0 and below a million.
        PeerTimeoutError: A rank did not come, within at most twice the time; raised on every rank
            that did, with that rank's number. It is dead, or does something else: the group stays
            broken. Without that rank, build a new process group.
        WorkspaceError: A CUDA graph is being captured.
    """
    group_of(group).recover(timeout_s)


def _replay_in_tape(
    reference: weakref.ref[Group], form: Hashable, *tensors: torch.Tensor | None
) -> Any:
    """Replay a call of a form as :meth:`Group.recall` does, but for what its tape asks before."""
    group, operands = reference(), (form, addresses(*tensors))
    work = None if group is None else group.replays.remembered(operands)
    if group is None or work is None or in_inductors_run():
        return None
    return group._replay(work, operands)


__all__ = [
    "MAX_PROGRAMS",
    "Answers",
    "Group",
    "Workspace",
    "group_named",
    "group_of",
    "solo_group",
]
