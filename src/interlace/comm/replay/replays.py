"""Replay calls that come again with the same addresses: one launch in place of dozens.

The host takes longer to enqueue a call of several kernels, products and copies than a GPU takes to
run it. A program that repeats itself, as training does, gets the same memory from torch's allocator
in each step, so the call of the previous step can be replayed.

The kernels of a graph know a tensor by its address alone, and a call with equal addresses has the
tensors that lie there now. So nothing is kept alive, and nothing is copied. Memory that a graph
refers to and that is not the call's own belongs to the group, which forgets its graphs before such
memory goes, or is a small table of numbers (``interlace.comm.host.cache``), which is kept with
the call.

The copies of a graph know a tensor by its allocation as well: a copy between GPUs that was captured
before torch has returned the memory to the driver and got other memory at the same address still
reaches the pages of then, and with them whatever has them now. So a key holds the allocations of
tensors that copy engines touch.

Keys hold addresses and settings of this process alone, which does no harm: whether a rank replays a
call or enqueues it, its peers see the same puts and signals, and neither of the two asks them
anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from interlace import environment
from interlace.comm.replay import recording as recordings
from interlace.comm.replay import tapes
from interlace.comm.replay.deferred import DeferredCall
from interlace.comm.replay.memory import releases
from interlace.comm.runtime.driver import allocation_of, is_out_of_memory
from interlace.comm.runtime.ordinary import in_inductors_run
from interlace.comm.runtime.streams import launches
from interlace.errors import BackendError

_MAX_GRAPHS = 256
_MAX_CANDIDATES = 4096  # calls that came once and are captured when they come again
_MEMORY_SHARE = 64  # of a GPU's memory, what all graphs' calls may keep for themselves: a 64th
_MAX_REMEMBERED = 4096  # calls whose work is found by their operands alone
_IDLE_RUNS = 16 * _MAX_GRAPHS  # runs of other calls after which a graph may make room
_FIRST_TRY = _TRIES = 8  # among calls with the same operands, what may become a graph


AgainCall = Callable[..., Any]
"""Makes a call that is like an earlier one, given its group, by what :meth:`Group.recall` will find
it (or None), and its operands; returns its result, or None where it does not make this call.
"""


def places(*tensors: torch.Tensor | None) -> tuple[Hashable, ...]:
    """Return address, shape, strides and dtype of each tensor, for a key of :meth:`Replays.run`."""
    return tuple(
        None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in tensors
    )


def library_settings() -> tuple[Hashable, ...]:
    """Return torch's settings of matrix products, which a graph keeps from its capture."""
    torch_c = torch._C
    return (
        torch_c._get_fp32_precision_getter("cuda", "matmul") == "tf32",
        torch_c._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch_c._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch_c._get_cublas_allow_fp16_accumulation(),
        torch_c._get_blas_preferred_backend(),
        torch_c._get_deterministic_algorithms(),
        torch_c._get_sm_carveout_experimental(),
    )


def _drop_oldest(kept: dict[Hashable, Any], limit: int) -> None:
    """Make room for one more entry among ``most``."""
    if len(kept) >= limit:
        del kept[next(iter(kept))]


@dataclasses.dataclass
class _Replayable:
    """Hold a captured call.

    Attributes:
        graph: The CUDA graph; None when it has made room for another.
        last_run: Number of the run that replayed it last.
        tables: Tables of numbers that the graph refers to.
    """

    graph: Any
    last_run: int
    tables: tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class _Remembered:
    """Hold a call that is found by its operands.

    Attributes:
        work: What the call is; its ``prepare`` and ``again`` refer to operands, and are left out.
        graphs: Its graphs, by what they depend on beside the work's key. One that has made room
            for another has no graph any more.
    """

    work: DeferredCall
    graphs: dict[Hashable, _Replayable]


class Replays:
    """Capture and replay the calls of one group.

    ``INTERLACE_REPLAY=0`` in the environment, when the group is made, turns replays off.

    Attributes:
        is_enabled: Whether calls are remembered at all, which they are on GPUs.
        capturing: Whether the work that is enqueued now becomes one of these graphs.
    """

    def __init__(self, device: torch.device) -> None:
        """Create a store of graphs for ``device``; on the CPU it always enqueues."""
        self._device = device
        self.is_enabled = (
            device.type == "cuda" and environment.switch("INTERLACE_REPLAY") is not False
        )
        self._graphs: dict[Hashable, _Replayable] = {}
        self._remembered: dict[Hashable, _Remembered] = {}
        self._alike: dict[Hashable, AgainCall] = {}
        self._of_forms: dict[Hashable, Callable[..., Any]] = {}
        self._seen: dict[Hashable, int] = {}
        self._candidates: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        # Tables of the call that is being enqueued for the first time; None at all other times.
        self._tables: list[torch.Tensor] | None = None
        self._runs = self._full_until = 0
        self.capturing = False

    def __len__(self) -> int:
        return len(self._graphs)

    def run(
        self,
        key: Hashable,
        enqueue: Callable[[], None],
        *,
        with_libraries: bool = True,
        copied: Sequence[torch.Tensor] = (),
    ) -> bool:
        """Enqueue the work of ``enqueue()`` on the current stream, within ``Group.running``.

        The second call with ``key`` makes a graph, which later calls replay. No graph is made
        within a CUDA graph of the program, nor in a run of which Inductor makes one, nor while as
        many as are kept are all in use, nor where the driver does not tell allocations apart, nor
        where there is no memory for it: this rank alone may lack it, and its peers wait for the
        call.

        Args:
            key: Everything that the work depends on: the :func:`places` of the call's tensors, and
                its numbers.
            enqueue: Enqueues kernels and copies that begin and end on the current stream. What it
                allocates means nothing when it ends: that memory is every graph's. Where a graph
                of it cannot be made it is called again, and enqueues the same.
            with_libraries: The work may contain products by cuBLAS, so it depends on
                :func:`library_settings` as well.
            copied: The tensors of torch's memory that copy engines or NCCL read or write.

        Returns:
            Whether ``enqueue`` was called.
        """
        full = self._key(key, with_libraries, copied) if self.may_replay() else None
        return self._run(full, enqueue)

    def _run(
        self, key: Hashable | None, enqueue: Callable[[], None], temporary_bytes: int = 0
    ) -> bool:
        """Enqueue work as :meth:`run` does, given its whole key, or None for work that is no graph,
        and the bytes that a graph of it would keep for itself.
        """
        if key is None:
            enqueue()
            return True
        self._runs += 1
        replayable = self._graphs.get(key)
        is_new = replayable is None
        if replayable is None:
            tables = self._candidates.get(key)
            if tables is None:
                self._enqueue_candidate(key, enqueue)
                return True
            kept = _kept_memory(self._device) if temporary_bytes else None
            if not ((kept is None or kept.has_room(temporary_bytes)) and self._has_room()):
                enqueue()
                return True
            try:
                graph = self._capture(enqueue)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                enqueue()
                return True
            if kept is not None:
                kept.add(temporary_bytes)
            replayable = self._graphs[key] = _Replayable(graph, 0, tables)
        self._launch(replayable)
        return is_new

    def may_replay(self) -> bool:
        """Return whether a call that is made now may be a graph; see :meth:`run`."""
        # A launch that records its events has memory of its own for them, each time.
        return (
            self.is_enabled
            and recordings.active() is None
            and not torch.cuda.is_current_stream_capturing()
            and not in_inductors_run()
        )

    def perform(
        self,
        work: DeferredCall,
        memory: tuple[Any, ...],
        enqueue: Callable[[], None],
        operands: Hashable = None,
    ) -> bool:
        """Enqueue a call's work with its memory, as :meth:`run` does; return the same.

        Args:
            work: The call.
            memory: What it has taken.
            enqueue: What it has prepared.
            operands: By what :meth:`recall` finds the call, if it was a graph: the places of its
                operands and its numbers. Nothing else may decide what ranks run until
                :meth:`forget`. None for a call that is not to be found.
        """
        # Before the work is enqueued, which may move on what it depends on.
        place = self._place(work, memory) if self.may_replay() else None
        key = None if place is None else (work.key, place)
        is_enqueued = self._run(key, enqueue, work.temporary_bytes)
        if operands is not None and work.is_of_operands:
            replayable = self._graphs.get(key)
            if replayable is not None:
                self._remember(operands, work, place, replayable)
        return is_enqueued

    def remembered(self, operands: Hashable) -> DeferredCall | None:
        """Return the work of a call with these operands that has been a graph; None if none has."""
        record = self._remembered.get(operands)
        return None if record is None else record.work

    def alike(self, form: Hashable) -> AgainCall | None:
        """Return what makes calls of one form again; None if there is nothing."""
        return self._alike.get(form)

    def remember_form(self, form: Hashable, again: AgainCall) -> None:
        """Make calls of one form by ``again`` from here on, until :meth:`forget`.

        Args:
            form: What such calls have in common, which is all but their addresses, or more.
            again: Makes one, given the group and operands; it must refer to neither.
        """
        if self.is_enabled:
            _drop_oldest(self._alike, _MAX_REMEMBERED)
            self._alike[form] = again

    def graphs_of(self, form: Hashable) -> Callable[..., Any] | None:
        """Return what replays calls of a form, given their operands; None unless
        :meth:`play_graphs_of` has said so.
        """
        return self._of_forms.get(form)

    def play_graphs_of(self, form: Hashable, replay: Callable[..., Any]) -> None:
        """Play calls of a form as graphs, as what they do has turned out to be no recording.

        Args:
            replay: Replays one, given the form and its operands.
        """
        if form not in self._of_forms:
            _drop_oldest(self._of_forms, _MAX_REMEMBERED)
            self._of_forms[form] = functools.partial(replay, form)

    def comes_again(self, operands: Hashable) -> bool:
        """Return whether a call with these operands, of which no graph was found, is to become one.

        To make a graph takes the host 1 to 2 ms, as long as ten calls that are made by their form
        take longer than its replays; so it is tried when the operands have come 8 times. Where the
        call's other memory is always elsewhere, no graph is ever found: so it is tried eight times,
        in which memory of four places has come twice, and again from 16, 32, 64 times on and so on.
        A result alone has two places where the program keeps the last one, and outputs that are
        mapped have four. A call that is being recorded is to become no graph.
        """
        if tapes.recorder() is not None:
            return False
        if operands is None or (len(self._graphs) >= _MAX_GRAPHS and self._runs < self._full_until):
            return False
        count = self._seen.get(operands, 0) + 1
        if count == 1:
            _drop_oldest(self._seen, _MAX_CANDIDATES)
        self._seen[operands] = count
        since = count - (1 << (count.bit_length() - 1))  # a power of two
        return count >= _FIRST_TRY and since < _TRIES

    def forget(self) -> None:
        """Remember no call any more, as ranks have agreed on another way to run some."""
        self._remembered.clear()
        self._alike.clear()
        self._of_forms.clear()
        tapes.forget(self)

    def replay(self, operands: Hashable, memory: tuple[Any, ...]) -> bool:
        """Launch the graph of a remembered call with this memory, where :meth:`may_replay`; return
        False if there is none.
        """
        record = self._remembered[operands]
        replayable = record.graphs.get(self._place(record.work, memory))
        if replayable is None or replayable.graph is None:
            return False
        self._runs += 1
        self._launch(replayable)
        return True

    def _remember(
        self,
        operands: Hashable,
        work: DeferredCall,
        place: Hashable,
        replayable: _Replayable,
    ) -> None:
        """Find a call by its operands alone when they come again, where :meth:`_place` says so."""
        record = self._remembered.get(operands)
        if record is None:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            record = _Remembered(dataclasses.replace(work, prepare=_forgotten, again=None), {})
            self._remembered[operands] = record
        record.graphs[place] = replayable

    def _place(self, work: DeferredCall, memory: tuple[Any, ...]) -> Hashable | None:
        """Return what a graph of some work depends on beside the work's key; None where that is not
        known.
        """
        copied = [memory[index] for index in work.copied]
        return self._key(work.where(*memory), work.with_libraries, copied)

    def record(self, enqueue: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of calls whose results nobody reads, as a measurement makes them.

        The calls have run before. Memory that they take is not kept for the graph, as it would be
        for a graph of the program: drop it before anything else is called.
        """
        return self._capture(enqueue, is_short_lived=True)

    def refer_to(self, table: torch.Tensor) -> None:
        """Keep ``table`` alive as long as the call that is being enqueued may come again."""
        if self._tables is not None:
            self._tables.append(table)

    def clear(self) -> None:
        """Wait until all graphs have run and forget them, as their memory is about to go."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._candidates.clear()
        self._seen.clear()
        self._full_until = 0
        self.forget()

    def _key(
        self, key: Hashable, with_libraries: bool, copied: Sequence[torch.Tensor]
    ) -> Hashable | None:
        """Return ``key`` with what a graph depends on beside it; None where that is not known."""
        if with_libraries:
            key = (key, library_settings())
        if copied:
            allocations = _allocations_of(copied)
            if allocations is None:
                return None
            key = (key, *allocations)
        return key

    def _launch(self, replayable: _Replayable) -> None:
        tapes.spoil("a graph is replayed")
        replayable.last_run = self._runs
        # Counted before the launch: if that is interrupted, the graph may be running.
        launches.value += 1
        replayable.graph.replay()

    def _enqueue_candidate(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        """Enqueue a call that is new, and remember it with the tables that it refers to."""
        tables: list[torch.Tensor] = []
        self._tables = tables
        try:
            enqueue()
        finally:
            self._tables = None
        _drop_oldest(self._candidates, _MAX_CANDIDATES)
        self._candidates[key] = tuple(tables)

    def _has_room(self) -> bool:
        """Make room for one more graph if an idle one can go; return whether there is room."""
        if len(self._graphs) < _MAX_GRAPHS:
            return True
        # A program that cycles through more addresses than are kept must not capture a graph in
        # each call, so a graph makes room only after it was idle for many runs.
        if self._runs < self._full_until:
            return False
        key, least_recent = min(self._graphs.items(), key=lambda item: item[1].last_run)
        self._full_until = least_recent.last_run + _IDLE_RUNS
        if self._runs < self._full_until:
            return False
        torch.cuda.synchronize(self._device)  # it may still run
        self._graphs.pop(key).graph = None
        return True

    def _capture(
        self, enqueue: Callable[[], object], *, is_short_lived: bool = False
    ) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of the work of ``enqueue()``."""
        self.capturing = True
        launches_before = launches.value
        try:
            return _recorder(self._device).record(enqueue, is_short_lived=is_short_lived)
        finally:
            self.capturing = False
            # Captured work does not run yet, so the launches were none.
            launches.value = launches_before


def _forgotten(*memory: Any) -> Callable[[], None]:
    """Stand for the preparation of a remembered call, which referred to its operands."""
    raise AssertionError("a call that is remembered is a graph")


def _allocations_of(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return the driver's numbers of the allocations; None if it has none for one of them."""
    try:
        return [allocation_of(tensor.data_ptr()) for tensor in tensors if tensor.numel()]
    except BackendError:
        return None


class _Recorder:
    """Capture graphs on a stream of their own, with one pool of memory for all of them.

    Torch allocates cuBLAS's workspace (32 MiB on Hopper) per stream on its first product and keeps
    it, so it comes from the pool. Calls on a GPU follow each other, whatever their group, so all
    graphs can share the workspace. Inductor makes torch forget all workspaces whenever it makes a
    graph; those of lasting graphs then stay in this pool, where only such graphs find them. So
    short-lived graphs, whose pools go, are captured on another stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._short_lived_stream = torch.cuda.Stream(device)
        # PyTorch gives up a pool with its last graph; this graph is never run and keeps the pool.
        self._anchor = self.record(lambda: torch.zeros(1, device=device))

    def record(
        self, enqueue: Callable[[], object], *, is_short_lived: bool = False
    ) -> torch.cuda.CUDAGraph:
        """Return a graph of the work of ``enqueue()``.

        Args:
            is_short_lived: Take the tensors that the work makes from a pool of the graph's own, so
                that their memory goes with it.
        """
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if is_short_lived else self._pool
        stream = self._short_lived_stream if is_short_lived else self._stream
        with torch.cuda.stream(stream), releases.put_off(), _without_collection():
            # Other threads, such as NCCL's watchdog, may go on calling the driver.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                enqueue()
            except BaseException:
                # What has failed says why; the end of the capture may fail as well.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


@functools.cache
def _recorder(device: torch.device) -> _Recorder:
    """Return the recorder of a GPU.

    There is one per GPU and process, since a recorder per group would leave a workspace of cuBLAS
    behind with each group that goes.
    """
    return _Recorder(device)


@dataclasses.dataclass
class KeptMemory:
    """Count what graphs of one pool keep for what their calls take for themselves.

    Such memory is free again when the call ends, within the pool: a call that takes no more of it
    than one before finds it there, and one that takes more finds none that is large enough.

    Attributes:
        most: Bytes that may be kept.
        kept: Bytes that are.
        largest: Bytes that the largest call takes.
    """

    most: int
    kept: int = 0
    largest: int = 0

    def has_room(self, nbytes: int) -> bool:
        """Return whether a graph of a call that takes ``nbytes`` for itself may be made."""
        return nbytes <= self.largest or self.kept + nbytes <= self.most

    def add(self, nbytes: int) -> None:
        """Count the graph of a call that takes ``nbytes`` for itself."""
        if nbytes > self.largest:
            self.kept += nbytes
            self.largest = nbytes


@functools.cache
def _kept_memory(device: torch.device) -> KeptMemory:
    """Return what is counted of a GPU's pool, which all groups' graphs share."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return KeptMemory(total // _MEMORY_SHARE)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage within the context.

    Finalizers of any library may call the driver, which would make the capture invalid.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
