"""cuBLASMp's products with an all-gather or a reduce-scatter, called through ctypes.

Its matrices are column-major: a row-major weight ``[N, K]`` is its A, transposed; rows ``[M, K]``
are its B, and a row-major result ``[M, N]`` is its D, so that its m is N and its n is M. The
exchange needs NCCL 2.29.2, which is loaded before PyTorch's where that is older. Its product with
an all-reduce overlaps by NVLink's multicast alone, which the benchmark does not use.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.case import Call, Case
from benchmarks.peers.driver import library, needed
from benchmarks.peers.products import WEIGHTS

NAME, DISTRIBUTION = "cuBLASMp", "nvidia-cublasmp-cu13"
INSTALL = (
    "pip install --target FOLDER --no-deps nvidia-cublasmp-cu13==0.10.0.3695 "
    "nvidia-nccl-cu13==2.30.7"
)

_FILE, _NCCL = "nvidia/cublasmp/cu13/lib/libcublasmp.so.0", "nvidia/nccl/lib/libnccl.so.2"
_OLDEST_NCCL = 22902
_COLUMN_MAJOR, _ROW_MAJOR = 0, 1
_TRANSPOSED, _FLOAT32_SUMS, _BFLOAT16, _SPLIT_P2P = 1, 68, 14, 1
_TRANSA, _TRANSB, _ALGORITHM, _EXCHANGED = 0, 1, 3, 27
"""Attributes of a product, and their values: numbers of cublasmp.h and of CUDA's headers."""


def environment(folders: list[str]) -> dict[str, str]:
    """Return LD_PRELOAD with the first NCCL that is new enough."""
    found = library(_NCCL, folders)
    if found is None:
        return {}
    version = ctypes.c_int()
    ctypes.CDLL(found).ncclGetVersion(ctypes.byref(version))
    return {"LD_PRELOAD": found} if version.value >= _OLDEST_NCCL else {}


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


def _checked(function: Any, *arguments: Any) -> None:
    if status := function(*arguments):
        raise RuntimeError(f"{function.__name__} returned status {status}")


class Library:
    """The library, a communicator, and the grids of ranks on this rank."""

    def __init__(self) -> None:
        # PyTorch has loaded NCCL, or LD_PRELOAD another one; the name finds that again.
        nccl, self.calls = ctypes.CDLL("libnccl.so.2"), ctypes.CDLL(needed(_FILE))
        rank, ranks, identity = dist.get_rank(), dist.get_world_size(), _UniqueId()
        if rank == 0:
            _checked(nccl.ncclGetUniqueId, ctypes.byref(identity))
        box = [bytes(identity)]
        dist.broadcast_object_list(box, src=0)
        identity = _UniqueId.from_buffer_copy(box[0])
        communicator, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        _checked(nccl.ncclCommInitRank, ctypes.byref(communicator), ranks, identity, rank)
        self.stream = torch.cuda.current_stream().cuda_stream
        self.call("Create", ctypes.byref(self.handle), ctypes.c_void_p(self.stream))
        self.tall, self.wide = ctypes.c_void_p(), ctypes.c_void_p()
        for grid, rows, columns, layout in (
            (self.tall, ranks, 1, _COLUMN_MAJOR),
            (self.wide, 1, ranks, _ROW_MAJOR),
        ):
            sizes = ctypes.c_int64(rows), ctypes.c_int64(columns)
            self.call("GridCreate", *sizes, layout, communicator, ctypes.byref(grid))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library, which must return 0."""
        _checked(getattr(self.calls, f"cublasMp{name}"), *arguments)

    def allocate(self, nbytes: int) -> ctypes.c_void_p:
        """Return memory that the other ranks reach, on both grids, until the process ends.

        Collective.
        """
        address = ctypes.c_void_p()
        size = ctypes.c_size_t(nbytes)
        self.call("Malloc", self.tall, ctypes.byref(address), size)
        self.call("BufferRegister", self.wide, address, size)
        return address

    def matrix(self, grid: Any, rows: int, columns: int, *blocks: int) -> ctypes.c_void_p:
        """Describe a matrix by its sizes, those of a rank's block, and the leading dimension."""
        found = ctypes.c_void_p()
        block_rows, block_columns, leading = blocks
        sizes = (rows, columns, block_rows, block_columns, 0, 0, leading)
        numbers = [ctypes.c_int64(size) for size in sizes]
        self.call("MatrixDescriptorCreate", *numbers, _BFLOAT16, grid, ctypes.byref(found))
        return found


@functools.cache
def _library() -> Library:
    return Library()


class Product:
    """A product with its matrices and its workspace.

    Args:
        sizes: m, n and k of the whole product, as the library counts them.
        matrices: Descriptors of A, B and D.
        exchanged: Whether sums are exchanged, in bfloat16.
        tensors: A weight, rows, and a result.
    """

    def __init__(
        self, sizes: tuple[int, int, int], matrices: tuple[Any, Any, Any], *tensors: torch.Tensor,
        exchanged: bool,
    ) -> None:  # fmt: skip
        self.library, self.matmul = _library(), ctypes.c_void_p()
        call = self.library.call
        call("MatmulDescriptorCreate", ctypes.byref(self.matmul), _FLOAT32_SUMS)
        attributes = {_TRANSA: _TRANSPOSED, _TRANSB: 0, _ALGORITHM: _SPLIT_P2P}
        if exchanged:
            attributes[_EXCHANGED] = _BFLOAT16
        for attribute, value in attributes.items():
            number = ctypes.c_int32(value)
            size = ctypes.c_size_t(4)
            call("MatmulDescriptorSetAttribute", self.matmul, attribute, ctypes.byref(number), size)
        self.sizes = [ctypes.c_int64(size) for size in sizes]
        self.matrices, one = matrices, ctypes.c_int64(1)
        self.first, self.factors = (one, one), (ctypes.c_float(1.0), ctypes.c_float(0.0))
        on_device, on_host = ctypes.c_size_t(), ctypes.c_size_t()
        found = ctypes.byref(on_device), ctypes.byref(on_host)
        call("Matmul_bufferSize", *self._arguments(*tensors), *found)
        self.workspace = self.library.allocate(max(on_device.value, 1))
        host = ctypes.create_string_buffer(max(on_host.value, 1))
        self.work = self.workspace, on_device, host, on_host

    def _arguments(self, *tensors: torch.Tensor) -> list[Any]:
        w, x, y = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
        (alpha, beta), (a, b, d) = map(ctypes.byref, self.factors), self.matrices
        return [
            self.library.handle, self.matmul, *self.sizes, alpha, w, *self.first, a, x, *self.first,
            b, beta, None, *self.first, None, y, *self.first, d,
        ]  # fmt: skip

    def run(self, w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Enqueue the product on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        if stream != self.library.stream:
            self.library.call("SetStream", self.library.handle, ctypes.c_void_p(stream))
            self.library.stream = stream
        self.library.call("Matmul", *self._arguments(w, x, y), *self.work)
        return y


def _in_its_memory(product: Product, x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in memory that is registered with the library."""
    address = product.library.allocate(x.nbytes).value

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (x.nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
            "strides": None,
        }  # fmt: skip

    copy = torch.as_tensor(Memory(), device=x.device).view(x.dtype).view(x.shape)
    return copy.copy_(x)


def _ways(product: Product, inputs: Any, y: torch.Tensor, **rows: torch.Tensor) -> dict[str, Call]:
    def run(i: int, x: torch.Tensor) -> torch.Tensor:
        return product.run(inputs.weights[i % WEIGHTS], x, y)

    names = {name.replace("_", " "): x for name, x in rows.items()}
    return {
        f"cuBLASMp, {name}": functools.partial(run, x=x) for name, x in names.items()
    }  # fmt: skip


def all_gather_gemm(case: Case) -> dict[str, Call]:
    """Return calls with rows in ordinary memory, and in the library's own."""
    inputs, ranks, known = case.inputs, dist.get_world_size(), _library()
    m, n, k, make = inputs.rows, inputs.columns, inputs.inner, known.matrix
    y, own = torch.empty_like(inputs.y), m // ranks
    matrices = (
        make(known.wide, k, n * ranks, k, n, k),
        make(known.wide, k, m, k, own, k),
        make(known.tall, n * ranks, m, n, own, n),
    )
    sizes = n * ranks, m, k
    product = Product(sizes, matrices, inputs.weights[0], inputs.shard, y, exchanged=False)
    registered = _in_its_memory(product, inputs.shard)
    return _ways(product, inputs, y, any_rows=inputs.shard, rows_in_its_memory=registered)


def gemm_reduce_scatter(case: Case) -> dict[str, Call]:
    """Return a call whose sums are exchanged in bfloat16."""
    inputs, ranks, known = case.inputs, dist.get_world_size(), _library()
    m, n, k, make = inputs.rows, inputs.columns, inputs.inner, known.matrix
    y, own = torch.empty_like(inputs.part), m // ranks
    matrices = (
        make(known.tall, k * ranks, n, k, n, k),
        make(known.tall, k * ranks, m, k, own, k),
        make(known.wide, n, m, n, own, n),
    )
    sizes = n, m, k * ranks
    product = Product(sizes, matrices, inputs.weights[0], inputs.x, y, exchanged=True)
    return _ways(product, inputs, y, bfloat16_exchanged=inputs.x)


WAYS: dict[str, Callable[[Case], dict[str, Call]]] = {
    "all-gather + GEMM": all_gather_gemm,
    "GEMM + reduce-scatter": gemm_reduce_scatter,
}
