"""Unmap memory whose owner is gone, at once or as soon as that is safe.

A finalizer may run at any point of a program, perhaps while a CUDA graph is being captured, in the
middle of an allocation, or in a thread of a data loader. Unmapping a GPU's memory has to wait for
the GPU first, which makes a capture invalid. So finalizers put their releases into one queue, which
is emptied when that is safe.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch


class ReleaseQueue:
    """Queue releases, each with the device whose kernels may still use the memory."""

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.device, Callable[[], object]]] = deque()
        self._holders: list[None] = []
        self._emptying = threading.Lock()

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, device: torch.device, release: Callable[[], object]) -> None:
        """Call ``release`` once ``device`` is idle: now if that is safe, or in :meth:`empty`."""
        self._pending.append((device, release))
        # Only the main thread may wait for a GPU now: CUDA reports captures of the calling thread's
        # stream only, and the main thread may be capturing.
        if device.type == "cpu" or threading.current_thread() is threading.main_thread():
            self.empty()

    def empty(self) -> None:
        """Perform all pending releases, unless the current stream is being captured.

        Nothing happens within :meth:`put_off` either.

        Raises:
            Exception: Any error of a release; later releases stay pending. If waiting for a device
                fails, its releases stay pending as well.
        """
        # A finalizer may interrupt this method in the same thread, so the lock must not block.
        if (
            not self._pending
            or self._holders
            or _capturing()
            or not self._emptying.acquire(blocking=False)
        ):
            return
        try:
            idle: set[torch.device] = set()
            while self._pending and not self._holders:
                device, release = self._pending[0]
                if device.type == "cuda" and device not in idle:
                    torch.cuda.synchronize(device)
                    idle.add(device)
                self._pending.popleft()
                release()
        finally:
            self._emptying.release()

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Put off all releases within the context.

        Callers change a list of free memory, or capture a graph, in which a release must not
        interfere.
        """
        self._holders.append(None)
        try:
            yield
        finally:
            self._holders.pop()


def _capturing() -> bool:
    """Return whether the current stream is being captured; CUDA is not initialised for that."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


releases = ReleaseQueue()
"""Queue of this process."""
