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

import ast
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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


def hash_callees_first(function: Any) -> None:
    """Let Triton hash a kernel after the functions that it calls, and those after theirs.

    By a kernel's hash a folder has it. Up to Triton 3.8 the hash covers the constants of a function
    that is called only if that function has been hashed before, for another kernel: it depends on
    what a process has compiled before. Another one, which begins with another kernel, looks for
    another hash, and compiles what lies there.

    Args:
        function: A ``@triton.jit`` function; in the interpreter, where nothing is hashed, a plain
            one.
    """
    if interpreting() or getattr(function, "hash", "") is not None:
        return
    _hash(function, set())


def _hash(function: Any, seen: set[int]) -> None:
    seen.add(id(function))
    for node in ast.walk(function.parse()):
        called = _value_of(node, function.__globals__)
        # A function has a hash, None at first; nothing else that a kernel names has.
        if getattr(called, "hash", "") is None and id(called) not in seen:
            _hash(called, seen)
    function.cache_key  # noqa: B018


def _value_of(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Return what a name or an attribute of one stands for; None for everything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, names), node.attr, None)
    return None


def folder_of_kernels() -> Path:
    """Return the folder of operators' kernels."""
    from triton import knobs

    return Path(_chosen or knobs.cache.get_triton_dir("cache"))
