"""Public calls that are played past Python do what they do by the long way. The interpreter stands
for compiled kernels here; tests/gpu/test_tapes_gpu.py plays those of a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import Group
from interlace.comm.groups import registration
from interlace.comm.groups.group import known_group
from interlace.comm.host.health import Health
from interlace.comm.launching import kernels
from interlace.comm.replay import deferred, replays, tapes
from interlace.comm.replay.replays import Replays
from interlace.comm.runtime import streams as gpu_streams
from interlace.comm.runtime.streams import Streams
from interlace.gemm import dispatch, schema
from interlace.operators.all_gather_gemm import fused as gathering
from interlace.operators.gemm_all_reduce import normed, normed_launch
from tests.entered import Listening

pytestmark = pytest.mark.skipif(
    not ("CC" in os.environ or shutil.which("gcc") or shutil.which("clang")),
    reason="no compiler for C, without which calls take the long way",
)

COLUMNS, INNER = 32, 48
_BEFORE = 3  # calls after which there is a tape
_TURNS = 5
_UNTIL_GRAPHS = 20
_BEFORE_GRAPHS = _BEFORE + 1  # and of graphs, as it first turns out that there is no other
_MOST_NORMED_ROWS = 6  # with more, calls of any number of rows are alike

# Function, rows of x, implementation, and what else is given.
_KINDS: dict[str, tuple[str, int, str, set[str]]] = {
    "gemv": ("gemm_all_reduce", 2, "gemv", {"bias"}),
    "few rows, norm": ("gemm_all_reduce", 4, "fused", {"residual", "norm_weight"}),
    "pushed, norm": ("gemm_all_reduce", 4, "pushed", {"residual", "norm_weight"}),
    "many rows, norm": ("gemm_all_reduce", 8, "pushed", {"bias", "residual", "norm_weight"}),
    "pushed, all-reduce": ("gemm_all_reduce", 8, "pushed", {"bias"}),
    "pushed, reduce-scatter": ("gemm_reduce_scatter", 8, "pushed", set()),
    "pushed, all-to-all": ("gemm_all_to_all", 8, "pushed", {"bias"}),
    "pushed, all-gather": ("all_gather_gemm", 6, "pushed", {"bias"}),
}


class _Interpreted:
    """Stands for a kernel that Triton has compiled."""

    function, packed_metadata = 5, (4, 1, 0)
    streams: list[int] = []  # noqa: RUF012, of all launches

    def __init__(self, kernel: Any) -> None:
        def launch(*arguments: Any) -> None:
            _Interpreted.streams.append(arguments[3])
            kernel[arguments[:1]](*arguments[9:])

        self.run = _Launcher(launch)


class _Launcher:
    """Stands for Triton's launcher: a function in Python that calls one in C."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)


class _Compiled(dict[Any, Any]):
    """Has compiled every launch, which is its own key here."""

    def get(self, key: Any, default: object = None) -> Any:
        kernel, _, constants = key
        made = self.setdefault(id(kernel), _Interpreted(kernel))
        names = [name for name in kernel.arg_names if name in constants]
        return made, tuple(constants[name] for name in names)


class _Graph:
    """Stands for a CUDA graph: what was captured, done again."""

    replayed = 0

    def __init__(self, enqueue: Callable[[], object]) -> None:
        self._enqueue = enqueue

    def replay(self) -> None:
        _Graph.replayed += 1
        self._enqueue()


def _allocate(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor as a step, as those of GPUs are."""
    return tapes.step(torch.empty, tuple(shape), dtype=dtype, device=device)


def _known_call(ranks: int, x: torch.Tensor, *others: Any) -> Any:
    """The form of a call with a norm, and its addresses if it has few rows."""
    return ("a form", x.shape, ranks), None if len(x) > _MOST_NORMED_ROWS else (x.data_ptr(),)


@contextlib.contextmanager
def _playing() -> Iterator[tuple[dist.ProcessGroup, Group]]:
    """A group whose calls are found and played as those of GPUs are, but become no graphs."""
    members = dist.new_group()
    group = interlace.group_of(members, device="cpu")
    group.streams._order.streams[7] = group.streams._order.executed = torch.Stream("cpu")

    def recalling_group(_: object, *operands: torch.Tensor | None) -> Group | None:
        wants_gradient = torch.is_grad_enabled() and torch._C._any_requires_grad(*operands)
        is_long_way = wants_gradient or not registration.is_unobserved()
        return None if is_long_way else known_group(members, group.device)

    def rows_on(device: torch.device) -> Callable[..., torch.Tensor]:
        return lambda rows, columns, dtype: _allocate((rows, columns), dtype, device)

    with pytest.MonkeyPatch.context() as patch:
        for module in (schema, normed):
            patch.setattr(module, "may_be_played", lambda _: registration.is_unobserved())
            patch.setattr(module, "recalling_group", recalling_group)
        for module in (normed, normed_launch):
            patch.setattr(module, "MOST_NORMED_ROWS", _MOST_NORMED_ROWS)
        patch.setattr(registration, "are_on_gpu", lambda _: True)
        patch.setattr(normed, "_known_call", _known_call)
        patch.setattr(normed_launch, "empty_rows_on", rows_on)
        for allocating in (deferred, gathering):
            patch.setattr(allocating, "empty", _allocate)
        patch.setattr(kernels, "_compiled", _Compiled())
        patch.setattr(kernels, "_key", lambda launch, _: (launch.kernel, 0, launch.constants))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for name, answer in {
            "_cuda_getDevice": lambda: None,
            "_cuda_getCurrentRawStream": lambda _: 7,
            "_cuda_isCurrentStreamCapturing": lambda: False,
        }.items():
            patch.setattr(torch._C, name, answer, raising=False)
        patch.setattr(group.replays, "is_enabled", True)
        patch.setattr(group.streams, "continues", lambda: True)
        patch.setattr(Replays, "_run", lambda _, key, enqueue, nbytes: enqueue() or True)
        yield members, group
    schema._player.cache_clear()
    normed._player.cache_clear()
    for door in registration.entrances():
        door._play = None


@contextlib.contextmanager
def _replaying() -> Iterator[tuple[dist.ProcessGroup, Group]]:
    """As :func:`_playing`, but calls become graphs; all results of a shape have the same memory, as
    they have by PyTorch's allocator where the program drops them.
    """
    memory: dict[Any, torch.Tensor] = {}

    def found(*key: Any) -> torch.Tensor:
        if key not in memory:
            shape, dtype, device = key
            memory[key] = torch.empty(shape, dtype=dtype, device=device)
        return memory[key]

    def allocate(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return tapes.step(found, tuple(shape), dtype, device)

    run = Replays._run
    with _playing() as (members, group), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replays, "_run", run)
        patch.setattr(Replays, "_capture", lambda _, enqueue: _Graph(enqueue))
        patch.setattr(replays, "allocation_of", lambda _: 0)
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        for allocating in (deferred, gathering):
            patch.setattr(allocating, "empty", allocate)
        yield members, group


def _operands(name: str, seed: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Whole numbers, whose sums have the same bits in any order: NumPy's order differs with where
    memory lies.
    """
    _, rows, _, others = _KINDS[name]
    of_rank = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    of_all = torch.Generator().manual_seed(10 * seed + 9)

    def new(generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).float()

    shapes = {"bias": (COLUMNS,), "residual": (rows, COLUMNS), "norm_weight": (COLUMNS,)}
    given = {other: new(of_all, *shape) for other, shape in shapes.items() if other in others}
    return (new(of_rank, rows, INNER), new(of_rank, COLUMNS, INNER)), given


def _played(name: str) -> tuple[list[bool], list[bool]]:
    """Whether calls with other operands each time were played, and whether each result was that of
    an equal call which was not.
    """
    function, _, impl, _ = _KINDS[name]
    is_played, is_equal = [], []
    with _playing() as (members, group), torch.no_grad():
        call = functools.partial(getattr(interlace, function), impl=impl, group=members)
        module = normed if "norm" in name else schema
        way = "_call_in_full" if "norm" in name else "_plain"
        long_ways: list[str] = []
        in_full = getattr(module, way)

        def counted(*arguments: Any) -> Any:
            long_ways.append(name)
            return in_full(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, way, counted)
            for turn in range(_TURNS):
                tensors, named = _operands(name, turn)
                before = len(long_ways)
                found = call(*tensors, **named)
                is_played.append(len(long_ways) == before)
                with Listening():
                    wanted = call(*tensors, **named)
                pairs = zip(found, wanted, strict=True) if "norm" in name else [(found, wanted)]
                is_equal.append(all(torch.equal(one, other) for one, other in pairs))
        group.check()
    return is_played, is_equal


@pytest.mark.parametrize("name", _KINDS)
def test_calls_are_played_to_the_same_bits(ranks: Any, name: str) -> None:
    for is_played, is_equal in ranks(2).run(_played, name):
        assert is_equal == _TURNS * [True]
        assert is_played == _BEFORE * [False] + (_TURNS - _BEFORE) * [True]


def _on_one_rank_alone(name: str) -> list[bool]:
    """Whether results are right where one rank plays what its peer makes by the long way, before
    and behind a call for which the memory of words grows.
    """
    function, _, impl, _ = _KINDS[name]
    is_equal = []
    with _playing() as (members, group), torch.no_grad():
        call = functools.partial(getattr(interlace, function), impl=impl, group=members)

        def turns(count: int) -> None:
            for turn in range(count):
                (x, w), named = _operands(name, turn)
                wanted = getattr(interlace, function)(x, w, **named, impl="unfused", group=members)
                listens = turn >= _BEFORE and turn % 2 == dist.get_rank()
                with Listening() if listens else contextlib.nullcontext():
                    is_equal.append(torch.equal(call(x, w, **named), wanted))

        turns(_BEFORE + 4)
        (x, w), named = _operands(name, 0)
        call(x.repeat(16, 1), w, **named)
        turns(_BEFORE + 4)
        group.check()
    return is_equal


@pytest.mark.parametrize("name", ["gemv", "pushed, all-reduce", "pushed, all-gather"])
def test_ranks_need_not_play_alike(ranks: Any, name: str) -> None:
    for is_equal in ranks(2).run(_on_one_rank_alone, name):
        assert is_equal == 2 * (_BEFORE + 4) * [True]


def _refused() -> list[str]:
    """The errors of calls like one that is played, but for an argument that is not valid."""
    errors = []
    with _playing() as (members, group), torch.no_grad():
        call = functools.partial(interlace.gemm_all_reduce, impl="gemv", group=members)
        (x, w), _ = _operands("gemv", 0)
        for _ in range(_BEFORE + 1):
            call(x, w)
        one: Any = torch.full((1,), 2.0)
        for wrong in ({"w": w, "x_scale": one}, {"w": w, "w_scale": one}, {"w": None}):
            for _ in range(_BEFORE + 1):
                with pytest.raises(interlace.ArgumentError) as caught:
                    call(x, **wrong)
                errors.append(str(caught.value))
        group.check()
    return errors


def test_what_is_not_valid_is_refused_behind_a_call_that_was(ranks: Any) -> None:
    for errors in ranks(2).run(_refused):
        for number, words in enumerate(("x_scale must be", "w_scale must be", "w must be a")):
            own = errors[number * (_BEFORE + 1) : (number + 1) * (_BEFORE + 1)]
            assert all(words in error for error in own)


def _from_inductor() -> list[bool]:
    """Whether calls of a compiled program entered nothing but the player."""
    is_played = []
    operator = torch.ops.interlace.gemm_all_reduce.default
    enter = registration.Entrance.past_dispatcher
    entered: list[bool] = []

    def counted(*args: Any) -> Any:
        entered.append(True)
        return enter(*args)

    with _playing() as (members, group), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration.Entrance, "past_dispatcher", counted)
        play = tapes.player(registration.entrance("gemm_all_reduce").from_inductor)
        others = None, None, None, torch.float32, members.group_name
        for turn in range(-1, _TURNS):
            (x, w), _ = _operands("gemv", max(turn, 0))
            wanted = operator(x, w, *others, "unfused", "")  # the first one takes memory
            if turn >= 0:
                before = len(entered)
                assert torch.equal(play(x, w, *others, "gemv", ""), wanted)
                is_played.append(len(entered) == before)
        group.check()
    return is_played


def test_calls_of_compiled_programs_are_played_as_a_whole(ranks: Any) -> None:
    for is_played in ranks(2).run(_from_inductor):
        assert is_played == _BEFORE * [False] + (_TURNS - _BEFORE) * [True]


def _with_gradients(function: str, impl: str) -> tuple[list[bool], list[bool], list[bool]]:
    """Of calls with gradients switched on, whose operands want one or not: whether they were
    played, whether their implementation was, and whether each has the result and the gradients that
    it must have.
    """
    is_played, is_run_played, is_right = [], [], []
    long_ways: list[str] = []
    plain, run = schema._plain, dispatch.run

    def counted(*arguments: Any) -> Any:
        long_ways.append("plain")
        return plain(*arguments)

    def counted_run(*arguments: Any, **named: Any) -> Any:
        long_ways.append("run")
        return run(*arguments, **named)

    with _playing() as (members, group), pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "_plain", counted)
        patch.setattr(dispatch, "run", counted_run)
        call = functools.partial(getattr(interlace, function), impl=impl, group=members)
        (x, w), _ = _operands("gemv", 0)
        # Memory that grows forgets the calls before.
        call(x.requires_grad_(), w.requires_grad_()).sum().backward()
        # First without, then by turns with operands that want a gradient.
        for turn in range(4 * _TURNS):
            wants = turn >= _TURNS and turn % 2 == 0
            (x, w), _ = _operands("gemv", turn)
            ours, theirs = (
                [tensor.clone().requires_grad_(wants) for tensor in (x, w)] for _ in range(2)
            )
            del long_ways[:]
            y = call(*ours)
            is_played.append("plain" not in long_ways)
            is_run_played.append("run" not in long_ways)
            wanted = _wanted(function, *theirs, members)
            right = torch.equal(y, wanted) and y.requires_grad is wants
            if wants and right:
                grad = torch.full_like(y, 2.0)
                y.backward(grad)
                wanted.backward(grad)
                right = all(
                    torch.equal(one.grad, other.grad)
                    for one, other in zip(ours, theirs, strict=True)
                )
            is_right.append(right)
        group.check()
    return is_played, is_run_played, is_right


def _wanted(
    function: str, x: torch.Tensor, w: torch.Tensor, members: dist.ProcessGroup
) -> torch.Tensor:
    """The result by PyTorch's products and sums, with gradients."""
    if function == "all_gather_gemm":
        return _Gathered.apply(x, members) @ w.T  # type: ignore[no-any-return,no-untyped-call]
    return _Summed.apply(x @ w.T, members)  # type: ignore[no-any-return,no-untyped-call]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, members: dist.ProcessGroup) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=members)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, members: dist.ProcessGroup) -> torch.Tensor:
        ctx.members, gathered = members, rows.new_empty(2 * len(rows), rows.shape[1])
        dist.all_gather_into_tensor(gathered, rows, group=members)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.members)
        return total.chunk(2)[dist.get_rank()], None


@pytest.mark.parametrize(
    ("function", "impl"),
    [("gemm_all_reduce", "gemv"), ("gemm_all_reduce", "pushed"), ("all_gather_gemm", "pushed")],
)
def test_gradients_are_not_lost(ranks: Any, function: str, impl: str) -> None:
    """Of calls that want one, what runs below autograd is played."""
    for is_played, is_run_played, is_right in ranks(2).run(_with_gradients, function, impl):
        assert is_right == 4 * _TURNS * [True]
        wants = [turn >= _TURNS and turn % 2 == 0 for turn in range(4 * _TURNS)]
        plain = [each for each, want in zip(is_played, wants, strict=True) if not want]
        assert plain == _BEFORE * [False] + (len(plain) - _BEFORE) * [True]
        assert sum(is_played) == plain.count(True)
        inner = [each for each, want in zip(is_run_played, wants, strict=True) if want]
        assert inner[_BEFORE:] == (len(inner) - _BEFORE) * [True]


def _as_graphs(name: str, impl: str) -> tuple[list[bool], list[bool], list[bool]]:
    """Of calls that are graphs, with other values in the same memory and at last with other memory:
    whether they were played, whether they were replayed, and whether each result was right.
    """
    is_played, is_replayed, is_right = [], [], []
    long_ways: list[str] = []
    plain, rows = schema._plain, 6 if name == "all_gather_gemm" else 8

    def counted(*arguments: Any) -> Any:
        long_ways.append(name)
        return plain(*arguments)

    def new(seed: int) -> tuple[torch.Tensor, ...]:
        of_rank = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        of_all = torch.Generator().manual_seed(10 * seed + 9)
        shapes = (rows, INNER), (COLUMNS, INNER), (COLUMNS,)
        generators = of_rank, of_rank, of_all
        return tuple(
            torch.randint(-4, 5, shape, generator=generator).float()
            for shape, generator in zip(shapes, generators, strict=True)
        )

    with _replaying() as (members, group), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "_plain", counted)
        call = functools.partial(getattr(interlace, name), group=members)
        places = new(0)
        for turn in range(-_UNTIL_GRAPHS, _BEFORE_GRAPHS + 3):
            if turn == _BEFORE_GRAPHS + 2:
                places = new(0)
            for place, value in zip(places, new(turn + _UNTIL_GRAPHS), strict=True):
                place.copy_(value)
            wanted = call(*places, impl="unfused").clone()
            before, graphs_before = len(long_ways), _Graph.replayed
            with Listening() if turn < 0 else contextlib.nullcontext():
                found = call(*places, impl=impl)
            if turn >= 0:
                is_played.append(len(long_ways) == before)
                is_replayed.append(_Graph.replayed > graphs_before)
            is_right.append(torch.equal(found, wanted))
        group.check()
    return is_played, is_replayed, is_right


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("gemm_all_reduce", "fused"),
        ("gemm_reduce_scatter", "fused"),
        ("gemm_all_to_all", "fused"),
        ("all_gather_gemm", "fused"),
        ("all_gather_gemm", "chunked"),
    ],
)
def test_graphs_are_played(ranks: Any, name: str, impl: str) -> None:
    """Until operands lie elsewhere, where there is no graph."""
    for is_played, is_replayed, is_right in ranks(2).run(_as_graphs, name, impl):
        assert all(is_right)
        assert is_played == [*_BEFORE_GRAPHS * [False], True, True, False]
        assert is_replayed[2:] == [*_BEFORE_GRAPHS * [True], False]


def test_kernels_are_played_rather_than_their_graphs(ranks: Any) -> None:
    for is_played, is_replayed, is_right in ranks(2).run(_as_graphs, "gemm_all_reduce", "gemv"):
        assert all(is_right)
        assert is_played == [*_BEFORE * [False], *4 * [True]]
        assert is_replayed == [True, *(_BEFORE_GRAPHS + 2) * [False]]


class _Stream:
    """Stands for a stream of a GPU."""

    def __init__(self, handle: int, follows: list[tuple[int, int]]) -> None:
        self.cuda_stream, self._follows = handle, follows

    def wait_stream(self, other: _Stream) -> None:
        self._follows.append((self.cuda_stream, other.cuda_stream))


def _on_streams(name: str, impl: str, seed: int) -> tuple[list[bool], list[bool], int]:
    """Of calls on one of two streams each: whether the stream waited for that of the call before if
    it is another one, and whether each result was right; and the number of calls that were played.
    """
    follows: list[tuple[int, int]] = []
    streams = {handle: _Stream(handle, follows) for handle in (7, 8)}
    current, chance, long_ways = [7], random.Random(seed), [0]
    is_ordered, is_right = [], []
    plain, running = schema._plain, Health.running

    def counted(*arguments: Any) -> Any:
        long_ways[0] += 1
        return plain(*arguments)

    def ordered(health: Health, check: Callable[[], None]) -> Any:
        if not health._replays.capturing:  # as on a GPU
            health._streams.follow_last_call()
        return running(health, check)

    with _replaying() as (members, group), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "_plain", counted)
        patch.setattr(Health, "running", ordered)
        patch.setattr(gpu_streams, "_capture_of", lambda _: None)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: current[0], raising=False)
        patch.setattr(
            group.streams, "continues", functools.partial(Streams.continues, group.streams)
        )
        patch.setattr(group.streams._order, "streams", streams)
        patch.setattr(group.streams._order, "executed", None)
        call = functools.partial(getattr(interlace, name), group=members)
        (x, w), _ = _operands("pushed, all-gather", 0)
        wanted = call(x, w, impl="unfused").clone()
        last, turns, long_ways[0] = current[0], 60, 0
        for _ in range(turns):
            # Some calls follow each other on a stream, so that they are played.
            current[0] = chance.choice((7, 8)) if chance.random() < 0.4 else last
            del follows[:], _Interpreted.streams[:]
            found = call(x, w, impl=impl)
            follows_last = current[0] == last or (current[0], last) in follows
            is_ordered.append(follows_last and set(_Interpreted.streams) == {current[0]})
            is_right.append(torch.equal(found, wanted))
            last = current[0]
        group.check()
    return is_ordered, is_right, turns - long_ways[0]


@pytest.mark.parametrize(
    ("name", "impl"),
    [("gemm_all_reduce", "gemv"), ("gemm_all_reduce", "fused"), ("all_gather_gemm", "pushed")],
)
def test_calls_on_two_streams_follow_each_other(ranks: Any, name: str, impl: str) -> None:
    """In whatever way they are made: kernels that wait for peers must not overlap."""
    for is_ordered, is_right, played in ranks(2).run(_on_streams, name, impl, 5):
        assert all(is_ordered)
        assert all(is_right)
        assert played > 10
