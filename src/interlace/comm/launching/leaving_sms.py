"""Let the libraries' products leave SMs to a kernel that runs beside them.

Libraries like to make as many tiles as a GPU has SMs. Beside a kernel that holds two SMs such a
product takes twice as long, as its last two tiles begin when the others have ended. Told how many
SMs there are, libraries take other tiles.

Sources: ``cublasSetSmCountTarget`` of NVIDIA's cuBLAS library, since CUDA 11.5. It applies to
``torch.mm`` and ``torch.bmm``; products with a bias in one kernel go by cuBLASLt, which does not
look at it. PyTorch's grouped products have as many programs as there are SMs, less the number that
``torch._C._set_sm_carveout_experimental`` sets; PyTorch warns once that it may remove that
function.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from interlace.comm.launching.kernels import processors

log = logging.getLogger("interlace.comm")


@contextlib.contextmanager
def leaving_sms(count: int, device: torch.device) -> Iterator[None]:
    """Tell cuBLAS that ``count`` SMs are taken, for products that this thread enqueues within.

    Elsewhere than on NVIDIA's GPUs, or without the library, it does nothing.

    Args:
        count: SMs that another kernel holds.
        device: The device of the products, which is the current one.
    """
    library = _library() if device.type == "cuda" else None
    if library is None:
        yield
        return
    # PyTorch has one handle for each thread and GPU.
    handle, before = ctypes.c_void_p(torch.cuda.current_blas_handle()), ctypes.c_int()
    library.cublasGetSmCountTarget(handle, ctypes.byref(before))
    library.cublasSetSmCountTarget(handle, max(1, processors(device) - count))
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, before)


@contextlib.contextmanager
def grouped_leaving_sms(count: int, device: torch.device) -> Iterator[None]:
    """Tell PyTorch that ``count`` SMs are taken, for grouped products that are enqueued within.

    Other threads' products leave them as well. Without such a function of PyTorch's, and elsewhere
    than on NVIDIA's GPUs, it does nothing.
    """
    set_count = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if set_count is None or device.type != "cuda" or torch.version.cuda is None:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    set_count(count)
    try:
        yield
    finally:
        set_count(before)


@functools.cache
def _library() -> Any:
    """Return the cuBLAS library that PyTorch has loaded; None if there is none."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        # Never another copy of the library, to which PyTorch's handles would mean nothing.
        return ctypes.CDLL(f"libcublas.so.{major}", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError as error:
        log.debug("products leave no SMs to kernels beside them: %s", error)
        return None
