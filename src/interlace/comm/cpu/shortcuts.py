"""Speed up Triton's interpreter, and mend its products, while this package launches kernels.

Four activities of Python take most of an interpreted kernel's time, and are cut short:

- Types, shapes and tables of element types are made anew for every value, though they depend on a
  few numbers. They are cached.
- Every operation on two values works out the dtype and the shape of its result, in a dozen
  functions, though most have two values of the same dtype, or a value and a number. NumPy
  broadcasts and computes these at once, and so it does most conversions and new axes.
- The language is patched again in every launch and at every call of a device function, and every
  function of it is wrapped twice. What is patched is found out once, and set in each launch.
- Every sum and product of integers is checked for overflow. GPUs do not check either.

Its ``tl.dot`` is NumPy's product of matrices, which takes no bfloat16 and adds up an element in an
order that depends on the matrices' sizes and on the element's place. GPUs do neither, so ``tl.dot``
multiplies in the dtype of the sum, and adds up in the order of K. Its conversions between float32
and bfloat16 are wrong for numbers below the smallest normal one; these are right.

Triton is unchanged outside of :func:`taken`, so that other kernels of the process keep their
checks, except for what :func:`mend` does. A version of Triton that keeps other fields in its
objects runs without the caches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton
import triton.language as language
import triton.runtime.interpreter as interpreter
from triton.language import core, semantic

_TENSOR = {"handle", "shape", "numel", "type", "dtype"}
_BLOCK = {"element_ty", "shape", "numel", "name"}
_ADDRESS = np.dtype(np.uint64)
_STORED = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64), "fp32": np.dtype(np.float32)}
# Dtypes of which two values have a result of the same dtype, whatever the operation. Not float16
# and its like, which are divided as float32.
_CLOSED = {"int1", *_STORED}
_INTEGERS = {"int32": range(-(1 << 31), 1 << 31), "int64": range(-(1 << 63), 1 << 63)}
# What all functions of the language run that are marked as such: they ask for the argument
# _semantic, which every patched function gives, and call the function itself.
_MARKED = core.program_id.__code__
_ABSENT = object()
_WHOLE = slice(None)

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
    """Replace functions of Triton's interpreter by quicker ones, and patch the language."""
    replacements: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (core.tensor, "__init__", _cached_tensor_init),
        (core.tensor, "__getitem__", _quick_axes),
        (core.tensor, "to", _quick_to),
        *((core.tensor, name, functools.partial(_quick_operator, name)) for name in _OPERATORS),
        (core.block_type, "__init__", _cached_block_type_init),
        (interpreter.TensorHandle, "__post_init__", _without_validation),
        (interpreter, "_get_np_dtype", _cached_np_dtype),
        (interpreter, "_patch_attr", _patched_once),
        (interpreter.interpreter_builder, "options", _without_checks),
        (interpreter.InterpreterBuilder, "create_dot", _dot_in_order),
        (semantic.TritonSemantic, "binary_op_type_checking_impl", _quick_promotion),
        (semantic.TritonSemantic, "broadcast_impl_value", _quick_broadcast),
        (semantic.TritonSemantic, "cast", _quick_cast),
    ]
    for owner, name, quicker in replacements:
        _replace(owner, name, quicker(getattr(owner, name)))
    for owner, name, patched in _language_patches():
        _replace(owner, name, patched)
    _replace(interpreter, "_patch_lang", lambda function: _Patched)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute until :func:`_restore`."""
    _originals.append((owner, name, getattr(owner, name, _ABSENT)))
    setattr(owner, name, value)


def _restore() -> None:
    """Undo :func:`_shorten`, the most recent replacement first."""
    while _originals:
        owner, name, original = _originals.pop()
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@functools.lru_cache(maxsize=4)
def _without_checks(options: Any) -> Any:
    """Return the interpreter's options without checks for overflow."""
    return dataclasses.replace(options, sanitize_overflow=False)


def _without_validation(_: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return nothing to do for a new handle, whose dtype Triton else compares with its values'."""
    return lambda _: None


class _Patched:
    """The scope of a patch of the language that is undone with the shortcuts."""

    @staticmethod
    def restore() -> None:
        """Do nothing: Triton calls this at the end of a launch, and other launches may follow."""


@functools.cache
def mend() -> None:
    """Let the interpreter of Triton 3.6 run with NumPy of 2.4 and above, also outside of
    :func:`taken`.

    A scalar is an array with a dimension there, and is made a number as a whole, which NumPy
    refuses.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        return
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: int(value.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


@functools.cache
def _language_patches() -> list[tuple[Any, str, Any]]:
    """Return what Triton replaces in its language to interpret kernels: owners, names, values."""
    mend()
    # Triton patches the modules of its language that a function's own module has imported.
    function = types.SimpleNamespace(__globals__={"language": language, "core": core})
    scope = interpreter._patch_lang(function)
    changed = {(id(owner), name): (owner, name) for owner, name, _ in scope._changes}
    patches = [(owner, name, getattr(owner, name)) for owner, name in changed.values()]
    scope.restore()
    return patches


# The decorated functions below return the same wrapper, with the same cache, for every launch.
@functools.cache
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


@functools.cache
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


@functools.cache
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


@functools.cache
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


@functools.cache
def _dot_in_order(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product of two blocks whose elements are all added up in the order of K."""

    def dot_in_order(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        left, right = (_numbers(self, operand, total.data.dtype) for operand in (a, b))
        # For rows that lie in memory as they are written, einsum adds a multiple of a row of the
        # right block to a row of the result, for one element of K after another.
        product = np.einsum("...mk,...kn->...mn", left, right)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    return dot_in_order


def _numbers(builder: Any, block: Any, dtype: Any) -> Any:
    """Return the values of a block in a NumPy dtype: the interpreter stores some as integers."""
    data = block.data
    if block.dtype.scalar == core.bfloat16:
        data = _CONVERSIONS["bf16", "fp32"](data)
    elif block.dtype.scalar.is_fp8():
        data = builder.create_fp_to_fp(block, core.float32, None).data
    return np.ascontiguousarray(data, dtype)


@functools.cache
def _quick_promotion(promote: Callable[..., Any]) -> Callable[..., Any]:
    """Return Triton's promotion of two operands with a short way for tensors of the same dtype."""

    def quick_promote(self: Any, lhs: Any, rhs: Any, *rules: Any, **more_rules: Any) -> Any:
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            name = lhs.dtype.name
            if name in _CLOSED and name == rhs.dtype.name:
                return self.broadcast_impl_value(lhs, rhs)
        return promote(self, lhs, rhs, *rules, **more_rules)

    return quick_promote


def _repeated(scalar: Any, like: Any) -> Any:
    """Return a tensor of the shape of ``like`` with the value of a scalar in each element."""
    number = scalar.handle.data
    values = np.full(like.handle.data.shape, number, number.dtype)
    # A handle may be of another signedness than its tensor.
    handle = interpreter.TensorHandle(values, scalar.handle.dtype)
    return core.tensor(handle, core.block_type(scalar.dtype, like.type.shape))


@functools.cache
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


_NUMBERS, _WHOLE_NUMBERS = frozenset(_STORED), frozenset(_INTEGERS)
_BITS = _WHOLE_NUMBERS | {"int1"}
# What the interpreter computes for an operator of tensors, and for which dtypes.
_OPERATORS: dict[str, tuple[Callable[[Any, Any], Any], frozenset[str]]] = {
    "__add__": (np.add, _NUMBERS),
    "__sub__": (np.subtract, _NUMBERS),
    "__mul__": (np.multiply, _NUMBERS),
    "__truediv__": (np.divide, frozenset({"fp32"})),
    # Rounded toward zero.
    "__floordiv__": (lambda lhs, rhs: (lhs - np.fmod(lhs, rhs)) // rhs, _WHOLE_NUMBERS),
    "__mod__": (np.fmod, _NUMBERS),
    "__and__": (np.bitwise_and, _BITS),
    "__or__": (np.bitwise_or, _BITS),
    "__xor__": (np.bitwise_xor, _BITS),
    "__lt__": (np.less, _NUMBERS),
    "__le__": (np.less_equal, _NUMBERS),
    "__gt__": (np.greater, _NUMBERS),
    "__ge__": (np.greater_equal, _NUMBERS),
    "__eq__": (np.equal, _NUMBERS | {"int1"}),
    "__ne__": (np.not_equal, _NUMBERS | {"int1"}),
    # With the number on the left.
    "__radd__": (lambda lhs, rhs: np.add(rhs, lhs), _NUMBERS),
    "__rsub__": (lambda lhs, rhs: np.subtract(rhs, lhs), _NUMBERS),
    "__rmul__": (lambda lhs, rhs: np.multiply(rhs, lhs), _NUMBERS),
}
_COMPARISONS = {"__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"}


@functools.cache
def _quick_operator(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator of tensors with a short way for two tensors of one dtype, for a tensor and
    a number, and for a pointer and an offset.
    """
    function, dtypes = _OPERATORS[name]
    is_comparison, is_sum = name in _COMPARISONS, name == "__add__"

    def quick_operator(self: Any, other: Any, _semantic: Any = None) -> Any:
        if type(other) is core.constexpr:
            other = other.value
        dtype, handle = self.dtype, self.handle
        kind = dtype.name
        try:
            if kind in dtypes:
                operand = _operand(kind, handle.data, other)
                values = None if operand is None else function(handle.data, operand)
            elif is_sum and type(dtype) is core.pointer_type:
                values = _moved(handle, other)
            else:
                values = None
        except ValueError:  # shapes that do not fit, which Triton refuses
            values = None
        if values is None:
            return operator(self, other, _semantic=interpreter.interpreter_semantic)
        stored = handle.dtype
        if kind == "int32" and type(other) is core.tensor and other.dtype.name == "int64":
            dtype = stored = core.int64
        return _result(values, core.int1 if is_comparison else dtype, stored, self, other)

    return quick_operator


def _operand(kind: str, data: Any, other: Any) -> Any:
    """Return the values of an operand of values of the dtype ``kind``, if NumPy promotes them as
    Triton does; else None.
    """
    if type(other) is core.tensor:
        name = other.dtype.name
        return other.handle.data if name == kind or {name, kind} == _WHOLE_NUMBERS else None
    # A handle may be of another signedness than its tensor.
    if data.dtype != _STORED.get(kind):
        return None
    if kind == "fp32":
        return other if type(other) in (int, float) else None
    return other if type(other) is int and other in _INTEGERS[kind] else None


def _moved(pointers: Any, other: Any) -> Any:
    """Return addresses that lie as many elements behind pointers as an operand says; None if it is
    no signed offset.
    """
    if type(other) is core.tensor and other.dtype.name in _INTEGERS:
        offsets = other.handle.data.astype(np.uint64)
    elif type(other) is int and other in _INTEGERS["int32"]:
        offsets = np.int64(other).astype(np.uint64)
    else:
        return None
    nbytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    return pointers.data + np.uint64(nbytes) * offsets


def _result(values: Any, dtype: Any, stored: Any, lhs: Any, rhs: Any) -> Any:
    """Return the result of an operator on a tensor and another operand.

    Args:
        values: NumPy's result.
        dtype: The dtype of the result.
        stored: The dtype that the interpreter's handle shall have.
        lhs, rhs: The tensor and the other operand.
    """
    # Scalars have the shape (1,) in NumPy, as blocks of one element have.
    like = lhs
    if (
        type(rhs) is core.tensor
        and lhs.shape is not rhs.shape
        and not (lhs.type.is_block() and lhs.handle.data.shape == values.shape)
    ):
        like = rhs
    handle = interpreter.TensorHandle(values, stored)
    if like.dtype is not dtype or like.handle.data.shape != values.shape:
        kind = core.block_type(dtype, list(values.shape)) if like.type.is_block() else dtype
        return core.tensor(handle, kind)
    return _with_values(like, handle)


def _with_values(tensor: Any, handle: Any) -> Any:
    """Return a tensor of the same type with other values."""
    made = object.__new__(core.tensor)
    vars(made).update(vars(tensor))
    made.handle = handle
    return made


@functools.cache
def _quick_axes(index: Callable[..., Any]) -> Callable[..., Any]:
    """Return the indexing of tensors with a short way for new axes of blocks."""

    def quick_axes(self: Any, slices: Any, _semantic: Any = None) -> Any:
        if (
            type(slices) is tuple
            and self.type.is_block()
            and slices.count(None) + slices.count(_WHOLE) == len(slices)
            and slices.count(_WHOLE) <= self.handle.data.ndim
        ):
            values = self.handle.data[slices]
            kind = core.block_type(self.dtype, list(values.shape))
            return core.tensor(interpreter.TensorHandle(values, self.handle.dtype), kind)
        return index(self, slices, _semantic=interpreter.interpreter_semantic)

    return quick_axes


def _as(dtype: Any) -> Callable[[Any], Any]:
    """Return NumPy's conversion to a dtype."""
    return lambda values: values.astype(dtype)


# How the interpreter converts values between two dtypes, by their names. It stores bfloat16, the
# upper half of float32, as uint16.
_CONVERSIONS: dict[tuple[str, str], Callable[[Any], Any]] = {
    **{
        (source, target): _as(_STORED[target])
        for source in ("int1", *_STORED)
        for target in _STORED
    },
    ("fp16", "fp32"): _as(np.float32),
    ("fp32", "fp16"): _as(np.float16),
    ("bf16", "fp32"): lambda values: (values.astype(np.uint32) << 16).view(np.float32),
    ("fp32", "bf16"): lambda values: (values.view(np.uint32) >> 16).astype(np.uint16),
}


@functools.cache
def _quick_cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Return Triton's conversion to another dtype with short ways for values that have it, and
    between the most frequent ones.
    """

    def quick_cast(self: Any, value: Any, kind: Any, *rounding: Any, **more: Any) -> Any:
        dtype = kind.scalar
        # Most dtypes exist once; others are compared by Triton.
        if value.dtype is dtype:
            return value
        convert = _CONVERSIONS.get((value.dtype.name, dtype.name))
        if convert is None or more or any(rounding):
            return cast(self, value, kind, *rounding, **more)
        if value.dtype.name == dtype.name:
            return value
        handle = interpreter.TensorHandle(convert(value.handle.data), dtype)
        made = _with_values(value, handle)
        made.type, made.dtype = value.type.with_element_ty(dtype), dtype
        return made

    return quick_cast


@functools.cache
def _quick_to(to: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of tensors that converts them, with fewer functions in between."""

    def quick_to(self: Any, dtype: Any, *options: Any, _semantic: Any = None, **more: Any) -> Any:
        rules = interpreter.interpreter_semantic
        if options or more or type(dtype) is core.constexpr:
            return to(self, dtype, *options, _semantic=rules, **more)
        return rules.cast(self, dtype)

    return quick_to
