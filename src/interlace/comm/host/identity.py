"""Identify the code, libraries and GPU that a process's choices depend on.

Ranks of a group must have equal identities, and so must the writer and the reader of a cache on
disk.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

import torch

from interlace import __version__, environment
from interlace.comm.host.common_profile import is_asked_for, known_profile
from interlace.costs.known_profiles import cached_by_profiles, text_of

PACKAGE = Path(__file__).parents[2]
TABLES = PACKAGE / "tuning" / "tables"
PROFILES = PACKAGE / "costs" / "profiles"
_SOURCES = (".py", ".json")  # modules, and tuned tables


@functools.cache
def digest_of(folder: Path) -> str:
    """Return the SHA-256 of all modules and tuned tables in a folder, in hexadecimal digits.

    The hash covers names and content. Files are read once per process, as loaded code does not
    change.
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def identity(device: torch.device) -> dict[str, str]:
    """Return everything but a call's arguments that choices on ``device`` depend on, by name."""
    gpu = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        shared = getattr(properties, "shared_memory_per_block_optin", 0)
        gpu = (
            f"{properties.name}, {properties.major}.{properties.minor}, "
            f"{shared} bytes of shared memory"
        )
    return {
        "the_version_of_interlace": __version__,
        "the_tuned_tables": digest_of(TABLES)[:16],
        "the_machine_profiles": digest_of(PROFILES)[:16] + profile_digest(device),
        "the_version_of_torch": torch.__version__,
        "the_version_of_Triton": _version_of_triton(),
        "the_model_of_the_GPU": gpu,
    }


def settings() -> dict[str, str]:
    """Return the settings in the environment that all ranks must share, by name.

    A rank that measures its implementations, or its machine, waits for its peers to do so, too; and
    what a limit refuses on one rank, all of them must do without.
    """
    limit = environment.byte_count(environment.LIMIT_VARIABLE)
    return {
        "the_environment's_setting_of_autotuning": str(environment.switch("INTERLACE_AUTOTUNE")),
        "the_environment's_setting_of_measuring_machines": str(is_asked_for()),
        "the_environment's_limit_of_symmetric_memory": f"{environment.LIMIT_VARIABLE}={limit}",
    }


@cached_by_profiles
def profile_digest(device: torch.device) -> str:
    """Return a digest of the profile that counts for a GPU; empty on the CPU backend."""
    if device.type != "cuda":
        return ""
    text = text_of(known_profile(device))
    return f" {hashlib.sha256(text.encode()).hexdigest()[:16]}"


@functools.cache
def _version_of_triton() -> str:
    """Return the version of Triton's package, or ``""`` without one.

    The package's metadata is read, as Triton itself must not be imported before the first kernel.
    """
    for name in ("triton", "pytorch-triton", "triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
