"""What is remembered of Triton's types and tensors is what Triton makes, and is made once."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language import core, semantic
from triton.runtime.errors import InterpreterError

from interlace.comm.cpu import shortcuts


class _Counted:
    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


def _made(cls: Any, init: Any, *args: Any) -> dict[str, Any]:
    made = object.__new__(cls)
    init(made, *args)
    return vars(made)


def test_block_types() -> None:
    counted = _Counted(core.block_type.__init__)
    init = shortcuts._cached_block_type_init(counted)
    first = _made(core.block_type, init, tl.float32, [4, 8])
    assert _made(core.block_type, init, tl.float32, [core.constexpr(4), 8]) == first
    other = _made(core.block_type, init, tl.pointer_type(tl.int64), [4, 8])
    assert other == vars(core.block_type(tl.pointer_type(tl.int64), [4, 8]))
    assert counted.calls == 1
    with pytest.raises(TypeError):
        init(object.__new__(core.block_type), tl.float32, [])


@pytest.mark.parametrize("kind", [core.block_type(tl.float16, [2, 16]), tl.int32])
def test_tensors(kind: Any) -> None:
    counted = _Counted(core.tensor.__init__)
    init = shortcuts._cached_tensor_init(counted)
    first, second = (_made(core.tensor, init, handle, kind) for handle in ("a", "b"))
    assert counted.calls == 1
    assert (first.pop("handle"), second.pop("handle")) == ("a", "b")
    assert [str(value) for value in second.values()] == [str(first[name]) for name in second]


def test_element_types() -> None:
    counted = _Counted(interpreter._get_np_dtype)
    look_up = shortcuts._cached_np_dtype(counted)
    for dtype in (tl.bfloat16, core.block_type(tl.bfloat16, [2]), tl.bfloat16):
        assert look_up(dtype) == np.uint16
    assert (
        look_up(tl.pointer_type(tl.float32))
        == look_up(core.block_type(tl.pointer_type(tl.float32), [2]))
        == np.uint64
    )
    assert counted.calls == 1


def test_another_triton_goes_its_own_way() -> None:
    """With a field that is not known, nothing is remembered."""

    def init(self: Any, handle: Any, kind: Any) -> None:
        core.tensor.__init__(self, handle, kind)
        self.more = 1

    counted = _Counted(init)
    remembering = shortcuts._cached_tensor_init(counted)
    assert [_made(core.tensor, remembering, None, tl.int32)["more"] for _ in range(2)] == [1, 1]
    assert counted.calls == 2


def _operand(values: Any, dtype: Any) -> Any:
    array = np.asarray(values)
    kind = dtype if array.ndim == 0 else core.block_type(dtype, list(array.shape))
    return core.tensor(interpreter.TensorHandle(np.atleast_1d(array), dtype), kind)


@contextlib.contextmanager
def _in_a_kernel() -> Iterator[None]:
    """Triton's language is what a kernel finds, without shortcuts."""
    scope = interpreter._patch_lang(_add_one.fn)
    try:
        yield
    finally:
        scope.restore()


def _operands() -> list[Any]:
    """Tensors of several dtypes and shapes, and numbers."""
    block = np.arange(4)
    return [
        _operand(block.astype(np.int32), tl.int32), _operand(block.astype(np.int64), tl.int64),
        _operand(block.astype(np.float32), tl.float32), _operand(np.int32(7), tl.int32),
        _operand(block.astype(np.uint64), core.pointer_type(tl.float32)),
        _operand(block.astype(np.uint32), tl.uint32), _operand(block > 1, tl.int1),
        _operand(np.bool_(True), tl.int1), _operand(np.float32(0.5), tl.float32),
        _operand(np.arange(4, dtype=np.int32)[:, None], tl.int32),
        _operand(np.arange(1, 3, dtype=np.int32), tl.int32),
        _operand(np.array([5], np.int32), tl.int32),
        _operand(block.astype(np.float16), tl.float16),
        _operand(np.uint64(64), core.pointer_type(tl.float32)),
        0, -3, 1 << 40, 2.5, True, core.constexpr(3),
    ]  # fmt: skip


def _described(value: Any) -> Any:
    """All of a tensor, or what something else is."""
    if not isinstance(value, core.tensor):
        return repr(value)
    data, shape = value.handle.data, [str(size) for size in value.shape]
    kinds = str(value.type), str(value.dtype), str(value.handle.dtype), data.dtype
    return *kinds, data.shape, data.tobytes(), shape, str(value.numel)


def _outcome(function: Any, *args: Any) -> Any:
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            return _described(function(*args))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", shortcuts._OPERATORS)
def test_operators_are_triton_s(name: str) -> None:
    """Of every pair of operands: the same dtypes, shapes, values and errors."""
    # As a kernel gets an argument above the largest int32.
    operands = [*_operands(), _operand(np.uint32(3 << 30), tl.int64)]
    pairs = [(lhs, rhs) for lhs in operands for rhs in operands if isinstance(lhs, core.tensor)]

    def outcomes() -> list[Any]:
        return [_outcome(getattr(core.tensor, name), *pair) for pair in pairs]

    with _in_a_kernel():
        expected = outcomes()
    with shortcuts.taken():
        assert outcomes() == expected


@pytest.mark.parametrize("shape", [(), (4,), (2, 1), (1,)])
def test_new_axes_are_triton_s(shape: tuple[int, ...]) -> None:
    value = _operand(np.zeros(shape, np.int32), tl.int32)
    new, whole = None, slice(None)
    indices = [
        (whole, new), (new, whole), (new, whole, new), (whole, whole, new), (whole,), (new,), new,
        whole, (whole, whole), (slice(1), new),
    ]  # fmt: skip

    def outcomes() -> list[Any]:
        return [_outcome(core.tensor.__getitem__, value, index) for index in indices]

    with _in_a_kernel():
        expected = outcomes()
    with shortcuts.taken():
        assert outcomes() == expected


@pytest.mark.parametrize(
    "rules", [(), (True, True), (True, False), (False, False, False), (False, False, True, True)]
)
def test_promotion_is_triton_s(rules: tuple[bool, ...]) -> None:
    """Of every pair of operands: the same dtypes, shapes, values and errors."""
    operands = _operands()

    def outcome(*pair: Any) -> Any:
        try:
            promoted = interpreter.interpreter_semantic.binary_op_type_checking_impl(*pair, *rules)
        except Exception as error:
            return type(error), str(error)
        return [
            (str(one.type), one.handle.data.tolist(), one.handle.data.dtype) for one in promoted
        ]

    pairs = [
        (lhs, rhs)
        for lhs in operands
        for rhs in operands
        if isinstance(lhs, core.tensor) or isinstance(rhs, core.tensor)
    ]
    with _in_a_kernel():
        expected = [outcome(*pair) for pair in pairs]
    with shortcuts.taken():
        assert [outcome(*pair) for pair in pairs] == expected


@pytest.mark.parametrize(
    "kind",
    [tl.float32, tl.float16, tl.bfloat16, core.dtype("bf16"), tl.int32, tl.int64, tl.int1],
)
def test_conversion_is_triton_s(kind: Any) -> None:
    """Also of a value to the dtype that it has, however that is written."""
    numbers = np.array([0.0, -1.7, 3.14159, 65504.0, 2.0**-126, np.inf, -np.inf, np.nan], "f4")
    small = np.array([0.0, -1.7, 3.14159, 100.0], "f4")
    values = [
        _operand(numbers if kind.is_floating() else small, tl.float32),
        _operand(small.astype(np.float16), tl.float16),
        _operand((small.view(np.uint32) >> 16).astype(np.uint16), tl.bfloat16),
        _operand(np.int32(3), tl.int32),
        _operand(np.arange(4).astype(np.int64) << 30, tl.int64),
        _operand(np.arange(4) > 1, tl.int1),
    ]

    def outcomes() -> list[Any]:
        convert = interpreter.interpreter_semantic.cast
        made = [convert(value, kind) for value in values]
        same = [one is value for one, value in zip(made, values, strict=True)]
        return [same, *map(_bits, made), *map(_bits, (value.to(kind) for value in values))]

    with _in_a_kernel():
        expected = outcomes()
    with shortcuts.taken():
        assert outcomes() == expected


def _bits(value: Any) -> Any:
    data = value.handle.data
    return str(value.type), str(value.dtype), str(value.handle.dtype), data.dtype, data.tobytes()


def test_conversion_of_small_numbers() -> None:
    """Those below the smallest normal one keep their scale, which Triton's conversion loses."""
    small = torch.tensor([1e-39, -3e-40, 2.0**-130, 0.0])
    with shortcuts.taken():
        value = _operand(small.numpy(), tl.float32)
        there = interpreter.interpreter_semantic.cast(value, tl.bfloat16)
        back = interpreter.interpreter_semantic.cast(there, tl.float32)
    # GPUs round; the interpreter leaves out the lower half.
    truncated = (small.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(torch.from_numpy(back.handle.data), truncated)


@pytest.mark.parametrize(
    ("dtype", "stored_as", "name"),
    [
        (torch.float32, np.float32, tl.float32),
        (torch.float16, np.float16, tl.float16),
        (torch.bfloat16, np.uint16, tl.bfloat16),
        (torch.float8_e4m3fn, np.uint8, tl.float8e4nv),
    ],
)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(16, 16, 16), (64, 64, 64), (128, 32, 16), (16, 128, 256), (1, 32, 16)]
)
def test_products_add_up_in_the_order_of_k(
    dtype: torch.dtype, stored_as: Any, name: Any, m: int, k: int, n: int
) -> None:
    builder = interpreter.interpreter_builder
    dot = shortcuts._dot_in_order(interpreter.InterpreterBuilder.create_dot)
    torch.manual_seed(0)
    left, right = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    start = torch.randn(m, n)
    a, b = (each.view(torch.uint8).numpy().view(stored_as) for each in (left, right))
    wanted = torch.zeros(m, n)
    for step in range(k):
        wanted += left[:, step, None].float() * right[step].float()
    for order in ("C", "F"):
        found = dot(
            builder,
            interpreter.TensorHandle(np.asarray(a, order=order), name),
            interpreter.TensorHandle(np.asarray(b, order=order), name),
            interpreter.TensorHandle(start.numpy(), tl.float32),
            None,
            0,
        )
        assert torch.equal(torch.from_numpy(found.data), wanted + start)


@triton.jit
def _add_one(x, y):
    tl.store(y, tl.load(x) + 1)


@triton.jit
def _fail(x):
    tl.store(x, missing_name)  # noqa: F821


def _of_triton() -> tuple[Any, ...]:
    """What the shortcuts replace, and a function of the language that a launch replaces."""
    builder = interpreter.interpreter_builder
    return (
        core.tensor.__init__, core.block_type.__init__, interpreter._get_np_dtype,
        interpreter._patch_lang, builder.options, interpreter.InterpreterBuilder.create_dot,
        interpreter._patch_attr, interpreter.TensorHandle.__post_init__,
        semantic.TritonSemantic.binary_op_type_checking_impl,
        semantic.TritonSemantic.broadcast_impl_value, semantic.TritonSemantic.cast, tl.load,
        tl.range, core.tensor.__add__, core.tensor.__neg__, core.tensor.to, core.tensor.T,
        hasattr(core.tensor, "__index__"),
    )  # fmt: skip


def _overflowing() -> list[Any]:
    """2147483647 + 1 by a kernel, before, within and after a launch of this package; and what of
    Triton has changed meanwhile.
    """
    import interlace.language

    builder = interpreter.interpreter_builder
    # Else Triton computes its checks and says nothing
    builder.options = dataclasses.replace(builder.options, debug=True)
    before, group, seen = _of_triton(), interlace.group_of(), []
    x, y = torch.full((1,), 2**31 - 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def add() -> str:
        try:
            _add_one[(1,)](x, y)
        except InterpreterError as error:
            return str(error)
        return str(y.item())

    seen.append(add())
    for nested in (False, True):
        with group.running(), group.running() if nested else contextlib.nullcontext():
            seen.append(add())
        seen.append(_of_triton() == before)
    with contextlib.suppress(InterpreterError), group.running():
        _fail[(1,)](y)
    seen += [_of_triton() == before, add()]
    builder.options = dataclasses.replace(builder.options, debug=False)
    return seen


def test_kernels_of_others_keep_their_checks(ranks: Any) -> None:
    """Importing the language changes nothing of Triton; a launch does, and undoes it, also after an
    exception in a kernel.
    """
    [(first, *others)] = ranks(1).run(_overflowing)
    assert "int32 overflow detected for operation add" in first
    assert others == ["-2147483648", True, "-2147483648", True, True, first]
