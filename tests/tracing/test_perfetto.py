"""The documents of traces: Chrome's format, and Perfetto's own answer where its tool is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from interlace.cli.gpus import gpu_named
from interlace.cli.trace_simulated import simulate
from interlace.testing.cases.products import GemvCase, ProductCase
from interlace.tracing import simulated_document
from tests.tracing.chrome_format import violations

CASES = {
    "gather": ProductCase("all_gather_gemm", "fused", "bfloat16", False, 64, 1024, 512),
    "sum": ProductCase("gemm_reduce_scatter", "chunked", "bfloat16", False, 512, 1024, 512),
    "words": GemvCase("gemv_all_reduce", "gemv two_phase", "bfloat16", False, 1, 512, 256),
    "pair": ProductCase("gemm_all_reduce", "unfused", "bfloat16", False, 512, 1024, 512),
}


def _document(name: str) -> dict[str, Any]:
    """The timelines of a call as they are drawn: one under the other, which here is the same."""
    simulated = simulate(CASES[name], 4, gpu_named("h200"))
    return simulated.to_perfetto(simulated, name)


@pytest.mark.parametrize("name", CASES)
def test_documents_keep_to_the_format(name: str) -> None:
    """Streams of copies run beside kernels, whose launches overlap; arrows lie on bars."""
    document = _document(name)
    assert violations(document) == []
    names = [event["args"]["name"] for event in document["traceEvents"]
             if event["name"] == "process_name"]  # fmt: skip
    assert {f"{kind}rank {rank}" for kind in ("", "simulated ") for rank in range(4)} <= set(names)


def test_what_is_wrong_is_found() -> None:
    """The check of the format can fail: an overlap, an arrow without its end, a nameless row."""
    document = simulated_document(simulate(CASES["words"], 2, gpu_named("h200")))
    events = document["traceEvents"]
    bar = next(event for event in events if event["ph"] == "X" and event["cat"] == "compute")
    arrow = next(event for event in events if event["ph"] == "f")
    late = {**bar, "ts": bar["ts"] + bar["dur"] / 2}
    wrong = {**document, "traceEvents": [*(event for event in events if event is not arrow), late,
                                         {**bar, "tid": 999_999}]}  # fmt: skip
    found = violations(wrong)
    assert len(found) >= 3
    for words in ("overlaps one", "has only ['s']", "a row without a name"):
        assert any(words in each for each in found)


def test_perfetto_answers_a_query(tmp_path: Path) -> None:
    """What Perfetto has imported, by its own tool: all bars and arrows, and no error."""
    processor = pytest.importorskip("perfetto.trace_processor")
    # The wheel would download the tool, and tests must not need a network.
    shell = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if shell is None:
        pytest.skip("Perfetto's trace_processor_shell is not on the PATH")
    document = _document("sum")
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    config = processor.TraceProcessorConfig(bin_path=shell)
    with processor.TraceProcessor(trace=str(file), config=config) as tool:

        def count(query: str) -> int:
            return int(next(iter(tool.query(f"select count(*) as n from {query}"))).n)

        phases = [event["ph"] for event in document["traceEvents"]]
        # Points are slices without a duration.
        assert count("slice") == phases.count("X") + phases.count("i")
        assert count("flow") == phases.count("s")
        assert count("stats where severity = 'error' and value > 0") == 0
