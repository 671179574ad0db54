"""The line that says what the pass did with a program's graphs, and the counts of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch._guards import CompileContext, CompileId, compile_context

import interlace
from interlace.compile import Finding, eager_backend
from interlace.compile import summary as module
from interlace.compile.summary import GraphSummary, summary


def _found(operator: str | None, reason: str = "faster", collective: str = "all_reduce") -> Finding:
    return Finding("forward", collective, collective, (4, 8), "mlp.down", operator, reason)


@pytest.fixture
def fresh() -> Iterator[GraphSummary]:
    """A summary of its own, with counts that begin at zero."""
    fresh = GraphSummary()
    fresh.calls.clear()
    try:
        yield fresh
    finally:
        fresh.calls.clear()
        if fresh._timer is not None:
            fresh._timer.cancel()
        with_it = [each for each in callback_handler.end_callbacks if each == fresh._say]
        for callback in with_it:
            callback_handler.remove_end_callback(callback)


def _compilation(summary: GraphSummary, *graphs: list[Finding]) -> None:
    """One compilation of several graphs, one of which is compiled within another's."""
    with (
        callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"),
        compile_context(CompileContext(CompileId(frame_id=0, frame_compile_id=0))),
    ):
        for graph in graphs:
            with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/1"):
                summary.expect()
                summary.count(graph)


def test_a_compilation_has_one_line(fresh: GraphSummary, caplog: pytest.LogCaptureFixture) -> None:
    graphs = [
        [_found("gemm_all_reduce_norm"), _found("gemm_all_reduce")],
        [_found("gemm_all_reduce_norm"), _found(None, "it gathers the last dimension", "gather")],
        [_found("linears", collective="products")],
    ]
    with caplog.at_level(logging.INFO, "interlace"):
        _compilation(fresh, *graphs)
    assert caplog.messages == [
        "interlace: torch.compile: 3 of 4 collectives fused (gemm_all_reduce_norm 2, "
        "gemm_all_reduce 1) in 3 graphs, equal ones once; 1 group of products with one input "
        "merged; left alone: 1 gather (it gathers the last dimension)"
    ]
    counts = interlace.counts()["torch.compile"]
    assert counts.taken == {"gemm_all_reduce_norm": 2, "gemm_all_reduce": 1}
    assert counts.left == {("gather", "it gathers the last dimension"): 1}


def test_lines_do_not_grow_with_the_number_of_compilations(
    fresh: GraphSummary, caplog: pytest.LogCaptureFixture
) -> None:
    """The 1st, 2nd, 4th, ... has one, and one with an operator or a reason that is new."""
    with caplog.at_level(logging.INFO, "interlace"):
        for _ in range(20):
            _compilation(fresh, [_found("gemm_all_reduce")])
        assert len(caplog.messages) == 5
        _compilation(fresh, [_found(None, "nothing is known")])
    assert caplog.messages[-1].endswith("; left alone: 1 all_reduce (nothing is known)")
    assert "20 of 21" in caplog.messages[-1]


def test_a_model_that_is_compiled_ahead_of_time_has_one_line(
    fresh: GraphSummary, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's compiler does not say when that ends: the line comes when no graph has come."""
    monkeypatch.setattr(module, "QUIET_S", 60.0)
    with caplog.at_level(logging.INFO, "interlace"):
        fresh.count([_found("gemm_all_reduce")])
        waiting = fresh._timer
        monkeypatch.setattr(module, "QUIET_S", 0.01)
        fresh.count([_found("gemm_all_reduce"), _found(None, "few")])
        assert waiting is not None
        assert waiting.finished.is_set()
        assert fresh._timer is not None
        fresh._timer.join(60)
    (line,) = caplog.messages
    assert line.startswith("interlace: torch.compile: 2 of 3 collectives fused")


def test_reasons_of_equal_layers_are_one(fresh: GraphSummary) -> None:
    """Nodes have numbers."""
    fresh.count([_found(None, f"what goes into it is add_{i}, not a product") for i in range(3)])
    assert str(fresh).endswith("left alone: 3 all_reduce (what goes into it is add, not a product)")


def test_only_a_few_reasons_are_in_the_line(fresh: GraphSummary) -> None:
    fresh.count([_found(None, f"reason {i}") for i in range(6)])
    assert str(fresh).endswith("1 all_reduce (reason 3), 2 more reasons")


def test_graphs_of_the_cache_are_said_once(
    fresh: GraphSummary, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "interlace"):
        for _ in range(3):
            with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
                fresh.expect()
    (line,) = caplog.messages
    assert "taken from Inductor's cache" in line


def test_another_program_has_counts_of_its_own(fresh: GraphSummary) -> None:
    interlace.counts()["vllm"].clear()
    fresh.name_program("vllm", "vLLM")
    fresh.count([_found("gemm_all_reduce")])
    assert str(fresh).startswith("interlace: vLLM: 1 of 1 ")
    assert not interlace.counts()["torch.compile"].taken
    assert interlace.counts()["vllm"].taken == {"gemm_all_reduce": 1}


def _logged() -> tuple[list[str], dict[str, int]]:
    """The lines of a rank that compiles a model of two graphs, forward and backward."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x @ w
        dist.all_reduce(y)
        return y.relu()

    log, handler = logging.getLogger("interlace"), Kept()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    summary.calls.clear()
    try:
        torch.compiler.reset()
        compiled = torch.compile(program, backend=eager_backend)
        for _ in range(3):
            compiled(torch.ones(128, 8), torch.ones(8, 12))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return lines, dict(interlace.counts()["torch.compile"].taken)


def test_rank_0_says_it_once_and_calls_say_nothing(ranks: Any) -> None:
    """A line per compilation, not per call; every rank counts."""
    (first, counted), (second, also) = ranks(2).run(_logged)
    (line,) = first
    assert line.startswith("interlace: torch.compile: 1 of 1 collectives fused (gemm_all_reduce 1)")
    assert second == []
    assert counted == also == {"gemm_all_reduce": 1}


def _ahead_of_time() -> tuple[bool, dict[str, int]]:
    """Whether a line is due after a compilation ahead of time by Inductor, and what is fused."""
    from torch._inductor.utils import fresh_cache

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        dist.all_reduce(y)
        return y

    summary.calls.clear()
    torch.compiler.reset()
    x, w = torch.ones(128, 8), torch.ones(8, 12)
    with (
        interlace.compile.installed(),
        torch._dynamo.config.patch(enable_aot_compile=True),
        fresh_cache(),  # what is compiled ahead of time needs a cache
        torch.no_grad(),
    ):
        compiled = torch.compile(program, fullgraph=True, dynamic=False)
        compiled.aot_compile(((x, w), {}))
    waits = summary._timer is not None
    if summary._timer is not None:
        summary._timer.cancel()
        summary._timer = None
    return waits, dict(summary.calls.taken)


def test_a_compilation_ahead_of_time_is_noticed(ranks: Any) -> None:
    """By Dynamo's own way of it, as vLLM compiles."""
    assert ranks(2).run(_ahead_of_time) == [(True, {"gemm_all_reduce": 1})] * 2
