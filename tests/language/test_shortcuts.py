"""What is remembered of Triton's types and tensors is what Triton makes, and is made once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language import core

from interlace.language import _shortcuts


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
    init = _shortcuts._of_block_types(counted)
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
    init = _shortcuts._of_tensors(counted)
    first, second = (_made(core.tensor, init, handle, kind) for handle in ("a", "b"))
    assert counted.calls == 1
    assert (first.pop("handle"), second.pop("handle")) == ("a", "b")
    assert [str(value) for value in second.values()] == [str(first[name]) for name in second]


def test_element_types() -> None:
    counted = _Counted(interpreter._get_np_dtype)
    look_up = _shortcuts._of_dtypes(counted)
    for dtype in (tl.bfloat16, core.block_type(tl.bfloat16, [2]), tl.bfloat16):
        assert look_up(dtype) == np.uint16
    assert look_up(tl.pointer_type(tl.float32)) == look_up(core.block_type(tl.pointer_type(tl.float32), [2])) == np.uint64
    assert counted.calls == 1


def test_another_triton_goes_its_own_way() -> None:
    """With a field that is not known, nothing is remembered."""

    def init(self: Any, handle: Any, kind: Any) -> None:
        core.tensor.__init__(self, handle, kind)
        self.more = 1

    counted = _Counted(init)
    remembering = _shortcuts._of_tensors(counted)
    assert [_made(core.tensor, remembering, None, tl.int32)["more"] for _ in range(2)] == [1, 1]
    assert counted.calls == 2
