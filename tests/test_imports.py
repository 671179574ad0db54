"""What importing brings along, mostly in fresh processes."""

import contextlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

_EACH = """
import os, sys
{first}
names = sys.argv[1].split()
for code in sys.argv[2:]:
    if os.fork() == 0:
        exec(code)
        print(*[name for name in names if name in sys.modules], flush=True)
        os._exit(0)
    if os.wait()[1]:
        print("failed", flush=True)
"""


def _modules_after(codes, names, first=""):
    """Of the modules of these names, those that are loaded after each code, in a process of its
    own: a fork of a new interpreter that has run ``first``.
    """
    command = [sys.executable, "-c", _EACH.format(first=first), " ".join(names), *codes]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    return dict(zip(codes, map(str.split, done.stdout.splitlines()), strict=True))


def test_these_need_neither_torch_nor_triton():
    """The models and the command line's help must come up where there is no torch, and at once; so
    must the simulator: all its modules, and a run.
    """
    simulator = (
        "import importlib, pkgutil, interlace_sim as sim; "
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(sim.__path__, "
        "'interlace_sim.')]; "
        "from interlace_sim.scenario import Scenario; assert Scenario('dlrm', "
        "nodes=4).simulate().total_ns"
    )
    codes = [
        "import interlace",
        "import interlace; interlace.PeerTimeoutError; dir(interlace)",
        (
            "import interlace.costs.gemv_all_reduce, interlace.costs.embedding_all_to_all, "
            "interlace.costs.machine"
        ),
        "import interlace.units, interlace.errors",
        "import interlace.integrations",
    ]
    expected = {code: [] for code in codes} | {simulator: ["numpy"]}
    assert _modules_after([*codes, simulator], ["torch", "triton", "numpy"]) == expected


WITHOUT_TRITON = [
    "import interlace; interlace.launch, interlace.empty_symmetric",
    "import interlace; interlace.embedding_all_to_all",
    "import interlace_dlrm; interlace_dlrm.DLRM, interlace_dlrm.Trainer",
    "import interlace_gin",
    "import interlace.nn",
    (
        "import interlace; interlace.gemv_all_reduce; import torch; "
        "torch.ops.interlace.gemm_all_reduce.default"
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

PUBLIC_NAMES = (
    "from interlace.integrations import sglang, symm_mem, torchrec, transformers, vllm; "
    "import interlace; [getattr(interlace, name) for name in interlace.__all__]"
)
DEMOS = Path(__file__).parents[1] / "examples" / "demos"
RANKS_OF_COMMANDS = (
    f"import sys; sys.path.insert(0, {str(DEMOS)!r}); import interlace.cli.ranks, "
    + ", ".join(file.stem for file in sorted(DEMOS.glob("*.py")))
)


def test_what_is_not_imported_before_it_is_needed():
    """Each in a process of its own, forked from one that has imported torch.

    Triton reads TRITON_INTERPRET when it is imported: before the first call of an operator nobody
    knows what it must be. Integrations import a program in what is called, so that Interlace can be
    without it. Ranks show nothing on a terminal.
    """
    programs, terminal = ["sglang", "torchrec", "transformers", "vllm"], ["rich", "typer"]
    loaded = _modules_after(
        [*WITHOUT_TRITON, PUBLIC_NAMES, RANKS_OF_COMMANDS],
        ["triton", *programs, *terminal],
        first="import torch",
    )
    for code in WITHOUT_TRITON:
        assert "triton" not in loaded[code], code
    assert not {*programs} & {*loaded[PUBLIC_NAMES]}
    assert not {*terminal} & {*loaded[RANKS_OF_COMMANDS]}


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
