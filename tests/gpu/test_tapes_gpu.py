"""Calls that are played past Python, of compiled programs and of others. Run with ``-m gpu``."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.operators  # registers torch.ops.interlace
from tests.entered import Listening, entered

pytestmark = pytest.mark.gpu

COLUMNS, INNER = 1024, 512
_TURNS = 14
_MOST_FUNCTIONS = 3
"""Functions of Python that a call enters which is played, the one that calls it among them."""
_MOST_FUNCTIONS_OF_PROGRAMS = 16
"""The same of a public function, with what finds out whether somebody listens."""
_MOST_FUNCTIONS_OF_GRAPHS = 60
"""The same where what is played is a graph."""
_MOST_FUNCTIONS_OF_TRAINING = 130
"""The same of a forward pass that autograd records, whose implementation is played."""
_UNTIL_GRAPHS = 40

# Rows; of 20,000 the parts do not fit one kernel behind the product, and the sum is a call of its
# own.
_KINDS = {
    "norm": {"rows": 300},
    "norm, again of other rows": {"rows": 301},
    "layer norm": {"rows": 600, "norm": "layer", "bias": True, "residual": False},
    "an engine's weight": {"rows": 299, "of_engine": True},
    "float8": {"rows": 300, "float8": True},
    "two kernels": {"rows": 20_000},
}


def _arguments(
    seed: int, rows: int, *, norm: str = "rms", bias: bool = False, residual: bool = True,
    float8: bool = False, of_engine: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    of_rank = torch.Generator("cuda").manual_seed(10 * seed + dist.get_rank())
    of_all = torch.Generator("cuda").manual_seed(10 * seed + 9)

    def new(generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    x, w = new(of_rank, rows, INNER), new(of_rank, COLUMNS, INNER)
    scales = None, None
    if float8:
        x, w = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        scales = torch.full((1,), 0.5, device="cuda"), torch.full((1,), 0.25, device="cuda")
    if of_engine:
        w = _Parameter(w, requires_grad=False)
    return (
        x, w, new(of_all, COLUMNS) if bias else None,
        new(of_all, rows, COLUMNS) if residual else None, new(of_all, COLUMNS), None, norm, 1e-6,
        None, None, False, *scales, dist.group.WORLD.group_name, "auto", "",
    )  # fmt: skip


class _Parameter(torch.nn.Parameter):
    """A weight at which PyTorch looks by way of Python, as vLLM's are."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


def _played() -> tuple[list[str], dict[str, int]]:
    """Where results differ from those of the dispatcher's way, which is never played, with other
    operands in each turn and late ranks; functions of Python that the last call of a kind enters.
    """
    group, wrong, functions = interlace.group_of(), [], {}
    operator = torch.ops.interlace.gemm_all_reduce_norm.default

    def compare(
        what: str, found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]
    ) -> None:
        if not all(map(torch.equal, found, wanted)):
            wrong.append(what)

    def turn(name: str, number: int) -> int:
        given = _arguments(number, **_KINDS[name])
        wanted = operator(*given)
        if (number + dist.get_rank()) % 3 == 0:
            torch.cuda._sleep(500_000)
        found, files = entered(lambda: operator.from_inductor(*given))
        compare(f"{name}, turn {number}", found, wanted)
        return len(files)

    with torch.inference_mode():
        for name in _KINDS:
            for number in range(_TURNS):
                functions[name] = turn(name, number)
        # The memory in which rows travel has grown since.
        for number in range(_TURNS):
            functions["grown"] = turn("norm", number)
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(3):
                turn("norm", number)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
            turn("norm", 0)
        with interlace.batch_invariant():
            turn("norm", 1)
        given = _arguments(3, **_KINDS["norm"])
        wanted = operator(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = operator.from_inductor(*given)
        for _ in range(2):
            graph.replay()
            operator.from_inductor(*given)
        compare("captured", captured, wanted)
        interlace.recover()
        for number in range(_TURNS):
            functions["recovered"] = turn("norm", number)
    with torch.no_grad():
        functions["without gradients"] = turn("norm", 0)
    given = _arguments(4, **_KINDS["norm"])
    given[1].requires_grad_()
    with torch.enable_grad():
        try:
            operator.from_inductor(*given)
        except interlace.ArgumentError:
            pass
        else:
            wrong.append("a gradient")
    group.synchronize()
    return wrong, functions


# Function, rows of x, implementation, and what else is given.
_IN_PROGRAMS: dict[str, tuple[str, int, str, set[str]]] = {
    "a row": ("gemm_all_reduce", 1, "gemv", set()),
    "few rows": ("gemv_all_reduce", 4, "gemv", {"bias"}),
    "few rows, other addresses": ("gemv_all_reduce", 4, "gemv", {"bias", "shifted"}),
    "few rows, norm": ("gemm_all_reduce", 4, "fused", {"residual", "norm_weight"}),
    "pushed, norm": ("gemm_all_reduce", 128, "pushed", {"residual", "norm_weight"}),
    "pushed, all-reduce": ("gemm_all_reduce", 128, "pushed", {"bias"}),
    "pushed, reduce-scatter": ("gemm_reduce_scatter", 128, "pushed", {"bias"}),
    "pushed, all-to-all": ("gemm_all_to_all", 128, "pushed", {"bias"}),
    "pushed, all-gather": ("all_gather_gemm", 64, "pushed", {"bias"}),
}


def _played_in_programs() -> tuple[list[str], dict[str, int]]:
    """As :func:`_played`, of public functions without gradients."""
    wrong, functions = [], {}
    group = interlace.group_of()

    def operands(name: str, seed: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        _, rows, _, others = _IN_PROGRAMS[name]
        of_rank = torch.Generator("cuda").manual_seed(10 * seed + dist.get_rank())
        of_all = torch.Generator("cuda").manual_seed(10 * seed + 9)
        first = int("shifted" in others)
        x = torch.randn(rows * INNER + first, generator=of_rank, device="cuda").bfloat16()[first:]
        w = torch.randn(COLUMNS, INNER, generator=of_rank, device="cuda").bfloat16()
        shapes = {"bias": (COLUMNS,), "residual": (rows, COLUMNS), "norm_weight": (COLUMNS,)}
        given = {
            other: torch.randn(*shape, generator=of_all, device="cuda").bfloat16()
            for other, shape in shapes.items()
            if other in others
        }
        return (x.view(rows, INNER), w), given

    def turn(name: str, number: int, **more: Any) -> int:
        function, _, impl, _ = _IN_PROGRAMS[name]
        tensors, named = operands(name, number)
        call = getattr(interlace, function)
        with Listening():
            wanted = call(*tensors, **named, impl=impl, **more)
        if (number + dist.get_rank()) % 3 == 0:
            torch.cuda._sleep(500_000)
        found, files = entered(lambda: call(*tensors, **named, impl=impl, **more))
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
        if not all(torch.equal(one, other) for one, other in pairs):
            wrong.append(f"{name}, turn {number}")
        return len(files)

    with torch.no_grad():
        for name in _IN_PROGRAMS:
            for number in range(_TURNS):
                functions[name] = turn(name, number)
        # By turns, on another stream, with other modes, and with memory that is symmetric.
        for number in range(3):
            for name in _IN_PROGRAMS:
                turn(name, number)
        with torch.cuda.stream(torch.cuda.Stream()):
            for name in _IN_PROGRAMS:
                turn(name, 1)
        with interlace.batch_invariant():
            turn("few rows", 2)
        with torch.autocast("cuda", torch.float16):
            turn("pushed, all-reduce", 2)
        members = dist.new_group()
        for number in range(_TURNS):
            turn("a row", number, group=members)
            turn("a row", number)
        kept = interlace.empty_symmetric((64, INNER), dtype=torch.bfloat16)
        for number in range(3):
            turn("pushed, all-gather", number)
        del kept
        gc.collect()
        for name in _IN_PROGRAMS:
            for number in range(_TURNS):
                functions[f"{name}, at last"] = turn(name, number)
    with torch.inference_mode():
        for number in range(_TURNS):
            functions["in inference mode"] = turn("a row", number)
    # With gradients switched on, of operands that want none and of others, by turns.
    for number in range(2 * _TURNS):
        functions["without gradients, switched on"] = turn("a row", number)
        tensors, named = operands("a row", number)
        tensors[1].requires_grad_()
        y = interlace.gemm_all_reduce(*tensors, **named, impl="gemv")
        y.sum().backward()
        if tensors[1].grad is None:
            wrong.append("a gradient")
    group.synchronize()
    return wrong, functions


_AS_GRAPHS = {
    "gemm_all_reduce": ("fused", "remote_stores", "chunked"),
    "gemm_reduce_scatter": ("fused", "chunked"),
    "gemm_all_to_all": ("fused", "chunked"),
    "all_gather_gemm": ("fused", "chunked"),
}


def _played_as_graphs() -> tuple[list[str], dict[str, int]]:
    """As :func:`_played_in_programs`, of calls whose operands lie where they have lain before."""
    wrong, functions, group = [], {}, interlace.group_of()

    def new(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        of_rank = torch.Generator("cuda").manual_seed(10 * seed + dist.get_rank())
        of_all = torch.Generator("cuda").manual_seed(10 * seed + 9)
        shapes = (512, INNER), (COLUMNS, INNER), (COLUMNS,)
        x, w, bias = (
            torch.randn(*shape, generator=generator, device="cuda").bfloat16()
            for shape, generator in zip(shapes, (of_rank, of_rank, of_all), strict=True)
        )
        return x, w, bias

    with torch.no_grad():
        for name, impls in _AS_GRAPHS.items():
            for impl in impls:
                places = new(0)
                given = places[:2] if impl == "remote_stores" else places
                call = functools.partial(getattr(interlace, name), *given, impl=impl)
                for turn in range(_UNTIL_GRAPHS):
                    for place, value in zip(places, new(turn), strict=True):
                        place.copy_(value)
                    with Listening():
                        wanted = call().clone()
                    if (turn + dist.get_rank()) % 3 == 0:
                        torch.cuda._sleep(500_000)
                    found, files = entered(call)
                    if not torch.equal(found, wanted):
                        wrong.append(f"{name}, {impl}, turn {turn}")
                    del found, wanted
                functions[f"{name}, {impl}"] = len(files)
    group.synchronize()
    return wrong, functions


def _played_below_autograd() -> tuple[list[str], dict[str, int]]:
    """As :func:`_played_in_programs`, of forward passes; gradients are compared, too."""
    wrong, functions, group = [], {}, interlace.group_of()

    def passes(name: str, impl: str, number: int) -> tuple[list[torch.Tensor], list[str]]:
        x, w = operands_of(1 if impl == "gemv" else 128, number)
        x.requires_grad_()
        w.requires_grad_()
        y, files = entered(lambda: getattr(interlace, name)(x, w, impl=impl))
        y.backward(torch.full_like(y, 0.5))
        assert x.grad is not None
        assert w.grad is not None
        return [y.detach(), x.grad, w.grad], files

    def operands_of(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        of_rank = torch.Generator("cuda").manual_seed(10 * seed + dist.get_rank())
        x = torch.randn(rows, INNER, generator=of_rank, device="cuda").bfloat16()
        return x, torch.randn(COLUMNS, INNER, generator=of_rank, device="cuda").bfloat16()

    for name in ("gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_to_all", "all_gather_gemm"):
        impls = ["pushed", "fused", "chunked"] + (["gemv"] if name == "gemm_all_reduce" else [])
        for impl in impls:
            for number in range(_UNTIL_GRAPHS):
                with Listening():
                    wanted, _ = passes(name, impl, number)
                found, files = passes(name, impl, number)
                if not all(map(torch.equal, found, wanted)):
                    wrong.append(f"{name}, {impl}, turn {number}")
            if impl in ("pushed", "gemv"):
                functions[f"{name}, {impl}"] = len(files)
    group.synchronize()
    return wrong, functions


def _after_an_end() -> list[str]:
    """What happens to calls of a group that was destroyed, with a tape."""
    members, seen = dist.new_group(), []
    operator = torch.ops.interlace.gemm_all_reduce_norm.default
    given = [*_arguments(0, 300)]
    given[-3] = members.group_name
    with torch.inference_mode():
        for _ in range(_TURNS):
            operator.from_inductor(*given)
        interlace.synchronize(members)
        dist.destroy_process_group(members)
        del members
        try:
            operator.from_inductor(*given)
        except interlace.GroupError:
            seen.append("refused")
    return seen


def test_calls_are_played_to_the_same_bits(ranks: Any, world_size: int) -> None:
    for wrong, functions in ranks(world_size).run(_played):
        assert not wrong
        # Steps of these two are functions of Python.
        assert functions.pop("two kernels") < 200
        assert functions.pop("float8") < 50
        assert max(functions.values()) <= _MOST_FUNCTIONS, functions


def test_calls_of_programs_are_played_to_the_same_bits(ranks: Any, world_size: int) -> None:
    for wrong, functions in ranks(world_size).run(_played_in_programs):
        assert not wrong
        assert max(functions.values()) <= _MOST_FUNCTIONS_OF_PROGRAMS, functions


def test_graphs_are_played_to_the_same_bits(ranks: Any, world_size: int) -> None:
    for wrong, functions in ranks(world_size).run(_played_as_graphs):
        assert not wrong
        assert max(functions.values()) <= _MOST_FUNCTIONS_OF_GRAPHS, functions


def test_training_is_played_to_the_same_bits(ranks: Any, world_size: int) -> None:
    for wrong, functions in ranks(world_size).run(_played_below_autograd):
        assert not wrong
        assert max(functions.values()) <= _MOST_FUNCTIONS_OF_TRAINING, functions


def test_a_group_that_is_gone_is_refused(ranks: Any, world_size: int) -> None:
    for seen in ranks(world_size).run(_after_an_end):
        assert seen == ["refused"]
