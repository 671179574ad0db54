"""Speed up Triton's interpreter, and mend its products, while this package launches kernels.

Four activities of Python take most of an interpreted kernel's time, and are cut short:

- Types, shapes and tables of element types are made anew for every value, though they depend on a
  few numbers. They are cached.
- Every operation on two values works out the dtype and the shape of its result, though most have
  two values of the same dtype or of the same shape, or a value and a small integer.
- The language is patched again at every call of a device function, and every function of it is
  wrapped twice. Once is enough.
- Every sum and product of integers is checked for overflow. GPUs do not check either.

Its ``tl.dot`` is NumPy's product of matrices, which takes no bfloat16 and adds up an element in an
order that depends on the matrices' sizes and on the element's place. GPUs do neither, so ``tl.dot``
multiplies in the dtype of the sum, and adds up in the order of K.

Triton is unchanged outside of :func:`taken`, so that other kernels of the process keep their
checks. A version of Triton that keeps other fields in its objects runs without the caches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as language
import triton.runtime.interpreter as interpreter
from triton.language import core, semantic

_TENSOR = {"handle", "shape", "numel", "type", "dtype"}
_BLOCK = {"element_ty", "shape", "numel", "name"}
_ADDRESS = np.dtype(np.uint64)
# Dtypes of which two values have a result of the same dtype, whatever the operation. Not float16
# and its like, which are divided as float32.
_CLOSED = {"int1", "int32", "int64", "fp32"}
_INTEGERS = {"int32": range(-(1 << 31), 1 << 31), "int64": range(-(1 << 63), 1 << 63)}
# What all functions of the language run that are marked as such: they ask for the argument
# _semantic, which every patched function gives, and call the function itself.
_MARKED = core.program_id.__code__

_depth = 0
_originals: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """Take the shortcuts in this process until the end of the outermost of these contexts."""
    global _depth
    # Launches are nested if a kernel's launch runs within another context that has taken them.
    if not _depth:
        _shorten()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _restore()


def _shorten() -> None:
    """Replace functions of Triton's interpreter by quicker ones."""
    for owner, name, quicker in (
        (core.tensor, "__init__", _cached_tensor_init),
        (core.block_type, "__init__", _cached_block_type_init),
        (interpreter, "_get_np_dtype", _cached_np_dtype),
        (interpreter, "_patch_lang", _Patches),
        (interpreter, "_patch_attr", _patched_once),
        (interpreter.interpreter_builder, "options", _without_checks),
        (interpreter.InterpreterBuilder, "create_dot", _dot_in_order),
        (semantic.TritonSemantic, "binary_op_type_checking_impl", _quick_promotion),
        (semantic.TritonSemantic, "broadcast_impl_value", _quick_broadcast),
        (semantic.TritonSemantic, "cast", _quick_cast),
    ):
        original = getattr(owner, name)
        _originals.append((owner, name, original))
        setattr(owner, name, quicker(original))


def _restore() -> None:
    """Undo :func:`_shorten`, and what the language was patched with since."""
    interpreter._patch_lang.undo()
    while _originals:
        setattr(*_originals.pop())


@functools.lru_cache(maxsize=4)
def _without_checks(options: Any) -> Any:
    """Return the interpreter's options without checks for overflow."""
    return dataclasses.replace(options, sanitize_overflow=False)


class _Patches:
    """Patch Triton's language once for the launches that run within :func:`taken`.

    An instance replaces Triton's function that patches the language, and is the scope that this
    function returns as well.
    """

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._scopes: dict[frozenset[str], Any] = {}
        self._seen: set[str] = set()

    def __call__(self, function: Any) -> _Patches:
        if function.__module__ not in self._seen:
            self._seen.add(function.__module__)
            # Triton patches the modules of its language that the function's own module has
            # imported.
            languages = frozenset(
                value.__name__
                for value in function.__globals__.values()
                if value is language or value is core
            )
            if languages not in self._scopes:
                self._scopes[languages] = self._patch(function)
        return self

    def restore(self) -> None:
        """Do nothing: Triton calls this at the end of a launch, and other launches may follow."""

    def undo(self) -> None:
        """Restore the language, the most recent patch first."""
        while self._scopes:
            self._scopes.popitem()[1].restore()


# The decorated functions below return the same wrapper, with the same cache, for every launch.
@functools.lru_cache(maxsize=4)
def _cached_tensor_init(init: Callable[..., None]) -> Callable[..., None]:
    """Return ``tensor.__init__`` with a cache of shapes and sizes by dimensions."""
    cache: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def cached_init(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        cached = cache.get(key)
        if cached is None:
            init(self, handle, type)
            # Another version of Triton may keep further fields, which the cache lacks.
            if vars(self).keys() == _TENSOR:
                cache[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = cached

    return cached_init


@functools.lru_cache(maxsize=4)
def _cached_block_type_init(init: Callable[..., None]) -> Callable[..., None]:
    """Return ``block_type.__init__`` with a cache of shapes, sizes and names by dimensions."""
    cache: dict[tuple[int, ...], tuple[Any, Any, str]] = {}

    def cached_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        cached = cache.get(key)
        if cached is None:
            init(self, element_ty, shape)
            if vars(self).keys() == _BLOCK and self.name == f"<{self.shape}, {element_ty}>":
                cache[key] = self.shape, self.numel, f"<{self.shape}, "
            return
        self.element_ty = element_ty
        self.shape, self.numel, name = cached
        self.name = f"{name}{element_ty}>"

    return cached_init


@functools.lru_cache(maxsize=4)
def _cached_np_dtype(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the interpreter's look-up of NumPy's dtypes with a cache by element type."""
    cache: dict[str, Any] = {}

    def cached_look_up(dtype: Any) -> Any:
        if isinstance(dtype, core.block_type):
            dtype = dtype.element_ty
        if isinstance(dtype, core.pointer_type):
            return _ADDRESS
        np_dtype = cache.get(dtype.name)
        if np_dtype is None:
            np_dtype = cache[dtype.name] = look_up(dtype)
        return np_dtype

    return cached_look_up


@functools.lru_cache(maxsize=4)
def _patched_once(patch: Callable[..., None]) -> Callable[..., None]:
    """Return the interpreter's patch of a function of the language without the wrapper below."""

    def patch_once(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not _MARKED:
            patch(owner, name, member, builder, scope)
            return
        function, rules = member.__wrapped__, semantic.TritonSemantic(builder)

        def patched(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = rules
            return function(*args, **kwargs)

        scope.set_attr(owner, name, patched)

    return patch_once


@functools.lru_cache(maxsize=4)
def _dot_in_order(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product of two blocks whose elements are all added up in the order of K."""

    def dot_in_order(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        left, right = (_numbers(self, each, total.data.dtype) for each in (a, b))
        # For rows that lie in memory as they are written, einsum adds a multiple of a row of the
        # right block to a row of the result, for one element of K after another.
        product = np.einsum("...mk,...kn->...mn", left, right)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    return dot_in_order


def _numbers(builder: Any, block: Any, dtype: Any) -> Any:
    """Return the values of a block in a NumPy dtype: the interpreter stores some as integers."""
    data = block.data
    if block.dtype.scalar == core.bfloat16:
        # The upper half of a float32.
        data = (data.astype(np.uint32) << 16).view(np.float32)
    elif block.dtype.scalar.is_fp8():
        data = builder.create_fp_to_fp(block, core.float32, None).data
    return np.ascontiguousarray(data, dtype)


@functools.lru_cache(maxsize=4)
def _quick_promotion(promote: Callable[..., Any]) -> Callable[..., Any]:
    """Return Triton's promotion of two operands with a short way for the most frequent ones.

    Its rules are flags: whether the left operand may be a pointer, whether the right one may,
    whether to find a common dtype, and whether the operation is a division.
    """

    def quick_promote(self: Any, lhs: Any, rhs: Any, *rules: Any, **more_rules: Any) -> Any:
        if more_rules:
            return promote(self, lhs, rhs, *rules, **more_rules)
        if type(lhs) is core.tensor:
            name = lhs.dtype.name
            if type(rhs) is core.tensor:
                other = rhs.dtype.name
                if (name == other and name in _CLOSED) or (
                    rules[:1] == (True,) and other in _INTEGERS and lhs.dtype.is_ptr()
                ):
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(rhs) is int:
                if name in _INTEGERS:
                    if rhs in _INTEGERS[name] and rules[2:3] != (False,):
                        return lhs, _constant(rhs, lhs.dtype, lhs)
                elif rules[:1] == (True,) and rhs in _INTEGERS["int32"] and lhs.dtype.is_ptr():
                    return lhs, _constant(rhs, core.int32, lhs)
        elif type(lhs) is int and type(rhs) is core.tensor:
            name = rhs.dtype.name
            if name in _INTEGERS and lhs in _INTEGERS[name] and rules[2:3] != (False,):
                return _constant(lhs, rhs.dtype, rhs), rhs
        return promote(self, lhs, rhs, *rules, **more_rules)

    return quick_promote


def _constant(number: int, dtype: Any, like: Any) -> Any:
    """Return a tensor of the shape of ``like`` with ``number`` in each element."""
    values = np.full(like.handle.data.shape, number, interpreter._get_np_dtype(dtype))
    return _tensor(values, dtype, dtype, like)


def _repeated(scalar: Any, like: Any) -> Any:
    """Return a tensor of the shape of ``like`` with the value of a scalar in each element."""
    number = scalar.handle.data
    values = np.full(like.handle.data.shape, number, number.dtype)
    # A handle may be of another signedness than its tensor.
    return _tensor(values, scalar.handle.dtype, scalar.dtype, like)


def _tensor(values: Any, stored: Any, dtype: Any, like: Any) -> Any:
    """Return a tensor of the shape of ``like``."""
    kind = core.block_type(dtype, like.type.shape) if like.type.is_block() else dtype
    return core.tensor(interpreter.TensorHandle(values, stored), kind)


@functools.lru_cache(maxsize=4)
def _quick_broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Return Triton's broadcast of two values with short ways for equal shapes and scalars."""

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        # Equal shapes are the same object, as _cached_tensor_init gives them.
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not rhs.type.is_block() and lhs.type.is_block():
            return lhs, _repeated(rhs, lhs)
        if not lhs.type.is_block() and rhs.type.is_block():
            return _repeated(lhs, rhs), rhs
        return broadcast(self, lhs, rhs)

    return quick_broadcast


@functools.lru_cache(maxsize=4)
def _quick_cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Return Triton's conversion to another dtype with a short way for values that have it."""

    def quick_cast(self: Any, value: Any, kind: Any, *rounding: Any, **more: Any) -> Any:
        # Most dtypes exist once; others are compared by Triton.
        return value if value.dtype is kind.scalar else cast(self, value, kind, *rounding, **more)

    return quick_cast
