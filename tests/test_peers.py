"""The benchmark of peers, without a peer: a driver that is here, on the CPU, where results are
compared and nothing is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.peers import __main__ as runner
from benchmarks.peers.capabilities import CAPABILITIES
from benchmarks.peers.driver import DRIVERS, folders_of, load, version
from benchmarks.peers.tables import CRITEO, zipf
from benchmarks.peers.worker import error_of

ROOT = Path(__file__).parents[1]
DRIVER = """
import torch
import torch.distributed as dist

NAME, DISTRIBUTION, INSTALL = "Here", "torch", "pip install torch"


def ways(case):
    def right(i):
        dist.all_gather_into_tensor(case.inputs.gathered, case.inputs.shard)
        return case.inputs.gathered @ case.inputs.weights[i].t()

    def fails(i):
        raise ValueError("not these sizes")

    return {"Here": right, "Here, wrong": lambda i: right(i) * 1.5, "Here, failing": fails}


WAYS = {"all-gather + GEMM": ways}
"""

DIES = """

def dies(case):
    import os

    os._exit(3)


WAYS["all-gather + GEMM"] = dies
"""


def _run(*arguments: str, more: Path) -> str:
    paths = [str(more), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", *arguments], cwd=ROOT, text=True,
        # Beside other tests one rank may begin long after another.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "INTERLACE_DEADLINE_S": "300"},
        capture_output=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.quick
def test_a_peer_is_compared_and_the_absent_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(DRIVER)
    (tmp_path / "ends.py").write_text(DRIVER.replace('"Here", "torch"', '"Ends", "torch"') + DIES)
    file = tmp_path / "peers.json"
    output = _run(
        "--only", "LigerCute", "--only", "ends", "--only", "here", "--check", "--capability",
        "all-gather", "--sizes", "8x16x32", "--budget-s", "1500", "--json", str(file),
        more=tmp_path,
    )  # fmt: skip
    assert "LigerCute is not installed: pip install" in output
    assert "Ends: its processes ended with" in output
    document = json.loads(file.read_text(encoding="utf-8"))
    assert len(document["results"]) == 1, output
    (result,) = document["results"]
    ways = result["ways"]
    assert result["of_peer"] == ["Here", "Here, failing", "Here, wrong"]
    assert {name for name, told in ways.items() if "failed" not in told} == {
        "alone", "pair", "Interlace", "Interlace, rows in place", "Here",
    }  # fmt: skip
    assert ways["Here, wrong"]["failed"].startswith("wrong by 5.0e-01")
    assert ways["Here, failing"]["failed"] == "ValueError: not these sizes"
    assert document["peers"]["Here"]["version"] == torch.__version__
    assert "version" not in document["peers"]["LigerCute"]


def test_a_peer_that_hangs_is_ended(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    began = time.perf_counter()
    assert "did not end" in runner._waited(child, tmp_path / "done", 0.3)
    runner._end(child)
    assert child.returncode is not None
    assert time.perf_counter() - began < 60


def test_drivers_import_no_peer() -> None:
    for name in DRIVERS:
        driver = load(name)
        assert driver.INSTALL.startswith("pip install")
        assert name == driver.NAME
        assert driver.DISTRIBUTION in driver.INSTALL
        assert driver.WAYS.keys() <= CAPABILITIES.keys()


def test_packages_of_a_folder_come_first(tmp_path: Path) -> None:
    driver = load("QuACK")
    site = tmp_path / "QuACK"
    (site / "quack_kernels-0.6.5.dist-info").mkdir(parents=True)
    (site / "quack_kernels-0.6.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: quack-kernels\nVersion: 0.6.5\n"
    )
    (tmp_path / "nvidia_cutlass_dsl" / "dsl_packages").mkdir(parents=True)
    folders = folders_of(driver, tmp_path)
    assert [Path(folder).name for folder in folders] == [site.name, tmp_path.name, "dsl_packages"]
    assert version(driver, folders) == "0.6.5"


def test_errors_and_indices() -> None:
    ones = torch.ones(4)
    assert error_of((ones, ones), (ones, ones)) == 0
    assert error_of(ones * float("nan"), ones) == float("inf")
    rows = zipf(4096, 1000)
    assert 0 <= int(rows.min()) <= int(rows.max()) < 1000
    assert int(rows.bincount().max()) > 200
    assert len(CRITEO) == 26
