"""What importing brings along, mostly in fresh processes."""

import contextlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest


def _modules_after(code):
    """Of torch, triton and numpy, those that are loaded after ``code`` in a new interpreter."""
    report = "\nimport sys; print(*[m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code + report],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import interlace",
        "import interlace; interlace.PeerTimeoutError; dir(interlace)",
        (
            "import interlace.costs.gemv_all_reduce, interlace.costs.embedding_all_to_all, "
            "interlace.costs.machine"
        ),
        "import interlace.units, interlace.errors",
        "import interlace.integrations",
    ],
)
def test_these_need_neither_torch_nor_triton(code):
    """The models and the command line's help must come up where there is no torch, and at once."""
    assert _modules_after(code) == set()


def test_the_simulator_needs_neither_torch_nor_triton():
    """It must run where there is no torch: all its modules, and a run."""
    code = (
        "import importlib, pkgutil, interlace.sim as sim; "
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(sim.__path__, "
        "'interlace.sim.')]; "
        "from interlace.sim.scenario import Scenario; assert Scenario('dlrm', "
        "nodes=4).simulate().total_ns"
    )
    assert _modules_after(code) == {"numpy"}


WITHOUT_TRITON = [
    "import interlace; interlace.launch, interlace.empty_symmetric",
    "import interlace; interlace.embedding_all_to_all; interlace.models",
    "import interlace.nn",
    (
        "import interlace; interlace.gemv_all_reduce; import torch; "
        "torch.ops.interlace.gemv_all_reduce.default"
    ),
    # Its gradient is the other operator.
    "import interlace; interlace.gemm_reduce_scatter; import torch; "
    "torch.ops.interlace.all_gather_gemm.default",
    "from interlace.integrations import torchrec, transformers",
    "import interlace; interlace.embedding_all_to_all, interlace.optim.SGD; import torch; "
    "torch.ops.interlace.embedding_all_to_all.default",
    (
        "import interlace, torch; interlace.gemv_all_reduce(torch.empty(4, device='meta'), "
        "torch.empty(5, 4, device='meta'))"
    ),
]

_EACH_WITHOUT_TRITON = """
import os, sys, torch
for code in sys.argv[1:]:
    if os.fork() == 0:
        exec(code)
        os._exit("triton" in sys.modules)
    if os.wait()[1]:
        print(code)
"""


def test_operators_are_registered_without_triton():
    """Triton reads TRITON_INTERPRET when it is imported: before the first call nobody knows what it
    must be.

    Each in a process of its own, forked from one that has imported torch.
    """
    command = [sys.executable, "-c", _EACH_WITHOUT_TRITON, *WITHOUT_TRITON]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("", "")


def test_every_public_name_can_be_had_without_other_programs():
    """Integrations import a program in what is called, so that Interlace can be without it."""
    code = (
        "from interlace.integrations import sglang, symm_mem, torchrec, transformers, vllm; "
        "import interlace; [getattr(interlace, name) for name in interlace.__all__]; "
        "import sys; print(*{'sglang', 'torchrec', 'transformers', 'vllm'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == ""


def test_what_gpu_tests_import_is_there():
    """A run on the CPU does not collect them; see ``tests/conftest.py``."""
    for file in Path(__file__).with_name("gpu").glob("test_*.py"):
        # Some need another program, and skip themselves without it.
        with contextlib.suppress(pytest.skip.Exception):
            importlib.import_module(f"tests.gpu.{file.stem}")


def test_an_unknown_name_is_an_attribute_error():
    import interlace

    with pytest.raises(
        AttributeError, match=r"^module 'interlace' has no attribute 'gemm_all_the_things'$"
    ):
        _ = interlace.gemm_all_the_things
