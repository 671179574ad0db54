"""What profilers of PyTorch, its logs and its flight recorder show of a call."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from interlace.comm.host import flight_recorder
from interlace.comm.runtime import ranges
from interlace.registry import operators
from interlace.testing.cases import IMPLEMENTATIONS, Case, every_case
from interlace.testing.cases.products import GemvCase, ProductCase

GEMV = GemvCase("gemv_all_reduce", "gemv two_phase", "float32", False, 2, 64, 32)
SCATTER = ProductCase("gemm_reduce_scatter", "fused", "float32", False, 48, 32, 16)
UNFUSED = ProductCase("gemm_reduce_scatter", "unfused", "float32", False, 48, 32, 16)


def _ranges_of(case: Case) -> list[str]:
    """The ranges of one call, as torch.profiler exports them."""
    prepared = case.prepare()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        prepared.check()
    return [event.name for event in profile.events() if event.name.startswith("interlace: ")]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (GEMV, "interlace: gemm_all_reduce gemv, float32 [2, 32] x [64, 32], sends 512 B"),
        (
            SCATTER,
            "interlace: gemm_reduce_scatter fused, float32 [48, 16] x [32, 16], sends 3.07 KB",
        ),
        (UNFUSED, "interlace: gemm_reduce_scatter unfused, float32 [48, 16] x [32, 16], sends"),
    ],
)
def test_a_profiler_shows_operator_implementation_shapes_and_bytes(
    ranks: Any, case: Case, expected: str
) -> None:
    for names in ranks(2).run(_ranges_of, case):
        assert len(names) == 1
        assert names[0].startswith(expected)


def _ranges_of_every_implementation() -> dict[tuple[str, str], list[str]]:
    """Of one call of each, without its backward pass."""
    case_of = {
        (case.operator, case.impl): dataclasses.replace(case, backward=False)
        for case in every_case(2)
        # Mapped outputs have no operator: the kernel of the caller runs.
        if case.operator in operators()
    }
    return {implementation: _ranges_of(case) for implementation, case in case_of.items()}


def test_every_implementation_has_its_range(ranks: Any) -> None:
    for found in ranks(2).run(_ranges_of_every_implementation):
        assert {operator for operator, _ in found} == set(IMPLEMENTATIONS) & operators().keys()
        for (operator, impl), names in found.items():
            # The word behind a space is a protocol of the implementation.
            expected = f"interlace: {operator} {impl.split()[0]}, "
            assert any(name.startswith(expected) for name in names), (operator, impl, names)


def test_without_a_profiler_nothing_happens() -> None:
    def unasked() -> int:
        raise AssertionError("nobody listens")

    tensors = (torch.ones(1),)
    first, second = (ranges.around("operator", "fused", tensors, unasked) for _ in range(2))
    assert first is second


def test_a_failed_wait_is_in_the_flight_recorders_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what PyTorch has written there, and once, however often the error is raised."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    error = interlace.PeerTimeoutError(
        operator="gemm_all_reduce", rank=0, peer=1, slice=3, wanted=5, seen=4, deadline_s=2.0
    )
    file = tmp_path / "trace_0"
    for _ in range(2):
        flight_recorder.add(error)
    dump = pickle.loads(file.read_bytes())
    assert [failure["peer"] for failure in dump["interlace"]] == [1]
    assert dump["interlace"][0]["message"] == str(error)
    assert {"entries", "version", "pg_config"} <= dump.keys()

    file.write_bytes(pickle.dumps({"entries": ["a collective"], "version": "2.10"}))
    flight_recorder.add(error)
    dump = pickle.loads(file.read_bytes())
    assert dump["entries"] == ["a collective"]
    assert dump["interlace"][0]["wanted"] == 5

    # What is no dump stays as it is, is not executed, and does not replace the error.
    trap = tmp_path / "executed"
    for content in (
        b"Info: rank 0 has started\n",
        b"cno_such_library\nDump\n.",
        b"L5x\n.",
        b"I7\n.",
        b"",
        f"cpathlib\nPath.touch\n(cpathlib\nPath\n(S'{trap}'\ntRtR.".encode(),
        pickle.dumps(dump)[:-9],
    ):
        file.write_bytes(content)
        flight_recorder.add(error)
        assert file.read_bytes() == content
    assert not trap.exists()


def test_no_dump_where_none_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = interlace.PeerTimeoutError(operator="x", rank=0, peer=1, deadline_s=2.0)
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    flight_recorder.add(error)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    flight_recorder.add(error)
    assert not list(tmp_path.iterdir())
