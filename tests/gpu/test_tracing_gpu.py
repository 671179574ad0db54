"""Traces on GPUs: results stay right, times make sense, and clocks are aligned."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.comm import group_of
from interlace.testing.cases import Case, every_case
from interlace.testing.cases.products import ProductCase
from interlace.tracing import Trace

pytestmark = pytest.mark.gpu

_MOST_ERROR_NS = 20_000
PRODUCT = ProductCase("gemm_reduce_scatter", "fused", "bfloat16", False, 2048, 2048, 1024)


def _trace_of(case: Case) -> Trace:
    prepared = case.prepare()
    for _ in range(2):  # kernels are compiled by the first one
        with interlace.trace() as trace:
            assert not any(prepared.check()), case.label
    return trace


def _every_case(operator: str) -> int:
    """Trace every case of an operator; return the number of events."""
    events = 0
    for case in every_case(dist.get_world_size(), [operator]):
        trace = _trace_of(case)
        for of_rank in trace.launches:
            for launch in of_rank:
                for of_program in launch.programs.values():
                    main = [event for event in of_program if event.lane == 0]
                    events += len(main)
                    times = [event.time_ns for event in main]
                    assert times == sorted(times), case.label
                    if launch.lost == 0:
                        assert main[0].kind == "begin", case.label
        assert trace.to_perfetto()["traceEvents"]
    return events


@pytest.mark.parametrize(
    "operator",
    [
        "gemv_all_reduce", "gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_to_all",
        "all_gather_gemm", "embedding_all_to_all", "mixture_of_experts",
    ],
)  # fmt: skip
def test_every_operator(ranks: Any, world_size: int, operator: str) -> None:
    assert all(ranks(world_size).run(_every_case, operator))


def _product() -> tuple[list[float], list[float], set[int], float, str, int]:
    trace = _trace_of(PRODUCT)
    late = [flow.departure_ns - flow.arrival_ns for flow in trace.work.flows]
    sms = {
        event.sm
        for launch in trace.launches[group_of().rank]
        for events in launch.programs.values()
        for event in events
    }
    end = max(span.end_ns for span in trace.work.spans)
    errors = [clock.error_ns for clock in trace.clocks]
    return late, errors, sms, end, trace.summary(), len(trace.others[group_of().rank])


def test_a_product(ranks: Any, world_size: int, own_gpus: None) -> None:
    """Puts leave before they arrive, on the clock of rank 0; SMs differ; words are said."""
    for late, errors, sms, end, text, _ in ranks(world_size).run(_product):
        assert late
        assert max(late) <= 0
        assert max(errors) < _MOST_ERROR_NS
        assert len(sms) > 1
        assert 0 < end < 1e9
        assert "critical path" in text
        assert "link 0 to 1" in text


def _in_a_graph() -> int:
    """A call that the program captures is not recorded, and can be replayed after the trace."""
    prepared = dataclasses.replace(PRODUCT).prepare()
    prepared.check()
    graph = torch.cuda.CUDAGraph()
    with interlace.trace() as trace, torch.cuda.graph(graph):
        results = prepared.run()
    graph.replay()
    group_of().synchronize()
    wrong = torch.zeros(prepared.result_count, dtype=torch.int64, device=group_of().device)
    prepared.count_wrong(results, 0, wrong)
    assert not any(wrong.tolist())
    return sum(len(launches) for launches in trace.launches)


def test_what_a_program_captures_is_not_recorded(ranks: Any, world_size: int) -> None:
    assert ranks(world_size).run(_in_a_graph) == [0] * world_size
