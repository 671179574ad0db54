"""Recorded calls and the compiled player; calls of operators are tested on GPUs
(tests/gpu/test_replays_gpu.py).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import interlace
import interlace.operators  # what calls of operators depend on
from interlace.comm.groups.process_groups import default_group
from interlace.comm.groups.registration import entrance
from interlace.comm.replay import recording, tapes
from interlace.comm.replay.memory import releases
from interlace.comm.runtime import context as ctx
from interlace.comm.runtime.conditions import by_id, has, is_in_environment, returns
from interlace.comm.runtime.streams import launches
from tests.entered import Listening

pytestmark = pytest.mark.skipif(
    not ("CC" in os.environ or shutil.which("gcc") or shutil.which("clang")),
    reason="no compiler for C, without which calls take the long way",
)
_BEFORE = 3  # calls after which there is a tape


class _Holder:
    is_open = True


class _Doubling:
    """A call that adds twice a tensor to another, and what it needs."""

    def __init__(self) -> None:
        self.holder, self.long_ways, self.failures = _Holder(), 0, []
        self.one, self.conditions = torch.ones(()), []
        self.launch: Callable[..., None] = lambda y, factor: None
        self.play = tapes.player(self.call)
        assert self.play is not self.call, "the player cannot be compiled here"

    def call(self, x: torch.Tensor, y: torch.Tensor | None, *options: Any) -> Any:
        self.long_ways += 1
        recorder = tapes.recorder()
        tapes.keep(self.one)
        doubled = tapes.step(torch.mul, x, 2.0)
        total = doubled if y is None else tapes.step(torch.add, doubled, y, alpha=1)
        if recorder is not None:
            recorder.note(self.launch, (total, (self.one, 3)), {}, None, kind="launch")
            conditions = (has(self.holder, "is_open"), *self.conditions)
            recorder.complete(self.holder, conditions, self.failures.append)
        return total, (self.one, None)

    def repeat(self, *arguments: Any, times: int = _BEFORE) -> None:
        for _ in range(times):
            self.play(*arguments)

    def is_played(self, *arguments: Any) -> bool:
        """Make a call, and return whether it was played."""
        before = self.long_ways
        self.play(*arguments)
        return self.long_ways == before

    def complete(self) -> None:
        """Say that the call that is being recorded, if one is, has done nothing but its steps."""
        recorder = tapes.recorder()
        if recorder is not None:
            recorder.complete(self.holder, (), self.failures.append)


@pytest.fixture
def doubling() -> _Doubling:
    return _Doubling()


def test_a_call_that_comes_again_is_played(doubling: _Doubling) -> None:
    launched = []
    doubling.launch = lambda *args: launched.append(args)
    doubling.repeat(torch.zeros(3), torch.ones(3))
    assert doubling.long_ways == _BEFORE
    before = launches.value
    x, y = torch.arange(3.0), torch.full((3,), 5.0)
    total, (one, nothing) = doubling.play(x, y)
    assert doubling.long_ways == _BEFORE
    assert total.tolist() == [5, 7, 9]
    assert one is doubling.one
    assert nothing is None
    assert launches.value == before + 1
    assert launched == [(total, (doubling.one, 3))]


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(4), torch.ones(4)),
        (torch.zeros(3, 1), torch.ones(3)),
        (torch.zeros(6)[::2], torch.ones(3)),
        (torch.zeros(3, dtype=torch.float64), torch.ones(3)),
        (torch.zeros(4)[1:], torch.ones(3)),
        (torch.zeros(3), None),
        (torch.zeros(3), torch.ones(3), None),
        (torch.zeros(3), torch.ones(3), ""),
    ],
    ids=["size", "dimensions", "stride", "dtype", "alignment", "absent", "more", "text"],
)
def test_another_call_is_not_played(doubling: _Doubling, other: tuple[Any, ...]) -> None:
    doubling.repeat(torch.zeros(3), torch.ones(3), times=_BEFORE + 1)
    assert doubling.long_ways == _BEFORE
    total, _ = doubling.play(*other)
    assert doubling.long_ways == _BEFORE + 1
    assert total.dtype == other[0].dtype


def test_a_tensor_is_not_taken_for_one_of_other_dimensions_and_options(
    doubling: _Doubling,
) -> None:
    """Strides of dimensions of one element may be any numbers, even those that say the same."""
    seen: list[torch.Size] = []

    def call(x: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.append(x.shape)
        doubling.complete()
        return x

    play, memory = tapes.player(call), torch.zeros(100)
    stride = int.from_bytes(b"eeeeeeei", "little")  # seven empty lists, and that a number follows
    for _ in range(_BEFORE + 1):
        play(memory.as_strided((1, 100), (stride, 1)))
    play(memory.as_strided((1,), (ord("d") << 56,)), *7 * [[]], 1)
    assert seen == [*_BEFORE * [(1, 100)], (1,)]


@pytest.mark.parametrize(
    "options",
    [(1,), (2,), (-1,), (-2,), (1.0,), (True,), (False,), (None,), ("a",), ("b",), ("ab",),
     (torch.float16,), (torch.float32,), ([],), ("", "a"), ("a", "")],
    ids=str,
)  # fmt: skip
def test_options_are_part_of_a_call(doubling: _Doubling, options: tuple[Any, ...]) -> None:
    x, y = torch.zeros(3), torch.ones(3)
    doubling.repeat(x, y, 0)
    for one in ((1,), (2,), (-1,), (-2,), (1.0,), (True,), (None,), ("a",), ([],), ("", "a")):
        if (type(one[0]), one) != (type(options[0]), options):
            doubling.repeat(x, y, *one)
    before = doubling.long_ways
    doubling.play(x, y, *options)
    assert doubling.long_ways == before + 1


@pytest.mark.parametrize("options", [([1],), ((),), (1 << 70,), ({},)], ids=str)
def test_options_that_are_not_looked_at_take_the_long_way(
    doubling: _Doubling, options: tuple[Any, ...]
) -> None:
    doubling.repeat(torch.zeros(3), None, *options, times=3 * _BEFORE)
    assert doubling.long_ways == 3 * _BEFORE


def test_calls_that_take_turns_are_played(doubling: _Doubling) -> None:
    """As those of a layer do, of which each is recorded between two recordings of the others."""
    kinds = [(torch.zeros(size), None) for size in range(1, 9)]
    for _ in range(_BEFORE):
        for kind in kinds:
            doubling.play(*kind)
    before = doubling.long_ways
    for kind in kinds:
        doubling.play(*kind)
    assert doubling.long_ways == before


def test_arguments_by_name_and_subclasses_take_the_long_way(doubling: _Doubling) -> None:
    class Other(torch.Tensor):
        pass

    x = torch.zeros(3)
    for _ in range(2 * _BEFORE):
        doubling.play(x, y=None)
        doubling.play(x.as_subclass(Other), None)
    assert doubling.long_ways == 4 * _BEFORE


def test_parameters_of_subclasses_are_tensors(doubling: _Doubling) -> None:
    """PyTorch looks at them, as at those of engines, by way of Python, and not while they are
    played.
    """
    looks = []

    class Engines(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, function: Any, *others: Any) -> Any:
            looks.append(function)
            return super().__torch_function__(function, *others)

    doubling.repeat(torch.zeros(3), None)
    x = torch.ones(3)
    for parameter in (torch.nn.Parameter(x, False), Engines(x, False)):
        before = doubling.long_ways
        looks.clear()
        total, _ = doubling.play(parameter, None)
        assert doubling.long_ways == before
        assert looks == []
        assert type(total) is torch.Tensor
        assert total.tolist() == [2, 2, 2]
    assert Engines(x, False).numel() == 3
    assert looks, "they are looked at so again afterwards"


def test_what_users_give_is_played_where_it_is_as_it_lies(doubling: _Doubling) -> None:
    class Engines(torch.nn.Parameter):
        pass

    play = tapes.player(doubling.call, is_public=True)
    x = torch.ones(3)
    for _ in range(_BEFORE):
        play(x, None)
    for ordinary in (x, torch.nn.Parameter(x, False)):
        before = doubling.long_ways
        assert play(ordinary, None)[0].tolist() == [2, 2, 2]
        assert doubling.long_ways == before
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg()
    for _ in range(2 * _BEFORE):
        for other in (negated, Engines(x, False)):
            before = doubling.long_ways
            total = play(other, None)[0]
            assert doubling.long_ways == before + 1
            assert torch.equal(total, 2 * other)
    with pytest.raises(TypeError):
        play(None, None)
    assert play(x.to_sparse(), None)[0].to_dense().tolist() == [2, 2, 2]


def test_groups_are_told_apart(ranks: Any) -> None:
    assert ranks(2).run(_played_by_group) == 2 * [[0, 0, 1, 1]]


def _played_by_group() -> list[int]:
    """How many calls of two groups, each after one of the other, have taken the long way behind
    their first ones.
    """
    groups = [dist.new_group() for _ in range(2)]
    holders, long_ways = [_Holder(), _Holder()], 0

    def call(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        nonlocal long_ways
        long_ways += 1
        number = groups.index(group)
        y = tapes.step(torch.mul, x, number + 2)
        recorder = tapes.recorder()
        if recorder is not None:
            recorder.complete(holders[number], (), print)
        return y

    play, x = tapes.player(call, is_public=True), torch.ones(3)
    for _ in range(_BEFORE):
        for group in groups:
            play(x, group)
    seen = []
    for _ in range(2):
        for number, group in enumerate(groups):
            before = long_ways
            assert play(x, group).tolist() == 3 * [number + 2]
            seen.append(long_ways - before)
        tapes.forget(holders[0])
        tapes.forget(holders[1])
    return seen


def test_calls_of_programs_are_played(tmp_path: Any) -> None:
    """By Triton's launcher, with a driver that does nothing: see the script."""
    script = Path(__file__).parents[2] / "benchmarks" / "host_without_gpu.py"
    command = [sys.executable, str(script), "--calls", "0"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    entered = [int(count) for count in re.findall(r"enters (\d+) functions", output)]
    # The one that is called, what it looks at, and the function that asks.
    assert [count <= most for count, most in zip(entered, (3, 11), strict=True)] == [True, True]


def test_what_must_be_so(doubling: _Doubling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "1")
    kept: list[int] = []
    doubling.conditions = [
        returns(torch.is_grad_enabled), returns(kept.__len__), returns({0: 5}.get, 0),
        is_in_environment("OF_THIS_TEST"), is_in_environment("NEVER_SET"),
        by_id(has(doubling, "one")),
    ]  # fmt: skip

    is_played = functools.partial(doubling.is_played, torch.zeros(3), None)
    doubling.repeat(torch.zeros(3), None)
    assert is_played()
    with torch.no_grad():
        assert not is_played()
    kept.append(1)
    assert not is_played()
    kept.clear()
    assert is_played()
    for variable, value in (("OF_THIS_TEST", "2"), ("NEVER_SET", "")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert not is_played()
    monkeypatch.delenv("OF_THIS_TEST")
    assert not is_played()
    monkeypatch.setenv("OF_THIS_TEST", "1")
    doubling.holder.is_open = False
    assert not is_played()
    del doubling.holder.is_open
    assert is_played()
    doubling.one = torch.ones(())
    assert not is_played()


def test_what_is_never_so_again_is_recorded_again(doubling: _Doubling) -> None:
    settings = {0: 5}
    doubling.conditions = [returns(settings.get, 0)]
    x, y = torch.zeros(3), torch.zeros(3)

    is_played = functools.partial(doubling.is_played, x, y)
    doubling.repeat(x, y)
    assert is_played()
    # A refusal now and then is no reason.
    for _ in range(2):
        settings[0] = 6
        assert not any(is_played() for _ in range(15))
        settings[0] = 5
        assert is_played()
    settings[0] = 6
    doubling.conditions = [returns(settings.get, 0)]
    assert not any(is_played() for _ in range(16 + _BEFORE))
    assert is_played()


def test_calls_of_users_are_told_apart_by_the_mode_of_gradients() -> None:
    modes: list[bool] = []
    holder = _Holder()

    def call(x: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        y = tapes.step(torch.add, x, 1)
        recorder = tapes.recorder()
        if recorder is not None:
            recorder.complete(holder, (), lambda _: None)
        return y

    play, x = tapes.player(call, is_public=True), torch.zeros(3)
    for _ in range(2 * _BEFORE):
        play(x)
        with torch.no_grad():
            play(x)
    assert modes == _BEFORE * [True, False]


def test_what_cannot_be_asked_is_not_so(doubling: _Doubling) -> None:
    errors: list[BaseException] = []

    def ask() -> int:
        if errors:
            raise errors[0]
        return 0

    doubling.conditions = [returns(ask)]
    doubling.repeat(torch.zeros(3), None)
    errors.append(ValueError("no answer"))
    assert doubling.play(torch.zeros(3), None)[0].tolist() == [0, 0, 0]
    assert doubling.long_ways == _BEFORE + 1
    errors[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        doubling.play(torch.zeros(3), None)
    errors.clear()
    doubling.play(torch.zeros(3), None)
    assert doubling.long_ways == _BEFORE + 1


def test_what_is_not_known_has_no_tape(doubling: _Doubling) -> None:
    long_way: Callable[..., Any]

    def plus(x: torch.Tensor, _: Any) -> torch.Tensor:
        return x + 1

    def first_of(x: torch.Tensor, *_: int) -> torch.Tensor:
        return x + 1

    def unknown_tensor(x: torch.Tensor) -> Any:
        return tapes.step(torch.add, x, torch.ones(3))

    def unknown_result(x: torch.Tensor) -> Any:
        return tapes.step(torch.add, x, 1) + 1

    def address(x: torch.Tensor) -> Any:
        return tapes.step(plus, x, x.data_ptr())

    def unlike(x: torch.Tensor) -> Any:
        numbers.append(0)
        return tapes.step(torch.add, x, len(numbers))

    def spoiled(x: torch.Tensor) -> Any:
        tapes.spoil("for a test")
        return tapes.step(torch.add, x, 1)

    def incomplete(x: torch.Tensor) -> Any:
        return tapes.step(torch.add, x, 1)

    def many_arguments(x: torch.Tensor) -> Any:
        return tapes.step(first_of, x, *range(100))

    def many_tensors(x: torch.Tensor) -> Any:
        for _ in range(100):
            x = tapes.step(torch.add, x, 1)
        return x

    def listed(x: torch.Tensor) -> Any:
        return tapes.step(plus, x, [1])

    def attempted_late(x: torch.Tensor) -> Any:
        return tapes.attempt(torch.add, tapes.step(torch.add, x, 1), 1)

    def twice(x: torch.Tensor) -> Any:
        y = x + 1
        return y, y

    def pair_of_one(x: torch.Tensor) -> Any:
        return tapes.step(twice, x)

    def of_another_operator(x: torch.Tensor) -> Any:
        rows, options = x.view(1, 3), (torch.float32, "", "unfused", "")
        entrance("gemm_all_reduce")(rows, rows, None, None, None, *options)
        return tapes.step(torch.add, x, 1)

    numbers: list[int] = []
    for long_way in (
        unknown_tensor, unknown_result, address, unlike, spoiled, incomplete, listed,
        many_arguments, many_tensors, attempted_late, pair_of_one, of_another_operator,
    ):  # fmt: skip
        calls = 0

        def call(x: torch.Tensor, long_way: Callable[..., Any] = long_way) -> Any:
            nonlocal calls
            calls += 1
            result = long_way(x)
            recorder = tapes.recorder()
            if recorder is not None and long_way is not incomplete:
                recorder.complete(doubling.holder, (), doubling.failures.append)
            return result

        play, x = tapes.player(call), torch.zeros(3)
        for _ in range(40):
            play(x)
        assert calls == 40, long_way.__name__


def test_a_call_within_another_spoils_its_recording(doubling: _Doubling) -> None:
    """As in a finalizer, which may run anywhere: what comes behind it would not be noted."""
    inner = tapes.player(lambda x: tapes.step(torch.add, x, 1))

    def call(x: torch.Tensor) -> torch.Tensor:
        y = tapes.step(torch.mul, x, 2)
        doubling.complete()
        inner(x)
        assert tapes.step(torch.Tensor.add_, y, 5) is y
        return y

    play = tapes.player(call)
    for _ in range(3 * _BEFORE):
        assert play(torch.ones(3)).tolist() == [7, 7, 7]


def test_what_ends_before_a_call_is_recorded_leaves_no_recording(
    doubling: _Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> Any:
        raise KeyboardInterrupt

    x = torch.zeros(3)
    doubling.repeat(x, None, times=2)  # the second of two recordings asks
    with monkeypatch.context() as patch:
        patch.setattr(tapes, "_asked", [interrupt])
        with pytest.raises(KeyboardInterrupt):
            doubling.play(x, None)
    assert tapes.recorder() is None
    doubling.repeat(x, None, times=3 * _BEFORE)
    assert doubling.is_played(x, None)


def test_an_attempt_that_does_nothing_takes_the_long_way(doubling: _Doubling) -> None:
    known, long_ways = [0.0], []

    def try_it(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (x + 1, x + 2) if x[0].item() in known else None

    def call(x: torch.Tensor) -> Any:
        long_ways.append(x[0].item())
        found = tapes.attempt(try_it, x)
        recorder = tapes.recorder()
        if found is None:
            return x + 1, None
        if recorder is not None:
            recorder.complete(doubling.holder, (), doubling.failures.append)
        one, two = found
        return two, (one, None)

    play, x = tapes.player(call), torch.zeros(3)
    for _ in range(_BEFORE + 2):
        two, (one, _) = play(x)
        assert one.tolist() == [1] * 3
        assert two.tolist() == [2] * 3
    assert long_ways == _BEFORE * [0]
    assert play(torch.ones(3))[0].tolist() == [2] * 3
    assert long_ways == [*_BEFORE * [0], 1]
    known.append(1)
    assert play(torch.ones(3))[0].tolist() == [3] * 3
    assert long_ways == [*_BEFORE * [0], 1]
    assert doubling.failures == []


def test_a_step_returns_as_many_tensors_as_before(doubling: _Doubling) -> None:
    results: list[Any] = []

    def step(x: torch.Tensor) -> Any:
        return results[-1] if results else (x + 1, x + 2)

    def call(x: torch.Tensor) -> Any:
        found = tapes.step(step, x)
        doubling.complete()
        return found

    play, x = tapes.player(call), torch.zeros(3)
    for _ in range(_BEFORE + 1):
        play(x)
    for wrong in ((x,), x, (x, x, x), None):
        results.append(wrong)
        with pytest.raises(TypeError, match="as many tensors"):
            play(x)
    results.clear()
    assert len(play(x)) == 2


def test_one_tensor_given_twice_says_nothing_of_two(doubling: _Doubling) -> None:
    x = torch.ones(3)
    doubling.repeat(x, x, times=12)
    y = torch.full((3,), 5.0)
    assert doubling.play(x, y)[0].tolist() == [7, 7, 7]
    # Later recordings, of two tensors, make a tape, which is right for one tensor as well.
    doubling.repeat(x, y, times=40)
    before = doubling.long_ways
    assert doubling.play(x, x)[0].tolist() == [3, 3, 3]
    assert doubling.long_ways == before


def test_an_error_is_told_if_something_may_run(doubling: _Doubling) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("too little")

    steps = [lambda *_: None, lambda *_: None]
    doubling.launch = lambda *args: steps[0](*args)
    doubling.one = torch.ones(())
    doubling.repeat(torch.zeros(3), None)
    steps[0] = fail
    before = launches.value
    with pytest.raises(MemoryError, match="too little") as caught:
        doubling.play(torch.zeros(3), None)
    assert launches.value == before + 1
    assert doubling.failures == [caught.value]
    # The long way is not taken behind what may have run.
    assert doubling.long_ways == _BEFORE
    steps[0] = lambda *_: None
    doubling.play(torch.zeros(3), None)


def test_an_error_before_a_launch_is_told_to_nobody(doubling: _Doubling) -> None:
    doubling.repeat(torch.zeros(3), torch.ones(3))
    before = launches.value
    with pytest.raises(RuntimeError, match="size of tensor"):
        doubling.play(torch.zeros(3), torch.ones(2))  # the long way
    refuse = False

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if refuse:
            raise MemoryError
        return 2 * x

    def call(x: torch.Tensor) -> Any:
        y = tapes.step(multiply, x)
        doubling.complete()
        return y

    play = tapes.player(call)
    for _ in range(_BEFORE):
        play(torch.zeros(3))
    refuse = True
    with pytest.raises(MemoryError):
        play(torch.zeros(3))
    assert doubling.failures == []
    assert launches.value == before


def test_tapes_are_forgotten_and_recorded_again(doubling: _Doubling) -> None:
    doubling.repeat(torch.zeros(3), None)
    one = weakref.ref(doubling.one)
    tapes.forget(doubling.holder)
    doubling.one = torch.zeros(())
    gc.collect()
    assert one() is None, "a tape that is forgotten keeps nothing alive"
    _, (given, _) = doubling.play(torch.zeros(3), None)
    assert given is doubling.one
    doubling.repeat(torch.zeros(3), None)
    before = doubling.long_ways
    assert doubling.play(torch.zeros(3), None)[1][0] is doubling.one
    assert doubling.long_ways == before


def test_a_tape_goes_with_its_holder() -> None:
    kept, calls = torch.ones(3), 0
    holder = _Holder()

    def call(x: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        recorder = tapes.recorder()
        value = kept
        if recorder is not None and holder is not None:
            recorder.keep(value)
            recorder.complete(holder, (), print)
        return tapes.step(torch.add, x, value)

    play = tapes.player(call)
    for _ in range(_BEFORE + 1):
        play(torch.zeros(3))
    assert calls == _BEFORE
    of_kept = weakref.ref(kept)
    holder = kept = None  # type: ignore[assignment]
    gc.collect()
    assert of_kept() is None
    with pytest.raises(TypeError):
        play(torch.zeros(3))  # the long way, which has nothing to add any more


def test_what_is_gone_at_the_end_of_a_call_has_no_tape(doubling: _Doubling) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        doubling.holder = _Holder()
        doubling.complete()
        del doubling.holder
        return tapes.step(torch.add, x, 1)

    play = tapes.player(call)
    for _ in range(3 * _BEFORE):
        assert play(torch.zeros(3)).tolist() == [1, 1, 1]


def test_a_tape_may_be_forgotten_while_it_is_played(doubling: _Doubling) -> None:
    doubling.launch = lambda *_: tapes.forget(doubling.holder)
    doubling.repeat(torch.zeros(3), torch.ones(3))
    total, (one, _) = doubling.play(torch.zeros(3), torch.ones(3))
    assert doubling.long_ways == _BEFORE
    assert total.tolist() == [1, 1, 1]
    assert one is doubling.one
    doubling.play(torch.zeros(3), torch.ones(3))
    assert doubling.long_ways == _BEFORE + 1


def test_what_goes_with_a_tape_may_forget_it_once_more(doubling: _Doubling) -> None:
    class Forgetting:
        def __init__(self, holder: _Holder) -> None:
            self.holder = holder

        def __call__(self, *_: Any) -> None:
            pass

        def __del__(self) -> None:
            tapes.forget(self.holder)

    doubling.launch = Forgetting(doubling.holder)
    doubling.repeat(torch.zeros(3), None)
    doubling.launch = lambda *_: None
    gc.collect()
    tapes.forget(doubling.holder)
    doubling.repeat(torch.zeros(3), None)


def test_tapes_are_forgotten_while_another_thread_records(doubling: _Doubling) -> None:
    is_done, failures = threading.Event(), []

    def forget() -> None:
        while not is_done.is_set():
            try:
                tapes.forget(doubling.holder)
            except RuntimeError as error:
                failures.append(error)

    thread, interval = threading.Thread(target=forget), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for number in range(3000):
            x = torch.full((3,), float(number))
            assert doubling.play(x, None, number % 7)[0][0] == 2 * number
    finally:
        is_done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert failures == []


def test_many_kinds_of_calls_do_not_pile_up(doubling: _Doubling) -> None:
    x = torch.zeros(3)
    for number in range(5000):
        doubling.play(x, None, number)
    doubling.repeat(x, None, 7, times=2 * _BEFORE)
    before = doubling.long_ways
    doubling.play(x, None, 7)
    assert doubling.long_ways == before
    one = weakref.ref(doubling.one)
    doubling.one = torch.ones(())
    for number in range(5000):
        doubling.play(x, None, -number)
    gc.collect()
    assert one() is None, "a tape that has made room is gone"


def test_nothing_is_played_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("triton.runtime.build.compile_module_from_src", refuse)
    tapes._native.cache_clear()
    try:
        call = lambda x: x  # noqa: E731
        assert tapes.player(call) is call
    finally:
        tapes._native.cache_clear()


def test_no_references_are_lost_or_kept(doubling: _Doubling) -> None:
    x, y = torch.zeros(3), torch.ones(3)
    doubling.repeat(x, y)
    values = [x, y, doubling.one, None, doubling.launch]
    for _ in range(3):
        before = [sys.getrefcount(value) for value in values]
        for _ in range(1000):
            doubling.play(x, y)
        after = [sys.getrefcount(value) for value in values]
        assert [b - a for a, b in zip(before, after, strict=True) if abs(b - a) > 20] == []


def _played_where_it_may_be() -> dict[str, bool]:
    """In which states of a group and its program a recorded call is played. What a GPU would be
    asked is answered here.
    """
    members = dist.new_group()
    group = interlace.group_of(members, device="cpu")
    long_ways, gpu = 0, {"device": None, "stream": 7, "capturing": False}

    def call(x: torch.Tensor) -> torch.Tensor:
        nonlocal long_ways
        long_ways += 1
        y = tapes.step(torch.mul, x, 2)
        group.has_recorded(reads_in_place=True)
        return y

    play, x = tapes.player(call), torch.ones(3)

    def is_played() -> bool:
        before = long_ways
        assert play(x).tolist() == [2, 2, 2]
        return long_ways == before

    def played_within(context: contextlib.AbstractContextManager[Any]) -> bool:
        with context:
            return is_played()

    @contextlib.contextmanager
    def on_gpu(name: str, value: Any) -> Iterator[None]:
        before, gpu[name] = gpu[name], value
        yield
        gpu[name] = before

    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        record = group.health._record_view
        record[ctx.RECORD_CODE] = ctx.LATE
        yield
        record[ctx.RECORD_CODE] = 0

    @contextlib.contextmanager
    def symmetric_tensor() -> Iterator[None]:
        kept = interlace.empty_symmetric(4, dtype=torch.int32, group=members, device="cpu")
        yield
        del kept
        gc.collect()

    @contextlib.contextmanager
    def pending() -> Iterator[None]:
        releases._pending.append((torch.device("cpu"), print))
        yield
        releases._pending.clear()

    @contextlib.contextmanager
    def another_stream() -> Iterator[None]:
        before, group.streams._order.executed = group.streams._order.executed, None
        yield
        group.streams._order.executed = before

    asked = {
        "_cuda_getDevice": lambda: gpu["device"],
        "_cuda_getCurrentRawStream": lambda _: gpu["stream"],
        "_cuda_isCurrentStreamCapturing": lambda: gpu["capturing"],
    }
    with contextlib.ExitStack() as stack:
        for name, answer in asked.items():
            stack.enter_context(mock.patch.object(torch._C, name, answer, create=True))
        capturing = mock.patch.object(
            torch.cuda, "is_current_stream_capturing", asked["_cuda_isCurrentStreamCapturing"]
        )
        stack.enter_context(capturing)
        stack.enter_context(mock.patch.object(group.replays, "is_enabled", True))
        group.streams._order.streams[7] = group.streams._order.executed = torch.Stream("cpu")
        seen = {}
        for _ in range(2 * _BEFORE):
            seen["with gradients"] = is_played()
        with torch.no_grad():
            for _ in range(5 * _BEFORE):
                seen["at first"] = is_played()
            for name, context in {
                "with gradients again": torch.enable_grad(),
                "broken": broken(),
                "something to release": pending(),
                "behind a call on another stream": another_stream(),
                "with a symmetric tensor": symmetric_tensor(),
                "on another GPU": on_gpu("device", 1),
                "on another stream": on_gpu("stream", 8),
                "captured": on_gpu("capturing", True),
                "recorded": recording.recording(group.health),
                "listened to": torch.profiler.profile(),
                "in a mode": Listening(),
                "in forward mode": forward_ad.dual_level(),
                "batch-invariant": interlace.batch_invariant(),
                "measured": interlace.autotune(),
                "by a variable": mock.patch.dict("os.environ", {"INTERLACE_AUTOTUNE": "1"}),
                "in another world": default_group_is(group),
            }.items():
                seen[name] = played_within(context)
                seen["behind it"] = is_played() and seen.get("behind it", True)
            with mock.patch.object(group.replays, "is_enabled", False):
                group.replays.forget()
                for _ in range(5 * _BEFORE):
                    seen["forgotten, without replays"] = is_played()
            for _ in range(20 * _BEFORE):
                seen["recorded again"] = is_played()
            dist.destroy_process_group(members)
            seen["destroyed"] = is_played()
    return seen


@contextlib.contextmanager
def default_group_is(group: interlace.comm.Group) -> Iterator[None]:
    """Let calls without a group take this one."""
    token = default_group.set(group)
    yield
    default_group.reset(token)


def test_a_group_plays_calls_only_as_they_were_recorded(ranks: Any) -> None:
    for seen in ranks(2).run(_played_where_it_may_be):
        played = {name for name, is_played in seen.items() if is_played}
        assert played == {"at first", "behind it", "recorded again"}
        assert len(seen) == 22


def _kept_behind_process_group() -> tuple[bool, bool]:
    """Whether what a tape keeps is there, and whether it still is when the process group is gone
    and its :class:`Group` is not: another process group may lie where that was, with its name.
    """
    members = dist.new_group()
    group, one = interlace.group_of(members, device="cpu"), [torch.ones(3)]
    kept = weakref.ref(one[0])

    def call(x: torch.Tensor) -> torch.Tensor:
        tapes.keep(one[0])
        y = tapes.step(torch.add, x, one[0])
        recorder = tapes.recorder()
        if recorder is not None:
            recorder.complete(group.replays, (), lambda _: None)
        return y

    play = tapes.player(call)
    for _ in range(_BEFORE):
        play(torch.zeros(3))
    one.clear()
    seen = [kept() is not None]
    dist.destroy_process_group(members)
    del members
    gc.collect()
    seen.append(kept() is not None)
    assert group.name
    return seen[0], seen[1]


def test_tapes_go_with_their_process_group(ranks: Any) -> None:
    assert ranks(2).run(_kept_behind_process_group) == 2 * [(True, False)]
