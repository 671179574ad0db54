"""Calls go past PyTorch's dispatcher where nothing listens there, with the same results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import interlace
from interlace.comm.groups import registration

_DISPATCHER = Path(torch._ops.__file__)


def _operands(requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(4, 16, generator=generator), torch.randn(8, 16, generator=generator)
    return x.requires_grad_(requires_grad), w


def _asks_dispatcher(call: Callable[[], object]) -> bool:
    """Return whether a call enters the Python code of torch's dispatcher for Interlace's operator.

    The operators of torch that an implementation uses are called from C++.
    """
    entered = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename) == _DISPATCHER:
            entered.append(str(frame.f_locals.get("self", "")))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return any("interlace" in name for name in entered)


class _Listening(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_dispatcher_is_asked_where_something_listens_and_nowhere_else(requires_grad):
    x, w = _operands(requires_grad)

    def call() -> torch.Tensor:
        return interlace.gemm_reduce_scatter(x, w, impl="unfused")

    expected = call()
    assert not _asks_dispatcher(call)
    with _Listening() as listening:
        seen = call()
        assert _asks_dispatcher(call)
    assert "interlace.gemm_reduce_scatter.default" in listening.names
    with torch.profiler.profile() as profiler:
        profiled = call()
    names = [event.key for event in profiler.key_averages()]
    assert "interlace::gemm_reduce_scatter" in names
    for result in (seen, profiled):
        assert torch.equal(result, expected)
        assert result.requires_grad == requires_grad
    with pytest.raises(interlace.ArgumentError, match=r"torch\.func"):
        torch.func.grad(lambda x: interlace.gemm_reduce_scatter(x, w, impl="unfused").sum())(x)


def test_a_result_may_be_changed_in_place_and_has_its_gradient():
    x, w = _operands(requires_grad=True)
    # Seven columns are padded in memory, so that the result is cut out of something wider.
    y = interlace.gemm_reduce_scatter(x, w[:7], impl="unfused")
    y.mul_(2)
    y.sum().backward()
    assert torch.allclose(x.grad, 2 * w[:7].sum(0).expand(4, -1), atol=1e-5)


def test_autocast_does_not_reach_into_an_operator():
    x, w = _operands()
    plain = interlace.gemm_reduce_scatter(x, w, impl="unfused")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = interlace.gemm_reduce_scatter(x, w, impl="unfused")
    assert result.dtype == torch.float32
    assert torch.equal(result, plain)


def test_an_operand_that_torch_still_has_to_negate_is_negated():
    x, w = _operands()
    negated = torch.complex(torch.zeros_like(x), x).conj().imag
    assert negated.is_neg()
    y = interlace.gemm_reduce_scatter(negated, w, impl="unfused")
    torch.testing.assert_close(y, F.linear(-x, w))


def test_arguments_are_refused_again_after_the_same_call_was_valid():
    x, w = _operands()
    for _ in range(2):
        interlace.gemm_reduce_scatter(x, w, impl="unfused")
        with pytest.raises(interlace.ArgumentError, match="impl must be one of"):
            interlace.gemm_reduce_scatter(x, w, impl="fast")
        with pytest.raises(interlace.ArgumentError, match="impl must be one of"):
            interlace.gemm_reduce_scatter(x, w, impl=["unfused"])  # type: ignore[arg-type]
        with pytest.raises(interlace.ArgumentError, match="out_dtype must be"):
            interlace.gemm_reduce_scatter(x, w, out_dtype=torch.int32)
        with pytest.raises(interlace.ArgumentError, match="contiguous along K or along N"):
            interlace.gemm_reduce_scatter(x, torch.randn(8, 32)[:, ::2], impl="unfused")
        with pytest.raises(interlace.ArgumentError, match=r"x must be a torch\.Tensor"):
            interlace.gemm_reduce_scatter(None, w, impl="unfused")  # type: ignore[arg-type]
        with pytest.raises(interlace.ArgumentError, match=r"w must be a torch\.Tensor"):
            interlace.gemm_reduce_scatter(x, None, impl="unfused")  # type: ignore[arg-type]
        with pytest.raises(interlace.ArgumentError, match="dense"):
            interlace.gemm_reduce_scatter(x, w.to_sparse(), impl="unfused")


def test_an_operand_on_another_gpu_is_no_reason_to_look_for_an_earlier_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What such a call is known by has no devices, so that one is refused by the long way."""
    (x, w), gpus = _operands(), {}
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: gpus.get(id(tensor), 0))
    monkeypatch.setattr(registration, "known_group", lambda *_: "a group")
    assert registration.recalling_group(None, x, w, None) == "a group"
    gpus[id(w)] = 1
    assert registration.recalling_group(None, x, w, None) is None
    gpus[id(x)] = 1
    assert registration.recalling_group(None, x, w, None) == "a group"


def test_inductors_programs_go_past_the_dispatcher_unless_something_listens():
    """What they call is on the operator, by whose name a program from a cache finds it."""
    x, w = _operands()
    operator = torch.ops.interlace.gemm_reduce_scatter.default
    arguments = (x, w, None, None, None, None, torch.float32, "", "unfused", "")
    assert len(arguments) == len(operator._schema.arguments)
    expected = operator(*arguments)
    assert not _asks_dispatcher(lambda: operator.from_inductor(*arguments))
    assert torch.equal(operator.from_inductor(*arguments), expected)
    with _Listening() as listening:
        operator.from_inductor(*arguments)
    assert listening.names[0] == "interlace.gemm_reduce_scatter.default"
    # A program may leave out arguments that have defaults, or name them.
    assert _asks_dispatcher(lambda: operator.from_inductor(*arguments[:-1], config=""))
