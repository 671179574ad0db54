"""Operators within the CUDA graphs that Inductor makes (``mode="reduce-overhead"``), two ranks or
more. Run with ``-m gpu``.

Inputs are new in every step, so a result that a graph has kept from another step, or that another
call has written over, differs from what eager calls compute by more than 100 %.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import interlace
import interlace.operators  # registers torch.ops.interlace
from tests.gpu.graphs import graphs_of_inductor

pytestmark = pytest.mark.gpu

# Public names are found at first use, which a compiler should not have to trace.
OPERATORS = (
    interlace.gemv_all_reduce, interlace.gemm_all_reduce, interlace.gemm_reduce_scatter,
    interlace.all_gather_gemm, interlace.gemm_all_to_all,
)  # fmt: skip
ROWS, COLUMNS, INNER, TOKENS = 512, 1024, 1024, 4
STEPS = 50
TOLERANCE = 1e-2  # cuBLAS may take another kernel in a graph, whose workspace is another
_GEMMS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
IMPLEMENTATIONS = {
    "auto": {},
    "measured": dict.fromkeys(_GEMMS, "measured"),
    "fused": dict.fromkeys(_GEMMS, "fused") | {"gemv": "gemv"},
    "chunked": dict.fromkeys(_GEMMS, "chunked"),
    "stores": dict.fromkeys(_GEMMS, "pushed") | {"all_reduce": "remote_stores"},
    "unfused": dict.fromkeys(_GEMMS, "unfused"),
}
"""What runs each operator; ``"auto"`` where nothing is said."""


class Program(nn.Module):
    """Five operators with exact elementwise work between them, so that bits need not differ."""

    def __init__(self, seed: int, impl: dict[str, str]) -> None:
        super().__init__()
        self.impl = impl
        for name, columns, inner in (("w", COLUMNS, INNER), ("back", INNER, COLUMNS)):
            weight = _random(10 * seed, columns, inner) / inner**0.5
            setattr(self, name, nn.Parameter(weight, requires_grad=False))

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def impl(name: str) -> str:
            return self.impl.get(name, "auto")

        x = x.relu() * 2
        decoded = interlace.gemv_all_reduce(v, self.w, impl=impl("gemv"))
        summed = interlace.gemm_all_reduce(x, self.w, impl=impl("all_reduce"))
        share = interlace.gemm_reduce_scatter(x, self.w, impl=impl("reduce_scatter"))
        gathered = interlace.all_gather_gemm(share.relu(), self.back, impl=impl("all_gather"))
        sent = interlace.gemm_all_to_all(gathered * 2, self.w, impl=impl("all_to_all"))
        # Results of operators as they are, and such that only the graph itself reads.
        return decoded, summed, share, gathered.relu(), sent, summed.relu() + sent.relu()


def _random(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


def _inputs(step: int, rows: int = ROWS, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    return _random(100 + step, rows, INNER), _random(200 + step, tokens, INNER)


def _compiled(program: nn.Module) -> Any:
    return torch.compile(program, mode="reduce-overhead", fullgraph=True, dynamic=False)


@contextlib.contextmanager
def _fresh() -> Iterator[Any]:
    """No compiled functions, graphs or memory of earlier tests."""
    torch.compiler.reset()
    counters.clear()
    interlace.group_of().release()
    with torch.no_grad():
        yield
    torch.cuda.synchronize()
    interlace.synchronize()
    torch.compiler.reset()


def _wrong(found: Any, wanted: Any, step: str) -> list[str]:
    """Results that differ from those wanted."""
    wrong = []
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        error = float((one.float() - other.float()).norm() / other.float().norm())
        if not error < TOLERANCE:  # also if it is no number
            wrong.append(f"{step}, result {place} {list(one.shape)}: off by {error:.1e}")
    return wrong


def _steps(name: str, steps: int) -> tuple[list[str], dict[str, int]]:
    impl = IMPLEMENTATIONS[name]
    programs = Program(1, impl), Program(2, impl)
    wrong: list[str] = []
    side = torch.cuda.Stream()
    with _fresh():
        first, second = map(_compiled, programs)

        def check(compiled: Any, program: Program, step: int, what: str) -> None:
            inputs = _inputs(step)
            if (step + dist.get_rank()) % 3 == 0:
                torch.cuda._sleep(500_000)  # ranks are not in step
            torch.compiler.cudagraph_mark_step_begin()
            found = [each.clone() for each in compiled(*inputs)]
            wrong.extend(_wrong(found, program(*inputs), f"step {step}, {what}"))

        for step in range(steps):
            check(first, programs[0], step, "first function")
            if step % 4 == 1:
                check(second, programs[1], step, "second function")
            if step % 5 == 3:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    check(first, programs[0], step + 1000, "another stream")
                torch.cuda.current_stream().wait_stream(side)
            if step in (steps // 2, 3 * steps // 4):
                # Eager calls with more rows, for which every operator's memory grows.
                rows = 4 * ROWS if step == steps // 2 else 16 * ROWS
                larger = _inputs(step, rows, 4 * TOKENS)
                again = [each.clone() for each in programs[0](*larger)]
                wrong.extend(_wrong(programs[0](*larger), again, f"step {step}, larger"))
            if len(wrong) > 20:
                break
        graphs = graphs_of_inductor()
    return wrong, graphs


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_one_graph_for_each_function(ranks: Any, world_size: int, turns: Any, name: str) -> None:
    """New inputs, eager calls between, a second function, another stream, memory that grows."""
    results = ranks(world_size).run(_steps, name, turns(STEPS), timeout_s=400)
    for wrong, graphs in results:
        assert wrong == []
        # Both programs are one function with other weights, unless torch compiles it for each.
        assert graphs.pop("functions") in (1, 2)
        assert graphs == {"recorded": 2, "skipped": 0}


def _recorded_again(steps: int) -> tuple[list[str], dict[str, int]]:
    program = Program(3, IMPLEMENTATIONS["fused"])
    wrong: list[str] = []
    with _fresh():
        compiled = _compiled(program)
        for step in range(steps):
            if step == steps // 3:
                larger = _inputs(step, 8 * ROWS, 8 * TOKENS)
                program(*larger)  # memory grows; what graphs refer to stays
            if step == steps // 2 and dist.get_rank() == 0:
                # Other addresses of weights: this rank captures again, its peers replay.
                for parameter in program.parameters():
                    parameter.data = parameter.data.clone()
            inputs = _inputs(step)
            torch.compiler.cudagraph_mark_step_begin()
            found = [each.clone() for each in compiled(*inputs)]
            wrong.extend(_wrong(found, program(*inputs), f"step {step}"))
        graphs = graphs_of_inductor()
    return wrong, graphs


def test_one_rank_captures_again(ranks: Any, world_size: int, turns: Any) -> None:
    """A rank that captures after memory has grown meets peers that replay what they captured
    before.
    """
    results = ranks(world_size).run(_recorded_again, turns(24), timeout_s=400)
    for rank, (wrong, graphs) in enumerate(results):
        assert wrong == []
        assert graphs["recorded"] == (2 if rank == 0 else 1)
        assert graphs["skipped"] == 0


def _first_of_all() -> tuple[list[str], dict[str, int]]:
    """The group itself is made in the warm-up, on a process group of its own."""
    process_group: Any = dist.new_group()
    name = process_group.group_name
    wrong: list[str] = []
    with _fresh():
        w = _random(7, COLUMNS, INNER)

        def program(x: torch.Tensor) -> torch.Tensor:
            none = (None,) * 5  # bias, scales, lists of rows
            y: torch.Tensor = torch.ops.interlace.gemm_all_to_all(
                x, w, *none, torch.bfloat16, name, "fused", ""
            )
            return y

        compiled = torch.compile(program, mode="reduce-overhead", fullgraph=True, dynamic=False)
        for step in range(6):
            x, _ = _inputs(step)
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(x).clone()
            wrong.extend(_wrong([found], [program(x)], f"step {step}"))
        interlace.synchronize(process_group)
        graphs = graphs_of_inductor()
    return wrong, graphs


def test_the_first_call_of_all(ranks: Any, world_size: int) -> None:
    for wrong, graphs in ranks(world_size).run(_first_of_all):
        assert wrong == []
        assert graphs == {"functions": 1, "recorded": 1, "skipped": 0}


def _with_lists() -> list[str]:
    """Lists of rows, which ranks exchange in every call: at these, graphs are cut."""
    ranks = dist.get_world_size()
    sends = [ROWS // ranks] * ranks
    wrong: list[str] = []
    with _fresh():
        w = _random(8, COLUMNS, INNER)

        def program(x: torch.Tensor) -> torch.Tensor:
            y = interlace.gemm_all_to_all(x * 2, w, input_splits=sends, output_splits=sends)
            return y.relu()

        compiled = torch.compile(program, mode="reduce-overhead", fullgraph=True, dynamic=False)
        for step in range(6):
            x, _ = _inputs(step)
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(x).clone()
            wrong.extend(_wrong([found], [program(x)], f"step {step}"))
    return wrong


def test_calls_that_ask_the_host_each_time(ranks: Any, world_size: int) -> None:
    for wrong in ranks(world_size).run(_with_lists):
        assert wrong == []


_LEFT: list[Any] = []


def _leave_a_graph() -> dict[str, int]:
    """Leave a CUDA graph with an all-reduce by NCCL behind, and return what Inductor has made."""
    group = dist.group.WORLD
    assert group is not None

    def total(x: torch.Tensor) -> torch.Tensor:
        summed = torch.ops._c10d_functional.all_reduce(x * 2, "sum", group.group_name)
        return torch.ops._c10d_functional.wait_tensor(summed) + 1

    compiled = torch.compile(total, mode="reduce-overhead", fullgraph=True)
    _LEFT.append(compiled)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(torch.ones(1024, device="cuda"))
    torch.testing.assert_close(y, torch.full_like(y, 2.0 * dist.get_world_size() + 1))
    return graphs_of_inductor()


def test_ranks_end_though_graphs_hold_collectives(own_gpus: None, world_size: int) -> None:
    """NCCL destroys no communicator while a CUDA graph has captured one of its collectives."""
    results = interlace.launch(_leave_a_graph, world_size, backend="cuda", timeout_s=120)
    assert all(made["recorded"] >= 1 for made in results)
