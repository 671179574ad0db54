"""Write to a GPU's memory while all of its queues may be blocked.

The streams of a process share a few queues to the device: 8, or ``CUDA_DEVICE_MAX_CONNECTIONS``; 2
under NVIDIA's Multi-Process Service. A stream that waits for a word in memory, or for such a
stream, keeps its queue. On an H200, once as many streams wait as there are queues, nothing that is
enqueued on any other stream begins, whatever its priority. A context of its own has other queues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from interlace.comm.runtime.driver import driver, require_enqueued, values_of
from interlace.errors import BackendError

Write = Callable[[int, int], None]
"""Write a 32-bit number to an address: ``write(address, number)``; it is there on return."""


@contextlib.contextmanager
def writer(device: torch.device) -> Iterator[Write]:
    """Yield a function that writes words to a GPU's memory, in a context that is made for it.

    Making it takes about 0.1 s and some hundred MiB of the GPU's memory. Without that memory, words
    are written by a stream of PyTorch's context, which may be blocked.
    """
    cu = driver()
    try:
        context = _new_context(values_of(cu.cuDeviceGet(device.index)))
    except BackendError:
        with torch.cuda.device(device):
            yield _write_by(torch.cuda.Stream(device).cuda_stream)
        return
    try:
        non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        yield _write_by(values_of(cu.cuStreamCreate(non_blocking)))
    finally:
        cu.cuCtxPopCurrent()
        cu.cuCtxDestroy(context)


def _new_context(device: Any) -> Any:
    """Return a new context, which is this thread's current one."""
    cu = driver()
    try:
        return values_of(cu.cuCtxCreate(None, 0, device))
    except TypeError:  # before CUDA 13 it takes no parameters of its own
        return values_of(cu.cuCtxCreate(0, device))


def _write_by(stream: Any) -> Write:
    cu = driver()

    def write(address: int, number: int) -> None:
        result = cu.cuStreamWriteValue32(stream, address, number, 0)
        require_enqueued(result, "a write of a word")
        values_of(cu.cuStreamSynchronize(stream))

    return write
