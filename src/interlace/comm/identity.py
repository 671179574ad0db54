"""What a process decides by: its code, its libraries, its GPU. Ranks of a group, and caches on
disk, must not mix two.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

import torch

from interlace import __version__

PACKAGE = Path(__file__).parents[1]
TABLES = PACKAGE / "tuning" / "tables"
_SOURCES = (".py", ".json")  # modules, and tuned tables


@functools.cache
def digest_of(folder: Path) -> str:
    """A hash of all modules and tuned tables in a folder, by name and content.

    Read once per process, as code that is loaded does not change.
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def identity(device: torch.device) -> dict[str, str]:
    """What choices on ``device`` depend on beside a call's arguments, by name."""
    gpu = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        shared = getattr(properties, "shared_memory_per_block_optin", 0)
        gpu = f"{properties.name}, {properties.major}.{properties.minor}, {shared} bytes of shared memory"
    return {
        "the_version_of_interlace": __version__,
        "the_tuned_tables": digest_of(TABLES)[:16],
        "the_version_of_torch": torch.__version__,
        "the_version_of_Triton": _version_of_triton(),
        "the_model_of_the_GPU": gpu,
    }


@functools.cache
def _version_of_triton() -> str:
    """By the metadata of the package: Triton itself is imported by the first kernel, not before."""
    for name in ("triton", "pytorch-triton", "triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
