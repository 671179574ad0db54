"""Manage the symmetric memory of a group: allocation, workspaces of operators, and outputs."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from interlace.comm.groups.outputs import OutputPool
from interlace.comm.groups.reservation import Reservation, WorkspaceSize
from interlace.comm.host.agreement import Agreement
from interlace.comm.host.channel import HostChannel
from interlace.comm.host.health import Health
from interlace.comm.host.held_memory import HeldMemory, record
from interlace.comm.replay.memory import Block, Heap, SoloHeap, call_when_gone, releases
from interlace.comm.replay.replays import Replays
from interlace.comm.runtime.conditions import Condition, answers
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.comm.runtime.streams import Streams
from interlace.environment import LIMIT_VARIABLE, byte_count
from interlace.errors import WorkspaceError
from interlace.units import format_memory, round_up

# A power of two: ``il.arrive_last`` tells the end of a round by a remainder.
MAX_PROGRAMS = 4096
"""Largest number of programs in one launch of an operator; each has an epoch cell (see
``interlace.language``).
"""


@dataclasses.dataclass
class Workspace:
    """Hold the memory of one operator of one group; see :meth:`SymmetricMemory.workspace`.

    Attributes:
        data: Symmetric; two halves of ``half_bytes``, used in turn by the epoch's parity.
        half_bytes: Bytes of one half of ``data``.
        signals: Symmetric int32 ``[signal_count]``, each written by one rank only: the epoch of the
            writer's call and the call's mark.
        signal_count: Number of signals.
        epochs: Local int32 ``[MAX_PROGRAMS]``: number of the next call, per program.
        side_epochs: Local int32 ``[MAX_PROGRAMS]``: epochs of launches that run concurrently with
            an operator's kernel and may end before or after it.
        notes: Local int32 ``[2]``: values that an operator's first kernel leaves for later kernels
            of the same call.
        captured: Whether a CUDA graph of the program refers to the workspace.
    """

    data: Block
    half_bytes: int
    signals: Block
    signal_count: int
    epochs: torch.Tensor
    side_epochs: torch.Tensor
    notes: torch.Tensor
    captured: bool = False

    def suffices(self, half_bytes: int, signal_count: int) -> bool:
        """Return whether a call that needs so many bytes and signals finds them here."""
        return self.half_bytes >= half_bytes and self.signal_count >= signal_count

    def reset(self, rank: int) -> None:
        """Restore the initial state of ``rank``'s part while no kernel of any rank is running."""
        for block in (self.data, self.signals):
            block.part_of(rank, self.epochs.device, [block.nbytes], torch.uint8).zero_()
        # Epoch 0 is what signals hold in fresh memory, so calls count from 1.
        self.epochs.fill_(1)
        self.side_epochs.fill_(1)
        self.notes.zero_()


class SymmetricPlace(NamedTuple):
    """Say where memory lies within a symmetric tensor of the program, in terms that all ranks
    share.

    Attributes:
        tensor: Number of the tensor: how many the group had made before it.
        offset: Bytes from the tensor's begin.
    """

    tensor: int
    offset: int

    def __str__(self) -> str:
        return f"symmetric tensor {self.tensor}, byte {self.offset}"


class SymmetricMemory:
    """Allocate the symmetric memory of one group, and keep what its operators use.

    Attributes:
        heap: Allocator of the group's address range.
        workspaces: The largest workspace of each operator, by the operator's name.
        mapped: Bytes of the mapped outputs that the group keeps for its operators, by the names of
            operator and implementation and by what tells outputs apart; the same on all ranks.
        limit_bytes: The most bytes that all of these and the outputs may take; None for no limit.
        outputs: Symmetric memory that operators return as tensors.
    """

    def __init__(
        self, channel: HostChannel, agreement: Agreement, health: Health, streams: Streams,
        replays: Replays
    ) -> None:  # fmt: skip
        """Reserve an address range for all ranks.

        Args:
            channel: Passes descriptors of shared memory between the ranks.
            agreement: Makes an allocation fail on every rank if it fails on one.
            health: Is told when growth is interrupted on this rank.
            streams: Give the device, and know whether a CUDA graph is being captured.
            replays: Graphs that refer to workspaces; forgotten when one of those grows.
        """
        self._agreement, self._health = agreement, health
        self._streams, self._replays = streams, replays
        self.heap = _new_heap(channel, streams.device)
        self.workspaces: dict[str, Workspace] = {}
        self.mapped: dict[tuple[str, Hashable], int] = {}
        # A process on its own allocates ordinary memory. All ranks have the same limit, as they
        # compare it when they join.
        is_alone = channel.members.world_size == 1
        self.limit_bytes = None if is_alone else byte_count(LIMIT_VARIABLE)
        # Symmetric tensors of the program, by number. All ranks make them together, so the numbers
        # are the same on all of them, whatever the addresses are.
        self._tensors: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._tensors_made = 0
        # Of compiled graphs, by slot: each at least twice as large as the one before it.
        self._rows: dict[int, list[Block]] = {}
        self._known_rows: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._members = channel.members
        # What was refused stays so until memory is released. A rank that asks again later, because
        # it has forgotten a decision that its peers remember, gets their answer.
        self._refused: set[Reservation] = set()
        # Workspaces to which the limit does not apply.
        self._unlimited: set[str] = set()
        # Replaced, but captured in a graph of the program on any rank; the oldest first.
        self._retained: dict[str, list[Workspace]] = {}
        self.outputs = OutputPool(
            channel.members, health, streams, replays, self._allocate_outputs,
            agreement.any_rank_now, self.show,
        )  # fmt: skip
        # Kernels that are running when the group goes still use the workspaces.
        held = [self.workspaces, self._retained]
        call_when_gone(self, streams.device, held.clear)
        call_when_gone(self, streams.device, record.write)

    def allocate(self, nbytes: int, pieces: int = 1) -> Block:
        """Allocate ``pieces`` times ``nbytes`` of symmetric memory. Collective.

        Raises:
            WorkspaceError: The memory does not fit on one rank, raised on every rank; or a CUDA
                graph is being captured.
        """
        if self._streams.capturing():
            raise WorkspaceError(
                "symmetric memory must be allocated before a CUDA graph is captured. "
                "Call the operator once with these shapes first, then capture."
            )
        releases.empty()
        # All ranks have mapped and zeroed the memory when this ends, so any rank may write.
        with self._streams.on_device(), self._agreement.together("allocating symmetric memory"):
            return self.heap.allocate(nbytes, pieces)

    def allocate_tensor(self, nbytes: int) -> Block:
        """Allocate the memory of a symmetric tensor that the program makes, of which
        :meth:`place_of` knows. Collective.

        Raises:
            WorkspaceError: As :meth:`allocate`.
        """
        block = self.allocate(nbytes)
        self._tensors[self._tensors_made] = block
        self._tensors_made += 1
        return block

    def place_of(self, tensor: torch.Tensor) -> SymmetricPlace | None:
        """Return where a contiguous tensor lies within this rank's part of a symmetric tensor that
        the program has made; None if it lies elsewhere.
        """
        if not self._tensors:  # most programs have none, and every call asks
            return None
        first = tensor.data_ptr()
        for number, block in list(self._tensors.items()):
            offset = first - block.address_of(self._members.rank)
            if offset >= 0 and offset + tensor.nbytes <= block.nbytes:
                return SymmetricPlace(number, offset)
        return None

    def has_no_tensors(self) -> Condition:
        """Return the condition that the program has made no symmetric tensor, or has none left."""
        return answers(self._tensors.__len__, 0)

    def rows_for_peers(
        self, slot: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return memory ``[*shape]`` of ``dtype`` at one place on all ranks, which :meth:`place_of`
        knows, for rows that a compiled graph computes and peers fetch; None beyond the limit, on
        all ranks alike.

        It is the same memory in every call with a slot, until a call asks for more. What was
        returned before stays, as graphs that the program has captured may refer to it. Collective
        when it must grow.

        Raises:
            WorkspaceError: It must grow while a CUDA graph is being captured, or does not fit.
        """
        known = self._known_rows.get((slot, tuple(shape), dtype))
        if known is not None:
            return known
        nbytes = math.prod(shape) * dtype.itemsize
        blocks = self._rows.setdefault(slot, [])
        block = next((each for each in blocks if each.nbytes >= nbytes), None)
        if block is None:
            size = max(nbytes, 2 * blocks[-1].nbytes if blocks else 0)
            room = self.room_bytes()
            if room is not None and round_up(size, self.heap.granularity) > room:
                return None
            block = self._grow_rows(size)
            blocks.append(block)
            self.show()
        rows = block.part_of(self._members.rank, self._streams.device, shape, dtype)
        self._known_rows[slot, tuple(shape), dtype] = rows
        return rows

    @makes_ordinary_tensors
    def _grow_rows(self, nbytes: int) -> Block:
        """Return new memory for rows that peers fetch. Collective."""
        with self._health.indivisible("growing the memory of rows"):
            return self.allocate_tensor(nbytes)

    def _allocate_outputs(self, nbytes: int) -> Block:
        self.require_room("results of operators", round_up(nbytes, self.heap.granularity))
        return self.allocate(nbytes)

    def held_bytes(self) -> dict[str, int]:
        """Return the symmetric bytes on this rank that operators hold, by the names of workspaces,
        of operator and implementation for mapped outputs, ``"outputs"`` for the buffers that all
        operators return, and ``"rows"`` for what compiled graphs write for peers.
        """
        held: dict[str, int] = {}
        for name, workspace in self.workspaces.items():
            for each in (workspace, *self._retained.get(name, ())):
                held[name] = held.get(name, 0) + each.data.nbytes + each.signals.nbytes
        for (name, _), nbytes in self.mapped.items():
            held[name] = held.get(name, 0) + nbytes
        if self.outputs.nbytes:
            held["outputs"] = self.outputs.nbytes
        if self._rows:
            held["rows"] = sum(block.nbytes for blocks in self._rows.values() for block in blocks)
        return held

    def held(self) -> HeldMemory:
        """Return :meth:`held_bytes` for other programs to read."""
        members, device = self._members, str(self._streams.device)
        return HeldMemory(members.rank, members.world_size, device, self.held_bytes())

    def show(self) -> None:
        """Let other programs read what is held from now on."""
        record.write(self)

    def room_bytes(self) -> int | None:
        """Return the bytes that the limit leaves beside what is held; None for no limit."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self._counted_bytes())

    def _counted_bytes(self) -> int:
        """Return the bytes that count towards the limit."""
        held = self.held_bytes()
        return sum(nbytes for name, nbytes in held.items() if name not in self._unlimited)

    def shortage(
        self, reservation: Reservation | None, *, is_asked_only: bool = False
    ) -> str | None:
        """Return why a call's memory does not fit under the limit, in words, or None if it does.

        All ranks get the same answer in the same call: it depends on sizes, and on what is held,
        which is alike as allocations are collective. A memory that grows counts once more, because
        the new one is there before the old one goes.

        Args:
            reservation: The memory; None if it is not known, which is taken to fit.
            is_asked_only: Whether this rank may ask alone, as no call depends on the answer.
        """
        room = self.room_bytes()
        if room is None or reservation is None:
            return None
        needed = self._missing_bytes(reservation)
        if needed <= room and reservation not in self._refused:
            return None
        if not is_asked_only:
            self._refused.add(reservation)
        return shortage_in_words(needed, room)

    def _missing_bytes(self, reservation: Reservation) -> int:
        """Return the bytes that would be allocated for a call now."""
        granularity, total = self.heap.granularity, 0
        for size in reservation.workspaces:
            held = self.workspaces.get(size.name)
            if held is None or not held.suffices(size.half_bytes, size.signal_count):
                total += _grown(size, held).nbytes(granularity)
        kept = {key for _, key in self.mapped}
        for mapped in reservation.mapped:
            if mapped.key not in kept:
                total += mapped.pieces * round_up(mapped.nbytes, granularity)
        if reservation.output_bytes:
            total += round_up(self.outputs.missing(reservation.output_bytes), granularity)
        return total

    def require_room(self, subject: str, nbytes: int) -> None:
        """Refuse to allocate more than the limit leaves; raised on all ranks alike.

        Args:
            subject: What the memory is for.
            nbytes: Bytes that are to be allocated on each rank.

        Raises:
            WorkspaceError: They are too many.
        """
        room = self.room_bytes()
        if room is None or nbytes <= room:
            return
        raise WorkspaceError(
            f"symmetric memory for {subject} must fit under the limit {LIMIT_VARIABLE}="
            f"{self.limit_bytes}; got {shortage_in_words(nbytes, room)} beside "
            f"{format_memory(self._counted_bytes())} that the group holds. Raise the "
            "limit, free memory by Group.release(), or take impl='auto' or 'unfused'."
        )

    def remap(self, addresses: Sequence[int], nbytes: int) -> tuple[int, Callable[[], object]]:
        """Map pieces of symmetric memory once more, consecutively. Collective; see ``Heap.remap``.

        Raises:
            WorkspaceError: A CUDA graph is being captured.
        """
        if self._streams.capturing():
            raise WorkspaceError(
                "memory must be mapped before a CUDA graph is captured. Create mapped outputs "
                "first, then capture."
            )
        with self._streams.on_device(), self._agreement.together("mapping memory once more"):
            return self.heap.remap(addresses, nbytes)

    def workspace(
        self, operator: str, half_bytes: int, signal_count: int = 1, *, is_limited: bool = True
    ) -> Workspace:
        """Return the memory of ``operator``, allocated or grown on all ranks if it is too small.

        Every rank must ask with equal numbers in the same order, which :meth:`Agreement.agree` has
        checked. When a workspace grows, the previous one is kept if a graph that any rank has
        captured refers to it, and is freed if not. A call gets the oldest one that is large enough:
        so a rank that enqueues or captures a call meets peers that replay an earlier capture of it.

        Args:
            operator: Name of the operator.
            half_bytes: Bytes that one call needs; the workspace has two such halves.
            signal_count: Number of int32 signals that one call needs.
            is_limited: Whether the group's limit applies.

        Raises:
            WorkspaceError: The memory does not fit on one rank, or is beyond the limit; raised on
                every rank. The previous workspace stays in force.
        """
        workspace = self.workspaces.get(operator)
        if workspace is None or not workspace.suffices(half_bytes, signal_count):
            size = _grown(WorkspaceSize(operator, half_bytes, signal_count), workspace)
            if not is_limited:
                self._unlimited.add(operator)
            else:
                self.require_room(operator, size.nbytes(self.heap.granularity))
            return self._grow(size)
        for previous in self._retained.get(operator, ()):
            if previous.suffices(half_bytes, signal_count):
                workspace = previous
                break
        # The group's own graphs do not count: they are forgotten when the workspace goes.
        workspace.captured |= self._streams.capturing() and not self._replays.capturing
        return workspace

    @makes_ordinary_tensors
    def _grow(self, size: WorkspaceSize) -> Workspace:
        """Return a new workspace of a rounded size, and let go of the previous one."""
        operator, half_bytes, signal_count = size
        previous = self.workspaces.get(operator)
        step = f"growing the memory of {operator}"
        with self._health.indivisible(step):
            data, signals = self.allocate(2 * half_bytes), self.allocate(4 * signal_count)
            with self._agreement.together(step):
                # Signals of fresh memory hold epoch 0, so calls count from 1.
                epochs = torch.ones(MAX_PROGRAMS, dtype=torch.int32, device=self._streams.device)
                workspace = Workspace(
                    data=data,
                    half_bytes=half_bytes,
                    signals=signals,
                    signal_count=signal_count,
                    epochs=epochs,
                    side_epochs=torch.ones_like(epochs),
                    notes=epochs.new_zeros(2),
                )
            # Only a rank itself knows what it has captured, and all must keep the same memory.
            is_captured = previous is not None and self._agreement.any_rank_now(
                f"{step} (captured)", previous.captured
            )
            # Graphs of earlier calls refer to the previous workspace.
            self._replays.clear()
            self.workspaces[operator] = workspace
            if previous is not None and is_captured:
                self._retained.setdefault(operator, []).append(previous)
        self.show()
        return workspace

    def clear(self) -> None:
        """Let go of all workspaces and outputs; on every rank at once.

        Outputs stay mapped until the tensors over them are gone.
        """
        self.workspaces.clear()
        self._retained.clear()
        self.mapped.clear()
        self._refused.clear()
        self._rows.clear()
        self._known_rows.clear()
        self.outputs.release()
        self.show()


def _grown(size: WorkspaceSize, previous: Workspace | None) -> WorkspaceSize:
    """Return the size that is allocated where a workspace must become at least so large."""
    if previous is not None:
        size = size._replace(
            half_bytes=max(size.half_bytes, previous.half_bytes),
            signal_count=max(size.signal_count, previous.signal_count),
        )
    return size.rounded()


def shortage_in_words(needed_bytes: int, room_bytes: int) -> str:
    """Return that a call needs more memory than the limit leaves, for errors and explanations."""
    return (
        f"{format_memory(needed_bytes)} of symmetric memory; {LIMIT_VARIABLE} leaves "
        f"{format_memory(room_bytes)}"
    )


def _new_heap(channel: HostChannel, device: torch.device) -> Heap:
    """Return a heap for a group on a device."""
    if channel.members.world_size == 1:
        return SoloHeap(device)
    # Only the heap of the group's own backend is imported, as the other one may lack its libraries.
    if device.type == "cuda":
        from interlace.comm.groups.memory_cuda import CudaHeap

        return CudaHeap(channel, device)
    from interlace.comm.groups.memory_cpu import CpuHeap

    return CpuHeap(channel)
