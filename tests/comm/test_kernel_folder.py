"""The folder of compiled kernels, in a process in which Triton compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import json, os, sys, threading
from pathlib import Path
chosen, moved = map(Path, sys.argv[1:])
if chosen.name != "none":
    os.environ["TRITON_CACHE_DIR"] = str(chosen)
from interlace.comm.runtime import kernel_folder
# As Inductor does when it compiles its first kernel.
os.environ["TRITON_CACHE_DIR"] = str(moved)
from triton import knobs
from triton.runtime.cache import get_cache_manager

def folder(name):
    return str(Path(get_cache_manager(name).cache_dir).parent)

found = {"before": folder("0a")}
with kernel_folder.ours():
    found["ours"] = folder("0b")
    thread = threading.Thread(target=lambda: found.update(theirs=folder("0c")))
    thread.start()
    thread.join()
    with kernel_folder.ours():
        pass
    found["still ours"] = folder("0d")
found["after"] = folder("0e")
get_cache_manager("0f").put(b"theirs", "kernel")
with kernel_folder.ours():
    get_cache_manager("0f").put(b"ours", "kernel")
    found["kept"] = Path(get_cache_manager("0f").get_file("kernel")).read_text()
found["environment"] = os.environ.get("TRITON_CACHE_MANAGER")
print(json.dumps(found))
"""


def _folders(tmp_path: Path, chosen: str) -> dict[str, str | None]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER", "TRITON_INTERPRET")
    }
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / chosen), str(tmp_path / "moved")]
    done = subprocess.run(
        command, env={**environment, "TRITON_HOME": str(tmp_path)}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def test_kernels_stay_where_they_were_kept_at_first(tmp_path: Path) -> None:
    """And nothing else does, in this thread later, in another one or in another process."""
    for chosen, kept in (("chosen", "chosen"), ("none", ".triton/cache")):
        found = _folders(tmp_path, chosen)
        ours, theirs = str(tmp_path / kept), str(tmp_path / "moved")
        assert found == {
            "before": theirs, "ours": ours, "theirs": theirs, "still ours": ours, "after": theirs,
            "kept": "ours", "environment": None,
        }  # fmt: skip


_HASHES = """
import importlib, json, sys
from interlace.comm.runtime.kernel_folder import hash_callees_first
order = sys.argv[1:]
hashes = {}
for name in order:
    module, kernel = name.split(":")
    function = getattr(importlib.import_module(module), kernel)
    hash_callees_first(function)
    hashes[kernel] = function.cache_key
print(json.dumps(hashes))
"""

KERNELS = (
    "interlace.operators.gemm_all_reduce.kernels.fused_norm:multiply_sum_and_norm",
    "interlace.operators.gemm_all_reduce.kernels.norm_rows:sum_and_norm_rows",
    "interlace.gemm.kernels.lamport:sum_parts",
    "interlace.gemm.kernels.staged:spread_rows",
)


def test_a_kernel_has_one_hash_in_whatever_order_kernels_are_compiled() -> None:
    """``make test-oldest-triton`` runs this with a Triton whose own hashes depend on the order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", _HASHES, *order],
                env=environment, check=True, capture_output=True, text=True,
            ).stdout
        )
        for order in (KERNELS, KERNELS[::-1])
    ]  # fmt: skip
    assert found[0] == found[1]
    assert len(set(found[0].values())) == len(KERNELS)


_CONSTANTS = """
import json
from interlace.comm.runtime.kernel_folder import hash_callees_first
from tests.test_compile_targets import kernels
from triton.language import constexpr

values = {}
for kernel in kernels():
    hash_callees_first(kernel)
    for (name, _), (value, _) in kernel.used_global_vals.items():
        if isinstance(value, constexpr):
            values.setdefault((kernel.__name__, name), set()).add(value.value)
print(json.dumps([[*key, *map(str, each)] for key, each in values.items() if len(each) > 1]))
"""


def test_no_kernel_reads_two_constants_of_one_name() -> None:
    """Up to Triton 3.8 their order in the kernel's hash is that of addresses."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _CONSTANTS],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == []
