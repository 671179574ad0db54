"""The pass's findings in PyTorch's logs: TORCH_LOGS, and TORCH_TRACE for tlparse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from interlace.compile import findings
finding = findings.Finding("forward", "all_reduce", "all_reduce", (4, 8), "mlp.down", None, "few")
findings.record([finding])
"""


def _run(**variables: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stderr


def test_torch_logs_shows_the_findings() -> None:
    said = "all_reduce of [4, 8] (all_reduce in mlp.down) left alone: few"
    assert said in _run(TORCH_LOGS="+interlace")
    assert said not in _run()


def test_torch_trace_has_the_findings_as_an_artifact(tmp_path: Path) -> None:
    _run(TORCH_TRACE=str(tmp_path))
    [file] = tmp_path.iterdir()
    lines = file.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if '"name": "interlace_findings"' in line)
    # What belongs to a record is indented by one tab.
    payload = []
    for line in lines[start + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line)
    [finding] = json.loads("".join(payload))
    assert finding["collective"] == "all_reduce"
    assert finding["reason"] == "few"
