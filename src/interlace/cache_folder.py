"""The folders in which Interlace remembers what it has measured or computed for a user."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder of that name: in ``INTERLACE_CACHE_DIR``, or in the user's cache.

    The user's cache is ``XDG_CACHE_HOME``, by default ``~/.cache``; the folder need not exist.
    """
    chosen = os.environ.get("INTERLACE_CACHE_DIR")
    if chosen:
        return Path(chosen) / name
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "interlace" / name


def is_own(path: Path) -> bool:
    """Return whether nobody but this user may write to a folder or a file.

    What other users could have written must not be trusted.

    Raises:
        OSError: It does not exist, or cannot be looked at.
    """
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def write_whole(file: Path, contents: str | bytes) -> None:
    """Write a file at once, so that no reader sees half of it; its folder is made private.

    Raises:
        OSError: It cannot be written; what was there before stays.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as part:
            part.write(contents.encode() if isinstance(contents, str) else contents)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
