"""Memory whose owner is gone is unmapped here: at once, or once nothing stands against it.

A finalizer runs wherever Python happens to be, perhaps while a CUDA graph is being captured, in the
middle of an allocation, or in a thread of a data loader. Unmapping a GPU's memory has to wait for
the GPU first, which makes a capture invalid. So finalizers hand their work to one queue, and it is
done when that is safe.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch


class ReleaseQueue:
    """Releases that finalizers have asked for, each with the device whose kernels may still use the
    memory.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.device, Callable[[], object]]] = deque()
        self._holders: list[None] = []
        self._emptying = threading.Lock()

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, device: torch.device, release: Callable[[], object]) -> None:
        """Call ``release`` once ``device`` is idle: now, or in :meth:`empty` if nothing may wait
        for the device now.

        Only the main thread does it at once: what another thread may be capturing cannot be asked
            for.
        """
        self._pending.append((device, release))
        if device.type == "cpu" or threading.current_thread() is threading.main_thread():
            self.empty()

    def empty(self) -> None:
        """Do what is pending, unless the current stream is being captured or somebody has
        :meth:`put_off` all releases.

        Raises:
            Exception: whatever a release raises. A device that cannot be waited for keeps its
                releases pending.
        """
        # Neither lock nor list may make a finalizer wait that interrupts their holder in the same
        # thread.
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
        """Nothing is released meanwhile: while a list of free memory changes, or a graph is
        captured.
        """
        self._holders.append(None)
        try:
            yield
        finally:
            self._holders.pop()


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


releases = ReleaseQueue()
"""Of this process."""
