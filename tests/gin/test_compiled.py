"""Kernels that put over the network compile with NCCL's device code, for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import interlace_gin
from tests.gin.wheels import nccl_folder

_TEXT = Path(interlace_gin.__file__).parent / "gin.ll"
_SCOPES = "i32 10, i32 0)"  # given and required, of ncclGinPut


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """``compiled(text)``: what is in each kernel with a variant of ``gin.ll``."""
    device_code = nccl_folder() / "lib" / "libnccl_device.bc"

    def compile_with(text):
        place = tmp_path_factory.mktemp("gin")
        (place / "gin.ll").write_text(text)
        environment = dict(os.environ)
        environment.pop("TRITON_INTERPRET", None)
        environment["TRITON_CACHE_DIR"] = str(place / "cache")
        environment["TRITON_DUMP_PTXAS_LOG"] = "1"
        done = subprocess.run(
            [sys.executable, "-m", "tests.gin.compiled", place / "gin.ll", device_code],
            env=environment, check=False, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return compile_with


def test_what_rings_the_card_and_what_looks_at_signals_is_there(compiled):
    """Both back ends of a put, the doorbell and the queue to the host's thread; nothing is left to
    be linked. Registers spill around a call only, which 2.32 has (an assertion) and 2.30 has not.
    """
    found = compiled(_TEXT.read_text())
    for name, kernel in found.items():
        puts = name.startswith(("exchange_ranges", "double_and_put", "traced"))
        waits = not name.startswith("double_and_put")
        assert set(kernel["unresolved"]) <= {"__assertfail"}, name  # the driver's
        assert (kernel["doorbells"] > 0) == puts, name
        assert (kernel["proxy_stores"] > 0) == puts, name
        assert (kernel["acquires"] > 0 and kernel["relaxed_looks"] > 0) == waits, name
        assert kernel["spilled_bytes"] <= (256 if kernel["unresolved"] else 0), name
        assert kernel["registers"] <= 128, name
    # The scopes are numbers of libcu++: if the thread had released at system scope already (0), no
    # fence of that scope would be needed.
    text = _TEXT.read_text()
    assert _SCOPES in text
    released = compiled(text.replace(_SCOPES, "i32 0, i32 0)"))
    for name in ("exchange_ranges sm_90", "double_and_put sm_100"):
        assert released[name]["system_releases"] < found[name]["system_releases"], name
