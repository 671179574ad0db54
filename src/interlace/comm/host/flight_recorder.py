"""Add a failed wait to the dump of PyTorch's flight recorder, where a program asks for one.

The recorder keeps the last collectives of ``torch.distributed``, and PyTorch writes them to a file
per rank when one of them hangs. A rank that waited for a put in vain may be the reason. A dump is
asked for by PyTorch's own environment variables: the recorder's size and the dump's path.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.cache_folder import is_own, write_whole
from interlace.errors import PeerTimeoutError

# The second name of each pair is the older one.
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")

KEY = "interlace"
"""The key under which a dump has the failed waits of its rank, a list of dictionaries."""


def add(error: PeerTimeoutError) -> None:
    """Add a failed wait to this rank's dump; write one if there is none yet.

    Nothing happens if no dump is asked for. A file that cannot be read or written is left as it is,
    whatever the reason: the error that is about to be raised matters more.
    """
    size, prefix = _first_of(_SIZES), _first_of(_PREFIXES)
    if not prefix or not size.isdecimal() or not int(size):
        return
    # A file that is no dump may raise anything when it is unpickled.
    with contextlib.suppress(Exception):
        # PyTorch names the file by the rank in the default group.
        in_group = dist.is_available() and dist.is_initialized()
        file = Path(f"{prefix}{dist.get_rank() if in_group else 0}")
        facts = {"error": type(error).__name__, "message": str(error), **vars(error)}
        dump = _existing(file) or _recorded()
        failures = dump.setdefault(KEY, [])
        # The error is raised by every later call as well.
        if facts not in failures:
            failures.append(facts)
            write_whole(file, pickle.dumps(dump, protocol=2))


def _first_of(names: tuple[str, ...]) -> str:
    """Return the value of the first environment variable that is set, or an empty string."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _existing(file: Path) -> dict[str, Any] | None:
    """Return the dump that is in a file, or None if there is no file of this user."""
    if not file.is_file() or not is_own(file):
        return None
    dump: dict[str, Any] = _Unpickler(io.BytesIO(file.read_bytes())).load()
    return dump


class _Unpickler(pickle.Unpickler):
    """Read dictionaries, lists, texts and numbers only, so that no file is executed."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function but torch's that make lists and dictionaries."""
        if module != "torch.jit._pickle":
            raise pickle.UnpicklingError(f"a dump must hold plain values; got {module}.{name}.")
        return super().find_class(module, name)


def _recorded() -> dict[str, Any]:
    """Return what the recorder holds now; nothing where the installed PyTorch has no recorder."""
    recorder = getattr(torch._C, "_distributed_c10d", None)
    for name in _DUMPS:
        if hasattr(recorder, name):
            dump: dict[str, Any] = pickle.loads(getattr(recorder, name)())
            return dump
    return {"version": "", "pg_config": {}, "entries": []}
