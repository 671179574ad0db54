"""Shortcuts through Triton's interpreter, whose time is Python's; in force only while this package
launches kernels.

Three things take most of an interpreted kernel's time. Types, shapes and tables of element types
are made anew for every
value, though they depend on a few numbers: they are remembered. The language is patched again at
every call of a device
function: once per module is enough. Every sum and product of integers is checked for overflow: GPUs
do not check either.

Triton is as it was outside of :func:`taken`, so that other kernels of the process keep their
checks. Where another Triton keeps something else in its objects, it goes its own way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter
from triton.language import core

_TENSOR = {"handle", "shape", "numel", "type", "dtype"}
_BLOCK = {"element_ty", "shape", "numel", "name"}
_ADDRESS = np.dtype(np.uint64)

_depth = 0


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """Take the shortcuts in this process until the end of the outermost of these contexts, however
    it ends.
    """
    global _depth
    if _depth:
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
        return
    builder = interpreter.interpreter_builder
    before = (
        core.tensor.__init__,
        core.block_type.__init__,
        interpreter._get_np_dtype,
        interpreter._patch_lang,
        builder.options,
    )
    patches = _Patches(interpreter._patch_lang)
    core.tensor.__init__ = _of_tensors(core.tensor.__init__)
    core.block_type.__init__ = _of_block_types(core.block_type.__init__)
    interpreter._get_np_dtype = _of_dtypes(interpreter._get_np_dtype)
    interpreter._patch_lang = patches
    builder.options = _without_checks(builder.options)
    _depth = 1
    try:
        yield
    finally:
        _depth = 0
        patches.undo()
        (
            core.tensor.__init__,
            core.block_type.__init__,
            interpreter._get_np_dtype,
            interpreter._patch_lang,
            builder.options,
        ) = before


@functools.lru_cache(maxsize=4)
def _without_checks(options: Any) -> Any:
    return dataclasses.replace(options, sanitize_overflow=False)


class _Patches:
    """What Triton has replaced in its language for the launches that run within :func:`taken`: once
    for each module.
    """

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._scopes: dict[int, Any] = {}

    def __call__(self, function: Any) -> _Patches:
        # The names of a module identify it: no module goes, and leaves its address to another one,
        # during a launch.
        key = id(function.__globals__)
        if key not in self._scopes:
            self._scopes[key] = self._patch(function)
        return self

    def restore(self) -> None:
        """Called by Triton at the end of a launch, which is not the end of all."""

    def undo(self) -> None:
        while self._scopes:
            self._scopes.popitem()[1].restore()


@functools.lru_cache(maxsize=4)  # what is remembered outlives a launch
def _of_tensors(init: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def remembering(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        found = known.get(key)
        if found is None:
            init(self, handle, type)
            if vars(self).keys() == _TENSOR:
                known[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    return remembering


@functools.lru_cache(maxsize=4)
def _of_block_types(init: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, Any, str]] = {}

    def remembering(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        found = known.get(key)
        if found is None:
            init(self, element_ty, shape)
            if vars(self).keys() == _BLOCK and self.name == f"<{self.shape}, {element_ty}>":
                known[key] = self.shape, self.numel, f"<{self.shape}, "
            return
        self.element_ty = element_ty
        self.shape, self.numel, name = found
        self.name = f"{name}{element_ty}>"

    return remembering


@functools.lru_cache(maxsize=4)
def _of_dtypes(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def remembering(dtype: Any) -> Any:
        if isinstance(dtype, core.block_type):
            dtype = dtype.element_ty
        if isinstance(dtype, core.pointer_type):
            return _ADDRESS
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = look_up(dtype)
        return found

    return remembering
