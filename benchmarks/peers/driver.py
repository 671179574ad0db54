"""What a peer's driver is, the names of all drivers, and where their packages are found.

A driver is a module with these names, which imports its peer only within the functions of ``WAYS``:

- ``NAME`` of the peer, and ``DISTRIBUTION`` of its package;
- ``INSTALL``, the command that installs it;
- ``WAYS``: for each capability a function of a :class:`~benchmarks.peers.case.Case` that returns
  calls by name, or raises :class:`Refused`. It runs on all ranks;
- ``environment(folders)``, if there is one: variables that the peer's processes start with;
- ``capturing()``, if there is one: a context in which a CUDA graph with the peer's calls is made.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

DRIVERS = {
    "cuBLASMp": "benchmarks.peers.cublasmp",
    "QuACK": "benchmarks.peers.quack",
    "LigerCute": "benchmarks.peers.liger_cute",
    "FBGEMM": "benchmarks.peers.fbgemm",
    "FlashInfer": "benchmarks.peers.flashinfer",
    "vLLM": "benchmarks.peers.vllm",
}

WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "CUBLASMP_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""Interlace does not use NVLink's multicast, so peers and stock pairs go without, too."""


class Refused(Exception):
    """The peer does not take calls of these sizes."""


def load(name: str) -> Any:
    """Return the driver of a name of ``DRIVERS``, or of a module's full name."""
    return importlib.import_module(DRIVERS.get(name, name))


def folders_of(driver: Any, path: Path | None) -> list[str]:
    """Return the folders in which a peer's packages are looked for before all others.

    A part of the packages may be in a folder named for the peer. ``pip install --target`` does not
    apply files of the kind ``.pth``, so what CUTLASS's package has in one is added here.
    """
    if path is None:
        return []
    found = [folder for folder in (path / driver.NAME, path) if folder.is_dir()]
    more = [folder / "nvidia_cutlass_dsl" / "dsl_packages" for folder in found]
    return [str(folder.resolve()) for folder in (*found, *more) if folder.is_dir()]


def version(driver: Any, folders: list[str]) -> str | None:
    """Return the version of a peer's package, or None where there is none."""
    found = importlib.metadata.distributions(name=driver.DISTRIBUTION, path=[*folders, *sys.path])
    return next((str(distribution.version) for distribution in found), None)


def library(name: str, folders: list[str]) -> str | None:
    """Return the first file of a name such as ``nvidia/nccl/lib/libnccl.so.2``."""
    files = (Path(folder) / name for folder in [*folders, *sys.path])
    return next((str(file) for file in files if file.is_file()), None)


def needed(name: str) -> str:
    """Return the file that :func:`library` finds on ``sys.path``.

    Raises:
        ImportError: There is none.
    """
    file = library(name, [])
    if file is None:
        raise ImportError(f"{name} is in no folder of sys.path")
    return file
