"""The examples of other programs run; each ends by checking its own result."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.programs import run_program

FOLDER = Path(__file__).parents[2] / "examples" / "integrations"
NEEDED = {
    "async_tp": (),
    "sglang_linear": ("sglang.srt.layers.linear",),
    "torchrec_dlrm": ("torchrec", "fbgemm_gpu"),
    "torchtitan_llama": ("torchtitan",),
    "transformers_llama": ("transformers", "accelerate"),
    "transformers_mixtral": ("transformers.distributed.expert_parallel", "accelerate"),
    "vllm_llama_mlp": ("vllm.model_executor.layers.linear",),
}

# These compile by Inductor, which takes half a minute on the CPU.
COMPILED = ("torchtitan_llama", "transformers_llama")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def test_every_example_is_run() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted(NEEDED)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=pytest.mark.inductor) if name in COMPILED else name
        for name in NEEDED
    ],
)
def test_example(example: str, tmp_path: Path) -> None:
    absent = [module for module in NEEDED[example] if not _is_installed(module)]
    if absent:
        pytest.skip(f"it needs {', '.join(absent)}; CONTRIBUTING.md says what is installed")
    ended = run_program(FOLDER / f"{example}.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
