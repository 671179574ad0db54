"""Copies by the GPU's copy engines, which take no processor; on the CPU backend, by the processor there is."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from interlace.comm import cpu_faults
from interlace.comm.group import Group
from interlace.errors import BackendError


@contextlib.contextmanager
def beside(group: Group, *, first: bool = False) -> Iterator[None]:
    """What is enqueued within runs beside what the current stream gets later, and after what it got before.

    End with :func:`join`. The CPU backend runs it at once.

    Args:
        first: let its launches have processors before the current stream's; for the whole of one ``beside`` and ``join``.
    """
    if group.backend == "cpu":
        yield
        return
    side = group.side_stream(first)
    side.wait_stream(torch.cuda.current_stream(group.device))
    with torch.cuda.stream(side):
        yield


def join(group: Group, *, first: bool = False) -> None:
    """Let the current stream go on once all that ran :func:`beside` it is done."""
    if group.backend == "cuda":
        torch.cuda.current_stream(group.device).wait_stream(group.side_stream(first))


def copy(group: Group, target: int, source: int, nbytes: int, peer: int) -> None:
    """Copy ``nbytes`` between two addresses mapped here, the source in ``peer``'s memory, on the current stream.

    Raises:
        BackendError: the driver refuses.
    """
    if group.backend == "cpu":
        ctypes.memmove(target, source, nbytes)
        if peer != group.rank:
            cpu_faults.traffic().count_fetch(peer, nbytes)
        return
    from cuda.bindings import driver

    (error,) = driver.cuMemcpyDtoDAsync(target, source, nbytes, torch.cuda.current_stream(group.device).cuda_stream)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"a copy of {nbytes} bytes from rank {peer} must be accepted by the CUDA driver; got {error.name}.")
