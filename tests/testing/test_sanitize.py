"""The script that runs every implementation under compute-sanitizer: its reading of logs, and its
calls on the CPU backend.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sanitize.py"

LOG = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at gemm_reduce_scatter+0x1b0 in kernel.py:54
=========     by thread (0,0,0) in block (3,0,0)
=========     Address 0x7f0000000000 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= Invalid __global__ read of size 16 bytes
=========     at ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned
long)4096>)+0x90 =========     by thread (0,0,0) in block (0,0,0)
=========
========= Barrier error detected. Divergent thread(s) in block
=========     at void at::native::vectorized_elementwise_kernel<4>(int)+0x40
=========
========= ERROR SUMMARY: 3 errors
"""


def _script():
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitize"] = module
    spec.loader.exec_module(module)
    return module


def test_errors_are_read_and_other_libraries_kernels_left_out():
    first, second = _script().parse(LOG)
    assert (first.what, first.kernel) == (
        "Invalid __global__ write of size 4 bytes",
        "gemm_reduce_scatter",
    )
    assert first.lines[2] == "by thread (0,0,0) in block (3,0,0)"
    assert second.kernel.startswith("void at::native::vectorized_elementwise_kernel")


def test_a_clean_log_has_no_errors():
    assert _script().parse("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == []


def test_calls_are_made_on_every_rank(tmp_path):
    file = tmp_path / "sanitize.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--tool",
        "none",
        "--backend",
        "cpu",
        "--json",
        str(file),
    ]
    done = subprocess.run(
        [*command, "--operators", "gemv_all_reduce"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text(encoding="utf-8"))
    assert (document["errors"], document["wrong"], document["failed"]) == (0, 0, 0)
    assert document["right"] == len(document["results"]) > 0
    assert {result["impl"] for result in document["results"]} == {
        "gemv one_shot",
        "gemv two_phase",
    }
    assert {result["rank"] for result in document["results"]} == {0, 1}
