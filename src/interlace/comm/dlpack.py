"""Make torch tensors over memory of another owner, which the tensor's storage keeps alive.

Several mappings of one range, some of them backed by other GPUs, cannot be described by the usual
interfaces: ``__cuda_array_interface__`` asks the driver which device owns the address, and gets the
peer. DLPack states the device, and its deleter runs when the last view of the storage is gone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA, _ROCM = 1, 2, 10
_UINT8 = (1, 8, 1)  # DLDataType: code kDLUInt, bits, lanes


class _Device(ctypes.Structure):
    """Mirror ``DLDevice``."""

    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    """Mirror ``DLDataType``."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """Mirror ``DLTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """Mirror ``DLManagedTensor``; its deleter's type refers to it, so its fields follow below."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

# The C structures of each live DLPack tensor and the owner of its memory, by the address of the
# outermost structure. DLPack holds addresses only, so Python must keep the objects.
_alive: dict[int, tuple[Any, ...]] = {}


def _release(managed: Any) -> None:
    """Let go of a tensor's structures and owner; DLPack's deleter."""
    _alive.pop(ctypes.addressof(managed.contents), None)


_release_c = _Deleter(_release)
# The last tensors die while the interpreter shuts down, after this module's globals are gone, so
# the deleter must never be freed.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_release_c))

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
    shape_c = (ctypes.c_int64 * ndim)(*shape)
    strides_c = (ctypes.c_int64 * ndim)(*strides)
    kind = _CPU if device.type == "cpu" else (_ROCM if torch.version.hip else _CUDA)
    managed = _Managed(
        tensor=_Tensor(
            data=address,
            device=_Device(kind, device.index or 0),
            ndim=ndim,
            dtype=_DataType(*_UINT8),
            shape=shape_c,
            strides=strides_c,
            byte_offset=0,
        ),
        context=None,
        deleter=_release_c,
    )
    key = ctypes.addressof(managed)
    _alive[key] = (managed, shape_c, strides_c, owner)
    tensor: torch.Tensor = from_dlpack(_new_capsule(key, b"dltensor", None))
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
