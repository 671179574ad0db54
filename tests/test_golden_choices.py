"""``impl="auto"`` takes what it took, for every call that benchmarks have recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parent / "golden_choices.json"
STEP = 10


def test_choices_are_those_of_the_file() -> None:
    # A process of its own: the GPUs that it makes up must not stay in this one's caches.
    program = [sys.executable, "-m", "tests.golden_choices", str(STEP)]
    done = subprocess.run(program, cwd=FILE.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = {
        gpu: {name: dict([*calls.items()][::STEP]) for name, calls in operators.items()}
        for gpu, operators in json.loads(FILE.read_text()).items()
    }
    assert sum(len(calls) for operators in found.values() for calls in operators.values()) > 700
    for gpu, operators in expected.items():
        for name, calls in operators.items():
            assert found[gpu][name] == calls, f"{name} on {gpu}"
    assert found.keys() == expected.keys()
