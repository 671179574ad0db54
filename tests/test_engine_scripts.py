"""What the scripts of whole engines compute themselves, without the engines."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def _step(token: int, *logprobs: float) -> list[Any]:
    """A step of an engine: its token, and logprobs of tokens 0, 1, ..."""
    best = sorted(
        ([key, logprob] for key, logprob in enumerate(logprobs)), key=lambda each: -each[1]
    )
    return [token, best]


def test_engines_that_agree(script: Any) -> None:
    agreement = script("vllm_engine").agreement
    first, second = [_step(0, -1.0, -3.0), _step(1, -2.0, -1.0)], [_step(1, -2.0, -0.5)]
    found = agreement([first, second], [first, [_step(1, -2.01, -0.51)]])
    assert found == {
        "largest_difference_of_logprobs": 0.01,
        "largest_gap_at_other_tokens": 0.0,
        "prompts_with_equal_tokens": [2, 2],
        "prompts_that_agree": [2, 2],
        "agrees": True,
    }


@pytest.mark.parametrize(
    ("lead", "agrees"),
    [
        pytest.param(0.03, True, id="a near tie"),
        pytest.param(0.125, True, id="both off by two steps"),
        pytest.param(0.15, False, id="no tie"),
    ],
)
def test_engines_whose_tokens_differ(script: Any, lead: float, agrees: bool) -> None:
    """After the first other token, texts are no longer compared: the last tokens are far apart."""
    same = _step(0, -1.0, -3.0)
    without = [same, _step(0, -1.0, -1.0 - lead), _step(0, -1.0, -9.0)]
    with_ = [same, _step(1, -1.0 - lead, -1.0), _step(1, -9.0, -1.0)]
    found = script("vllm_engine").agreement([without], [with_])
    assert found["prompts_with_equal_tokens"] == [0, 1]
    assert found["largest_gap_at_other_tokens"] == lead
    assert found["agrees"] is agrees


def test_first_logprobs_that_differ(script: Any) -> None:
    found = script("vllm_engine").agreement([[_step(0, -1.0, -3.0)]], [[_step(0, -1.1, -3.0)]])
    assert (found["largest_difference_of_logprobs"], found["agrees"]) == (0.1, False)


@pytest.mark.parametrize(("routed_otherwise", "agrees"), [(1, True), (2, False)])
def test_tokens_that_are_routed_otherwise(script: Any, routed_otherwise: int, agrees: bool) -> None:
    """Of experts only the first tokens count, and of these a quarter may be far apart."""
    agreement, far = script("vllm_engine").agreement, [_step(0, -1.0, -3.0)] * 2
    near = [_step(0, -1.0, -3.0), _step(1, -3.0, -1.0)]
    with_ = routed_otherwise * [[_step(1, -3.0, -1.0), far[1]]] + (4 - routed_otherwise) * [near]
    found = agreement(4 * [far], with_, of_experts=True)
    assert found["prompts_that_agree"] == [4 - routed_otherwise, 4]
    assert found["agrees"] is agrees
    assert not agreement(4 * [far], 4 * [near])["agrees"]


def test_checks_have_models(script: Any) -> None:
    engine = script("vllm_engine")
    assert set(engine.OTHER_MODELS) < set(engine.CHECKS)
    assert set(engine.OTHER_MODELS.values()) < set(engine.MODELS)
    lengths = [len(tokens) for tokens in engine.prompts_of("chunked prefill")]
    assert min(lengths) < 16 < 256 < max(lengths) < 2048


def test_the_host_of_a_worker(script: Any) -> None:
    engine, worker = script("vllm_engine"), SimpleNamespace()
    asked = []

    def generate(sequences: int, prompt: int, tokens: int) -> tuple[float, list[Any]]:
        asked.append(prompt)
        return 0.002, sorted(range(prompt))

    calls = SimpleNamespace(collective_rpc=lambda function: [function(worker)])
    found = engine.host_profile(calls, generate)
    assert asked == 5 * [engine.HOST_PROMPTS[0]]
    (generated,) = [each for each in found if each[0].endswith(" generate")]
    assert generated[1] == 5
    assert generated[2] <= generated[3]


def test_the_steps_of_a_worker_are_timed(script: Any) -> None:
    engine = script("vllm_engine")
    runner = SimpleNamespace(execute_model=lambda *_: time.sleep(0.01))
    worker = SimpleNamespace(model_runner=runner)
    engine.time_host(worker)
    for _ in range(2):
        runner.execute_model("step", "tokens")
    assert engine.host_ms(worker) >= 20
    assert engine.host_ms(worker) == 0


@pytest.mark.parametrize(
    ("gpus", "stages", "ranks", "share"),
    [(2, 1, 2, 1.0), (4, 2, 2, 1.0), (1, 1, 2, 0.5), (1, 2, 2, 0.25), (2, 2, 2, 0.5)],
)
def test_engines_on_fewer_gpus_than_ranks(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, stages: int,
    ranks: int, share: float,
) -> None:  # fmt: skip
    engine = script("vllm_engine")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=dict))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(engine, "save_config", lambda folder, *_: folder)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "1")
    options = {"pipeline_parallel_size": stages} if stages > 1 else {}
    _, made = engine.make_engine("qwen3-8b", 4, gpu_memory_utilization=0.4, **options)
    assert made["tensor_parallel_size"] == ranks
    assert made["gpu_memory_utilization"] == pytest.approx(0.4 * share)
    is_shared = share < 1
    assert (made.get("worker_extension_cls") == "shared_gpu.SharedGPU") is is_shared
    assert made.get("disable_custom_all_reduce", False) is is_shared
    assert (os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0") is is_shared


def test_workers_share_a_gpu(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def __init__(self, local_rank: int) -> None:
            self.local_rank = local_rank

        def init_device(self) -> None:
            devices.append(self.local_rank)

    devices: list[int] = []
    module: Any = SimpleNamespace(Worker=Worker)
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_worker"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "shared_gpu", raising=False)
    for variable in ("NCCL_HOSTID", "INTERLACE_NODES", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "as it was")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    script("shared_gpu")
    for local_rank in range(4):
        Worker(local_rank).init_device()
    assert devices == [0, 1, 0, 1]
    assert os.environ["NCCL_HOSTID"] == str(os.getpid())
    assert os.environ["INTERLACE_NODES"] == "1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "as it was"


def test_tokens_follow_from_one_another(script: Any) -> None:
    trainer = script("torchtitan_trainer")
    batch, labels = trainer.sequences(2, trainer.PATTERN, torch.Generator().manual_seed(0))
    inputs = batch["input"]
    assert inputs.shape == labels.shape == (2, trainer.PATTERN)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    is_determined = labels == (5 * inputs + 3) % trainer.PATTERN
    assert 0.4 < is_determined.float().mean() < 0.6
    assert len(inputs.unique()) > trainer.PATTERN // 2


def test_losses_that_differ(script: Any) -> None:
    trainer = script("torchtitan_trainer")

    def trained(way: str, *losses: float) -> dict[str, Any]:
        return {"way": way, "losses": list(losses)}

    trainer.check([trained("without", 2.0, 1.0), trained("with", 2.0, 1.001)], 0.002)
    with pytest.raises(AssertionError, match="losses with Interlace differ"):
        trainer.check([trained("without", 2.0, 1.0), trained("with", 2.0, 1.1)], 0.002)
    with pytest.raises(AssertionError, match="learned nothing"):
        trainer.check([trained("without", 2.0, 2.0)], 0.002)
