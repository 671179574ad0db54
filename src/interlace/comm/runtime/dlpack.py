"""Make torch tensors over memory of another owner, which the tensor's storage keeps alive.

Several mappings of one range, some of them backed by other GPUs, cannot be described by the usual
interfaces: ``__cuda_array_interface__`` asks the driver which device owns the address, and gets the
peer. DLPack states the device.

The owner is an attribute of the storage's Python object, which lives as long as the storage. A
DLPack deleter written in Python could not let go of it: a storage may die while an exception
unwinds torch's C++ (non-reentrant activation checkpoints stop so), and Python functions must not be
called then. The deleter is C's ``free``.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import struct
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA, _ROCM = 1, 2, 10
_INT, _UINT, _FLOAT, _BFLOAT = 0, 1, 2, 4
_CODES = {
    torch.uint8: (_UINT, 8), torch.int32: (_INT, 32), torch.int64: (_INT, 64),
    torch.float16: (_FLOAT, 16), torch.float32: (_FLOAT, 32), torch.bfloat16: (_BFLOAT, 16),
}  # fmt: skip
"""Codes and bits of element types; not all that PyTorch can read, and all that come often."""

_MANAGED = struct.Struct("=QiiiBBHQQQQQ")
"""``DLManagedTensor`` with the structures in it: data, type and index of the device, number of
dimensions, code, bits and lanes of an element, shape, strides, offset, context, and deleter.
"""

# By an interface that does not let other threads run: what is called returns at once.
_c = ctypes.PyDLL(None)
_c.malloc.restype = ctypes.c_void_p
_c.malloc.argtypes = (ctypes.c_size_t,)
_FREE = ctypes.cast(_c.free, ctypes.c_void_p).value

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@functools.lru_cache(maxsize=1024)  # asked for up to four times in every call
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    sizes = (max(size, 1) for size in reversed(shape[1:]))
    return (*itertools.accumulate(sizes, operator.mul, initial=1),)[::-1] if shape else ()


def tensor_at(
    address: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    owner: object,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return a tensor over existing memory, which is no view of another one.

    Args:
        address: Address of element 0.
        shape: Size of each dimension, in elements.
        dtype: Element type.
        device: Device whose kernels will use the tensor (for peers' memory: this rank's device).
        owner: Object that is kept alive as long as any view of the tensor.
        strides: Stride of each dimension, in elements; None for a contiguous tensor.
    """
    if strides is None:
        strides = contiguous_strides(tuple(shape))
    if dtype not in _CODES:
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        nbytes = 0 if 0 in shape else (last + 1) * dtype.itemsize
        raw = tensor_at(address, (nbytes,), torch.uint8, device, owner)
        empty = torch.empty(0, dtype=dtype, device=device)
        return empty.set_(raw.untyped_storage(), 0, tuple(shape), tuple(strides))
    count, (code, bits) = len(shape), _CODES[dtype]
    kind = _CPU if device.type == "cpu" else (_ROCM if torch.version.hip else _CUDA)
    # torch copies both while it makes the tensor.
    sizes = (ctypes.c_int64 * (2 * count))(*shape, *strides)
    at_shape = ctypes.addressof(sizes)
    at_strides = at_shape + count * ctypes.sizeof(ctypes.c_int64)
    managed = _MANAGED.pack(
        address, kind, device.index or 0, count, code, bits, 1, at_shape, at_strides, 0, 0, _FREE
    )
    at_managed = _c.malloc(len(managed))
    ctypes.memmove(at_managed, managed, len(managed))
    tensor: torch.Tensor = from_dlpack(_new_capsule(at_managed, b"dltensor", None))
    tensor.untyped_storage()._interlace_owner = owner  # type: ignore[attr-defined]
    return tensor
