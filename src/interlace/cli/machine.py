"""Describe what measurements record: versions and devices of this machine, command and time."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Any

import torch

from interlace import __version__
from interlace.cli.console import command_line, now


def package_version(name: str) -> str:
    """Return the installed version of a package; empty if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver_version() -> str:
    """Return the version of the NVIDIA kernel driver; empty without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    # The file names the driver's version in a sentence: "... Module  580.65.06  Release ...".
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match.group(1) if match else ""


def nccl_version() -> str:
    """Return the version of NCCL; empty without a GPU."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def describe() -> dict[str, Any]:
    """Return versions, and the names of the GPUs."""
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": driver_version(),
        "cuda": torch.version.cuda or "",
        "torch": str(torch.__version__),
        "triton": package_version("triton"),
        "nccl": nccl_version(),
        "numpy": package_version("numpy"),
        "python": platform.python_version(),
        "interlace": __version__,
    }


def header() -> dict[str, Any]:
    """Return the first entries of a command's document: the machine, the command and the time."""
    return {"machine": describe(), "command": command_line(), "date": now()}
