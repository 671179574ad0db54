"""The tests' own ranks: a failure on one of them must be seen, and must not spoil the next test."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.pool import RankFailure


def _rank_and_double(x):
    return dist.get_rank(), 2 * x


def _fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("seven is not a multiple of two")


def _hang_on_rank_1():
    if dist.get_rank() == 1:
        _a_recognisable_function()


def _a_recognisable_function():
    time.sleep(60)


def _die_on_rank_1():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _die_on_rank_1_later():
    if dist.get_rank() == 1:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGKILL]).start()


def test_results_come_in_rank_order(ranks):
    assert ranks(2).run(_rank_and_double, 21) == [(0, 42), (1, 42)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_fail_on_rank_1, r"(?s)rank 1 failed first.*seven is not a multiple of two"),
        (_hang_on_rank_1, r"(?s)ranks \[1\] did not end in time.*rank 1.*_a_recognisable_function"),
        (_die_on_rank_1, r"rank 1 died \(exit code -9\)"),
    ],
)
def test_a_failure_names_its_rank_and_the_pool_recovers(ranks, function, message):
    ranks(2).run(_rank_and_double, 0)  # the time below is without the start of the processes
    with pytest.raises(RankFailure, match=message):
        ranks(2).run(function, timeout_s=3)
    assert ranks(2).run(_rank_and_double, 1) == [(0, 2), (1, 2)]


def test_a_rank_that_died_between_functions_is_named(ranks):
    ranks(2).run(_die_on_rank_1_later)
    time.sleep(0.5)
    with pytest.raises(RankFailure, match=r"_rank_and_double: rank 1 died \(exit code -9\)"):
        ranks(2).run(_rank_and_double, 0)


def test_processor_time_of_all_that_a_command_starts(tmp_path):
    """Of processes that it leaves behind, too."""
    (tmp_path / "burn.py").write_text("import time\nwhile time.process_time() < 0.6:\n    pass\n")
    burn = [sys.executable, str(tmp_path / "burn.py")]
    program = f"import subprocess; subprocess.Popen({burn!r})"
    done = subprocess.run(
        [sys.executable, "-m", "tests.processor_time", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0
    assert int(re.fullmatch(r"Processor time: 0 min (\d+) s\.\n", done.stdout)[1]) >= 1
