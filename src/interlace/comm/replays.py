"""What calls enqueue, as CUDA graphs, where they come again with the same addresses: one launch in
place of dozens.

A call that is made of several kernels, products and copies takes the host longer to enqueue than a
GPU takes for it. A program that repeats itself, as training does, gets the same memory from torch's
allocator in each step: then the whole call is there already.

An address is all that a graph knows of a tensor, and a call that has the same addresses has the
tensors that lie there now. So nothing is kept alive, and nothing is copied. What a graph refers to
beside the call's tensors belongs to the group, which forgets its graphs before any of that goes, or
is a small table of numbers (``interlace.comm.constants``), which is kept with the call.

Keys hold addresses and settings of this process alone. That is no matter: whether a rank replays a
call or enqueues it, its peers see the same puts and signals, and neither of the two asks them
anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm.launches import launches
from interlace.comm.releases import releases

if TYPE_CHECKING:
    from interlace.comm.group import Group

_MOST_GRAPHS = 256
_MOST_SEEN = 4096  # calls that may be the first of many
_OLD = 16 * _MOST_GRAPHS  # runs without one after which a graph may make room for another


def places(*tensors: torch.Tensor | None) -> tuple[Hashable, ...]:
    """Where tensors lie, and what they are there: of a key for :meth:`Replays.run`."""
    return tuple(
        None if each is None else (each.data_ptr(), each.shape, each.stride(), each.dtype)
        for each in tensors
    )


def library_settings() -> tuple[Hashable, ...]:
    """What torch was told of matrix products: a graph goes on with the settings that it was
    captured with.
    """
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


@dataclasses.dataclass
class _Kept:
    graph: Any
    last_run: int
    tables: tuple[torch.Tensor, ...]


class Replays:
    """The graphs of one group's calls. ``INTERLACE_REPLAY=0`` in the environment, when the group is
    made, turns them off.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._enabled = group.backend == "cuda" and os.environ.get("INTERLACE_REPLAY", "1") != "0"
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._seen: OrderedDict[Hashable, tuple[torch.Tensor, ...]] = OrderedDict()
        # Of the call that is being enqueued for the first time
        self._tables: list[torch.Tensor] | None = None
        self._runs = 0
        self.capturing = False
        """Whether what is enqueued now becomes one of these graphs."""

    def __len__(self) -> int:
        return len(self._kept)

    def run(
        self, key: Hashable, enqueue: Callable[[], None], *, with_libraries: bool = True
    ) -> bool:
        """Enqueue on the current stream what ``enqueue()`` does; whether it was called for that.
        Within ``Group.running``.

        The second call with ``key`` makes a graph, which later ones replay; in a CUDA graph of the
        program's own none is made, nor where as many as are kept are all in use.

        Args:
            key: all that the work depends on: the :func:`places` of the call's tensors, and its
                numbers.
            enqueue: kernels and copies that begin and end on the current stream. It allocates
                nothing.
            with_libraries: the work may contain products by cuBLAS, so it depends on
                :func:`library_settings` as well.
        """
        if not self._enabled or torch.cuda.is_current_stream_capturing():
            enqueue()
            return True
        if with_libraries:
            key = (key, library_settings())
        self._runs += 1
        kept = self._kept.get(key)
        new = kept is None
        if kept is None:
            tables = self._seen.get(key)
            if tables is None:
                self._see(key, enqueue)
                return True
            if not self._has_room():
                enqueue()
                return True
            kept = self._kept[key] = _Kept(self._capture(enqueue), 0, tables)
        kept.last_run = self._runs
        self._kept.move_to_end(key)
        launches.value += 1  # before the launch: if that is interrupted, the graph may be running
        kept.graph.replay()
        return new

    def refer_to(self, table: torch.Tensor) -> None:
        """What is being enqueued refers to ``table``, which lives as long as the call may come
        again.
        """
        if self._tables is not None:
            self._tables.append(table)

    def clear(self) -> None:
        """Forget all graphs, once they have run: memory that they refer to is about to go."""
        if self._kept:
            torch.cuda.synchronize(self._group.device)
        self._kept.clear()
        self._seen.clear()

    def _see(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        """Enqueue a call that is new, and remember it with the tables that it refers to."""
        tables: list[torch.Tensor] = []
        self._tables = tables
        try:
            enqueue()
        finally:
            self._tables = None
        self._seen[key] = tuple(tables)
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)

    def _has_room(self) -> bool:
        """Whether there is room for one more graph."""
        if len(self._kept) < _MOST_GRAPHS:
            return True
        # A program that goes round more addresses than are kept must not make a graph in each call.
        oldest = next(iter(self._kept.values()))
        if self._runs - oldest.last_run < _OLD:
            return False
        torch.cuda.synchronize(self._group.device)  # it may still run
        self._kept.popitem(last=False)
        return True

    def _capture(self, enqueue: Callable[[], object]) -> Any:
        self.capturing = True
        before = launches.value
        try:
            return _recorder(self._group.device).record(enqueue)
        finally:
            self.capturing = False
            launches.value = before  # what is captured does not run yet


class _Recorder:
    """Captures graphs on a stream that nothing else runs on, with one pool of memory for all of
    them.

    Torch allocates cuBLAS's workspace (32 MiB on Hopper) for each stream on its first product and
    keeps it, so it comes from the pool. Calls on a GPU follow each other, whatever their group, so
    all graphs can share the workspace.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        # PyTorch gives up a pool with its last graph; this one is never run and keeps it.
        self._anchor = self.record(lambda: torch.zeros(1, device=device))

    def record(self, enqueue: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """A graph of what ``enqueue()`` does."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), releases.put_off(), _without_collection():
            # Other threads, such as NCCL's watchdog, may go on calling the driver.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                enqueue()
            finally:
                graph.capture_end()
        return graph


@functools.cache
def _recorder(device: torch.device) -> _Recorder:
    """One per GPU and process: each group's own would leave a workspace of cuBLAS behind."""
    return _Recorder(device)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: what finalizers of any library do to the driver would make
    a capture invalid.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
