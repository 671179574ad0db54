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
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA, _ROCM = 1, 2, 10
_UINT = 1  # kDLUInt


class _Managed(ctypes.Structure):
    """Mirror ``DLManagedTensor``, with the fields of the structures in it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_c = ctypes.CDLL(None)
_c.malloc.restype = ctypes.c_void_p
_c.malloc.argtypes = (ctypes.c_size_t,)
_FREE = ctypes.cast(_c.free, ctypes.c_void_p).value

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def bytes_at(
    address: int, shape: Sequence[int], strides: Sequence[int], device: torch.device, owner: object
) -> torch.Tensor:
    """Return a uint8 tensor over existing memory.

    Args:
        address: Address of element 0.
        shape: Size of each dimension, in bytes.
        strides: Stride of each dimension, in bytes.
        device: Device whose kernels will use the tensor (for peers' memory: this rank's device).
        owner: Object that is kept alive as long as any view of the tensor.
    """
    ndim = len(shape)
    kind = _CPU if device.type == "cpu" else (_ROCM if torch.version.hip else _CUDA)
    managed = _Managed(
        data=address,
        device_type=kind,
        device_index=device.index or 0,
        ndim=ndim,
        type_code=_UINT,
        type_bits=8,
        type_lanes=1,
        # torch copies both while it makes the tensor.
        shape=(ctypes.c_int64 * ndim)(*shape),
        strides=(ctypes.c_int64 * ndim)(*strides),
        deleter=_FREE,
    )
    address_of_managed = _c.malloc(ctypes.sizeof(managed))
    ctypes.memmove(address_of_managed, ctypes.addressof(managed), ctypes.sizeof(managed))
    tensor: torch.Tensor = from_dlpack(_new_capsule(address_of_managed, b"dltensor", None))
    tensor.untyped_storage()._interlace_owner = owner  # type: ignore[attr-defined]
    return tensor


def view_as(raw: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return uint8 ``[..., n_bytes]`` as ``[..., *shape]`` of ``dtype``, without a copy.

    Only the last dimension of ``raw`` is reinterpreted; a leading dimension keeps its stride.
    """
    lead = raw.shape[:-1]
    typed = raw.view(dtype)
    inner = [1]
    for size in reversed(shape[1:]):
        inner.insert(0, inner[0] * size)
    strides = [*typed.stride()[:-1], *(inner if shape else [])]
    return typed.as_strided([*lead, *shape], strides)
