"""Processes that compile every kernel, beside the other tests; what they compile is in ``tests/test_compile_targets.py``."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

TARGETS = {"sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}
THOROUGH = "sm_90"
"""The target for which every case is compiled; for the others, each kernel's first."""


@dataclasses.dataclass
class Compiler:
    """A process that compiles for one target, or for a part of it, on time that other processes leave."""

    target: str
    process: subprocess.Popen[bytes]
    log: TextIO

    def check(self) -> None:
        """Wait for its end; fail with what it said if it failed."""
        code = self.process.wait(timeout=200)
        assert code == 0, Path(self.log.name).read_text()[-4000:]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def start(folder: Path) -> list[Compiler]:
    """Start them all; logs and caches go below ``folder``."""
    parts = {target: 2 if target == THOROUGH else 1 for target in TARGETS}
    return [_start(folder / f"{target}.{part}", target, part, count) for target, count in parts.items() for part in range(count)]


def _start(folder: Path, target: str, part: int, parts: int) -> Compiler:
    folder.mkdir()
    # Where TRITON_INTERPRET is set, a kernel is a Python function. An empty cache: compile, not remember.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    code = f"from tests.test_compile_targets import compile_all; assert compile_all({target!r}, {part}, {parts}) > 0"
    log = (folder / "log").open("w")
    command = ["nice", "-n", "19", sys.executable, "-c", code]
    return Compiler(target, subprocess.Popen(command, env=environment, stdout=log, stderr=log), log)
