"""The pass's findings in PyTorch's logs: TORCH_LOGS, and TORCH_TRACE for tlparse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from interlace.compile import findings
finding = findings.Finding("forward", "all_reduce", "all_reduce", (4, 8), "mlp.down", None, "few")
findings.record([finding])
"""


def test_torch_logs_and_torch_trace_have_the_findings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both in one process, which reads the variables when it starts; this one has neither."""
    said = "all_reduce of [4, 8] (all_reduce in mlp.down) left alone: few"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TORCH_LOGS": "+interlace", "TORCH_TRACE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said in result.stderr
    exec(PROGRAM, {})
    assert said not in capfd.readouterr().err
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
