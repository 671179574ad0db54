"""Calls of compiled programs that are played past Python. Run with ``-m gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.operators  # registers torch.ops.interlace
from tests.entered import entered

pytestmark = pytest.mark.gpu

COLUMNS, INNER = 1024, 512
_TURNS = 14
_MOST_FUNCTIONS = 3
"""Functions of Python that a call enters which is played, the one that calls it among them."""

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


def test_a_group_that_is_gone_is_refused(ranks: Any, world_size: int) -> None:
    for seen in ranks(world_size).run(_after_an_end):
        assert seen == ["refused"]
