"""Keep compiled kernels in one folder, whatever else moves Triton's.

Inductor and vLLM set ``TRITON_CACHE_DIR`` for kernels of their own: to a folder for each rank and
model, and when they compile but not when they load what they have compiled before. Kernels of
operators are the same for all of these. Where they went along, each rank would compile all of them,
and the second start of an engine would not find what the first one has left.

So they stay where Triton kept kernels when this package was imported. Triton asks for a folder in
the thread that compiles, and knows one setting for a whole process; the class that it asks tells
threads apart.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from interlace.comm.runtime.interpreter import interpreting

_chosen = os.environ.get("TRITON_CACHE_DIR")


class _Thread(threading.local):
    is_ours = False


_thread = _Thread()


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Keep the kernels that this thread compiles within the context in the folder of operators."""
    if interpreting():
        yield
        return
    before = _thread.is_ours
    begin()
    try:
        yield
    finally:
        _thread.is_ours = before


def begin() -> None:
    """Keep all kernels that this thread compiles from now on in the folder of operators."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    # A program's own class decides by itself. An assignment would also write to the environment,
    # and processes that are started later would import this package.
    if knobs.cache.manager_class in (None, FileCacheManager):
        knobs.cache.__dict__["manager_class"] = _manager(FileCacheManager)
    _thread.is_ours = True


def _manager(base: type) -> type:
    """Return the class that Triton asks for the folder of a kernel."""

    class Manager(base):  # type: ignore[misc]
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            if override or dump or not _thread.is_ours:
                super().__init__(key, override=override, dump=dump)
                return
            folder = folder_of_kernels() / key
            folder.mkdir(parents=True, exist_ok=True)
            self.key, self.cache_dir, self.lock_path = key, str(folder), str(folder / "lock")

    return Manager


def folder_of_kernels() -> Path:
    """Return the folder of operators' kernels."""
    from triton import knobs

    return Path(_chosen or knobs.cache.get_triton_dir("cache"))
