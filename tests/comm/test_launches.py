"""When a launch takes the kernel that Triton compiled before; GPU tests launch real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interlace.comm.launching import kernels
from interlace.comm.launching.kernels import Launch
from interlace.comm.replay import tapes


class _Kernel:
    """Stands in for Triton's: says what was compiled, and what ran."""

    def __init__(self, *arg_names: str, interpreted: bool = False) -> None:
        self.arg_names = [*arg_names]
        self.compiled, self.told, self.launched = 0, 0, []  # type: ignore[var-annotated]
        self.function, self.packed_metadata = 5, (4, 1, 0)
        self.options: list[dict[str, Any]] = []
        self._interpreted = interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.compiled += 1
            self.options.append(options)
            return None if self._interpreted else self

        def launch(*arguments: Any, stream: int) -> None:
            self.launched.append((grid, arguments))
            self.told += 1

        return call if len(grid) == 1 else launch

    def run(self, *arguments: Any) -> None:
        """Stand for what Triton's ``compiled[grid]`` calls behind its own steps."""
        grid, (stream, function, metadata) = arguments[:3], arguments[3:6]
        assert (stream, function, metadata) == (STREAM, self.function, self.packed_metadata)
        assert arguments[6:9] == (None, None, None), "nothing for hooks"
        self.launched.append((grid, arguments[9:]))

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        return self[grid](*arguments, **options)


STREAM = 11


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


def test_constants_follow_the_arguments_in_the_kernels_order() -> None:
    kernel = _Kernel("x", "n", "WIDE", "DEEP")
    launch = Launch(kernel, (3,), {"n": 5, "x": None}, {"DEEP": 7, "WIDE": 6, "num_warps": 4})
    launch()
    launch()
    assert kernel.compiled == 1
    assert kernel.launched == [((3, 1, 1), (None, 5, 6, 7))]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_of_each_launch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Profilers such as Proton add to Triton's hooks, or set them."""
    runtime = kernels._triton_runtime()
    kernel = _Kernel("x")
    launch = Launch(kernel, (3,), {"x": 1}, {})
    launch()
    launch()
    assert kernel.told == 0
    with monkeypatch.context() as patch:
        patch.setattr(runtime, name, lambda metadata: None)
        launch()
    chain = getattr(runtime, name)
    monkeypatch.setattr(chain, "calls", [lambda metadata: None])
    launch()
    assert kernel.told == 2
    monkeypatch.undo()
    assert [grid for grid, _ in kernel.launched] == [(3, 1, 1)] * 3


class _Runner:
    """Stands for Triton's launcher: a function in Python that calls one in C."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.launch: Any = lambda *arguments: self.launched.append(arguments)

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)


def test_a_launch_of_what_is_compiled_is_a_step_of_a_recorded_call() -> None:
    kernel, holder = _Kernel("x"), _Kernel()
    kernel.run = runner = _Runner()  # type: ignore[assignment,method-assign]

    def recorded(number: int) -> tapes.RecordedCall | None:
        recorder = tapes._thread.recorder = tapes.CallRecorder(())
        try:
            Launch(kernel, (3,), {"x": number}, {})()
        finally:
            tapes._thread.recorder = None
        recorder.complete(holder, (), print)
        return recorder.finished(None)

    assert recorded(5) is None, "what compiles has enqueued what is no step"
    call = recorded(7)
    assert call is not None
    (step,) = call.steps
    function, arguments, names, slots, kind = step
    assert (function, names, slots, kind) == (runner.launch, None, (), "launch")
    assert arguments[2][-1] == ("constant", 7)
    assert [each[-1] for each in runner.launched] == [7]


def test_products_are_added_without_a_rounding_whatever_tritons_default_is() -> None:
    """Triton 3.9 warns at each kernel that does not say so, and 3.10 will do otherwise."""
    kernel = _Kernel("x")
    launch = Launch(kernel, (3,), {"x": None}, {"num_warps": 4})
    launch()
    launch.compile()
    assert kernel.options == [{"num_warps": 4, "enable_fp_fusion": True}] * 2


ADDRESS = 1 << 40


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (5, 5, True),
        (5, 6, True),
        (5, -7, True),
        (5, 32, False),
        (32, 0, True),
        (1, 5, False),  # Triton makes a constant of 1
        (5, ADDRESS + 5, False),  # 64 bits wide
        (ADDRESS, ADDRESS + 16, True),
        (ADDRESS, ADDRESS + 8, False),
        (ADDRESS + 8, ADDRESS + 24, True),
        (0.25, 0.5, True),
        (True, False, False),
        (None, 5, False),
        ((ADDRESS, 0.25), (ADDRESS + 16, 0.5), True),
        ((ADDRESS, None), (ADDRESS + 8, None), False),
    ],
)
def test_what_a_kernel_is_compiled_for(first: Any, second: Any, same: bool) -> None:
    kernel = _Kernel("x")
    for value in (first, second):
        Launch(kernel, (1,), {"x": value}, {})()
    assert kernel.compiled == (1 if same else 2)
    assert [arguments for _, arguments in kernel.launched] == ([(second,)] if same else [])


def test_tensors_differ_by_dtype_and_alignment() -> None:
    kernel = _Kernel("x")
    memory = torch.zeros(64, dtype=torch.float32)
    start = (16 - memory.data_ptr() % 16) % 16 // 4
    aligned, other = memory[start:], memory[start + 8 :]
    for tensor in (aligned, other, memory[start + 1 :], aligned.view(torch.int32), aligned):
        Launch(kernel, (1,), {"x": tensor}, {})()
    assert kernel.compiled == 3
    assert [arguments[0].data_ptr() for _, arguments in kernel.launched] == [
        other.data_ptr(),
        aligned.data_ptr(),
    ]


@pytest.mark.parametrize(
    "change", [{"constants": {"WIDE": 2}}, {"constants": {"WIDE": 1, "num_warps": 8}}]
)
def test_constants(change: dict[str, Any]) -> None:
    kernel = _Kernel("x", "WIDE")
    settings = {"kernel": kernel, "grid": (1,), "arguments": {"x": None}, "constants": {"WIDE": 1}}
    Launch(**settings)()
    Launch(**settings | change)()
    assert kernel.compiled == 2
    assert kernel.launched == []


def test_a_kernel_runs_with_any_number_of_programs() -> None:
    kernel = _Kernel("x")
    for programs in (1, 7, 1):
        Launch(kernel, (programs,), {"x": None}, {})()
    assert kernel.compiled == 1
    assert [grid for grid, _ in kernel.launched] == [(7, 1, 1), (1, 1, 1)]


def test_interpreted_kernels_are_not_remembered() -> None:
    kernel = _Kernel("x", interpreted=True)
    for _ in range(3):
        Launch(kernel, (1,), {"x": None}, {})()
    assert kernel.compiled == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": None}, r"missing \['n'\], unknown \[\]"),
        ({"x": None, "n": 1, "m": 2}, r"missing \[\], unknown \['m'\]"),
    ],
)
def test_arguments_that_are_not_the_kernels(arguments: dict[str, Any], message: str) -> None:
    kernel = _Kernel("x", "n")
    with pytest.raises(TypeError, match=message):
        Launch(kernel, (1,), arguments, {})()
    Launch(kernel, (1,), {"x": None, "n": 1}, {})()
    with pytest.raises(TypeError, match=message):
        Launch(kernel, (1,), arguments, {})()


def test_a_program_of_many_sizes_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MAX_COMPILED", 2)
    kernel = _Kernel("x")
    for value in (1, 2, 32, 32, 1):
        Launch(kernel, (1,), {"x": value}, {})()
    assert kernel.compiled == 4
