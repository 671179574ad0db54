"""Models of ``transformers`` with experts, unedited, with expert parallelism by Interlace: results
and gradients are those of transformers' own implementation.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import interlace
import interlace.integrations.transformers
from interlace.errors import ArgumentError
from interlace.integrations.transformers import WeightLayout
from interlace.operators.mixture_of_experts.layout import Parameters

pytest.importorskip("transformers", minversion="5.23", reason="make test-integrations installs it")
pytest.importorskip("accelerate", reason="transformers needs it to shard a model")

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 96, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
MODELS = {
    "Mixtral": ("MixtralConfig", {"intermediate_size": 48, "num_local_experts": 4}),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 4},
    ),
    "OLMoE": (
        "OlmoeConfig",
        {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": None},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3,
            "swiglu_limit": 0.1, "initializer_range": 0.3,  # so that some gates are clamped
        },
    ),
    "Granite": (  # a rank has fewer experts than a token
        "GraniteMoeConfig",
        {"intermediate_size": 24, "num_local_experts": 2, "num_experts_per_tok": 2,
         "head_dim": None},
    ),
    "Nemotron-H": (
        "NemotronHConfig",
        {
            "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_shared_expert_intermediate_size": 8, "layers_block_type": ["attention", "moe"],
        },
    ),
}  # fmt: skip


def _model(name: str, sizes: dict[str, Any], folder: str, parallel: dict[str, Any]) -> Any:
    """A model with random weights, sharded over the ranks as a program would load it."""
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    rank, ranks = dist.get_rank(), dist.get_world_size()
    # What torchrun sets, and transformers reads.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    both = {key: value for key, value in (SIZES | sizes).items() if value is not None}
    if rank == 0 and not (Path(folder) / "config.json").exists():
        torch.manual_seed(0)
        config = getattr(transformers, name)(**both)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(**parallel),
        attn_implementation="eager",
        dtype=torch.float32,
    )


def _step(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits, and each parameter's gradient of the loss."""
    from torch.distributed.tensor import DTensor

    output = model(input_ids=tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    results = {"logits": output.logits}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[name] = parameter.grad
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach()
        for name, each in results.items()
    }


class _Calls(TorchDispatchMode):
    """Count calls of Interlace's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function is torch.ops.interlace.mixture_of_experts.default
        return function(*args, **(kwargs or {}))


def _training(
    name: str, sizes: dict[str, Any], folder: str, parallel: dict[str, Any], rows: int
) -> tuple[dict[str, float], int, int]:
    """The relative errors of logits and gradients, the calls of the operator, and its messages."""
    interlace.integrations.transformers.register()
    # Ranks of a TP group, neighbours, share a batch.
    generator = torch.Generator().manual_seed(dist.get_rank() // parallel.get("tp_size", 1))
    tokens = torch.randint(0, SIZES["vocab_size"], (rows, 9), generator=generator)
    expected = _step(_model(name, sizes, folder, parallel), tokens)
    launched = interlace.group_of().traffic
    launched.reset()
    ours = _model(name, sizes, folder, parallel | {"ep_implementation": "interlace"})
    with _Calls() as calls:
        found = _step(ours, tokens)
    assert found.keys() == expected.keys()
    errors = {
        key: float((found[key] - expected[key]).norm() / expected[key].norm().clamp(min=1e-12))
        for key in expected
    }
    return errors, calls.count, launched.messages


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_training(ranks: Any, tmp_path: Path, name: str, rows: int) -> None:
    """Ranks of the expert group share a batch, of an odd or an even number of tokens: no token
    travels.
    """
    config, sizes = MODELS[name]
    parallel = {"tp_size": 2, "ep_size": 2}
    results = ranks(2).run(_training, config, sizes, str(tmp_path), parallel, rows)
    for errors, calls, messages in results:
        assert {key: error for key, error in errors.items() if not error < 1e-4} == {}
        assert any("experts.down_proj" in key for key in errors)
        assert calls > 0
        assert messages == 0


def test_training_with_a_batch_for_each_rank(ranks: Any, tmp_path: Path) -> None:
    """The expert group is larger than the group that shares a batch: FSDP for all other weights."""
    config, sizes = MODELS["Qwen3-MoE"]
    parallel = {"fsdp_size": 2, "ep_size": 2}
    for errors, _, messages in ranks(2).run(_training, config, sizes, str(tmp_path), parallel, 2):
        assert {key: error for key, error in errors.items() if not error < 1e-4} == {}
        assert messages > 0


def test_training_with_a_batch_for_each_half_of_the_ranks(ranks: Any, tmp_path: Path) -> None:
    """Two ranks share a batch, and four the experts."""
    config, sizes = MODELS["Mixtral"]
    parallel = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}
    for errors, _, messages in ranks(4).run(_training, config, sizes, str(tmp_path), parallel, 2):
        assert {key: error for key, error in errors.items() if not error < 1e-4} == {}
        assert messages > 0


def _compiled(folder: str) -> tuple[dict[str, float], dict[str, int], int]:
    """Errors of a compiled training step, where Dynamo has cut its graph, and layers counted."""
    interlace.integrations.transformers.register()
    taken = interlace.counts()["transformers"].taken
    taken.clear()
    config, sizes = MODELS["Mixtral"]
    parallel = {"tp_size": 2, "ep_size": 2, "ep_implementation": "interlace"}
    model = _model(config, sizes, folder, parallel)
    tokens = torch.arange(18).view(2, 9)
    expected = _step(model, tokens)
    model.zero_grad()
    counters.clear()
    found = _step(torch.compile(model, backend="aot_eager"), tokens)
    torch.compiler.reset()
    errors = {
        key: float((found[f"_orig_mod.{key}" if key != "logits" else key] - each).norm())
        for key, each in expected.items()
    }
    return errors, dict(counters["graph_break"]), taken["mixture_of_experts"]


def test_compiled(ranks: Any, tmp_path: Path) -> None:
    for errors, breaks, layers in ranks(2).run(_compiled, str(tmp_path)):
        assert {key: error for key, error in errors.items() if not error < 1e-5} == {}
        assert breaks == {}
        assert layers == SIZES["num_hidden_layers"]


def _generating(name: str, folder: str, is_invariant: bool) -> tuple[bool, int, int]:
    """Whether the same tokens are generated, the operator's calls, and its messages."""
    interlace.integrations.transformers.register()
    config, sizes = MODELS[name]
    parallel = {"tp_size": 2, "ep_size": 2}
    prompt = torch.arange(5).view(1, 5)
    traffic, outputs = interlace.group_of().traffic, []
    for implementation in ("auto", "interlace"):
        traffic.reset()
        model = _model(config, sizes, folder, parallel | {"ep_implementation": implementation})
        with _Calls() as calls, interlace.batch_invariant(is_invariant):
            outputs.append(model.generate(prompt, max_new_tokens=4, do_sample=False))
    return torch.equal(*outputs), calls.count, traffic.messages


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_generating(ranks: Any, tmp_path: Path, name: str, is_invariant: bool) -> None:
    """One token at a time. In the batch-invariant mode one rank has a share of it, and the other a
    row to fill it up.
    """
    for same, calls, messages in ranks(2).run(_generating, name, str(tmp_path), is_invariant):
        assert same
        assert calls > 0
        assert (messages > 0) == is_invariant


# Modules of experts that differ from Mixtral's: the model, the class's beginning, its
# configuration, and what is not transformers' default.
OTHERS = {
    "gpt_oss": ("GptOss", "GptOssConfig", {"swiglu_limit": 1.0}),
    "openai_privacy_filter": (
        "OpenAIPrivacyFilter", "OpenAIPrivacyFilterConfig", {"swiglu_limit": 1.0},
    ),
    "aria": ("Aria", "AriaTextConfig", {}),
    "nemotron_h": ("NemotronH", "NemotronHConfig", {}),
    "gemma4": ("Gemma4Text", "Gemma4TextConfig", {}),
    "deepseek_v4": ("DeepseekV4", "DeepseekV4Config", {"swiglu_limit": 1.0}),
    "minimax_m3_vl": ("MiniMaxM3VL", "MiniMaxM3VLTextConfig", {"swiglu_limit": 1e3}),
    "beam": ("Beam", "BeamConfig", {}),
    "mixtral": ("Mixtral", "MixtralConfig", {"hidden_act": "quick_gelu"}),
}  # fmt: skip


def _difference(model: str) -> dict[str, float]:
    """The relative errors of the results and gradients of a module of experts."""
    name, config_name, changes = OTHERS[model]
    module = f"transformers.models.{model}"
    config = getattr(importlib.import_module(f"{module}.configuration_{model}"), config_name)()
    sizes = {"hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 12} | changes
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    for key, value in (sizes | dict.fromkeys(counts, 4)).items():
        setattr(config, key, value)
    config._experts_implementation = "eager"
    experts = getattr(importlib.import_module(f"{module}.modeling_{model}"), f"{name}Experts")(
        config
    )
    torch.manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(9, 16, requires_grad=True)
    weights, index = torch.rand(9, 4).topk(2)
    weights.requires_grad_()
    layout = WeightLayout.of(experts, "interlace")
    parameters = layout.parameters(experts)
    w_in, w_out, b_in, b_out = (*parameters, None, None)[:4]
    readable = Parameters(w_in, w_out, b_in, b_out).readable()
    memory = [readable.w_in, readable.w_out, readable.b_in, readable.b_out]
    copies = [
        read.data_ptr() != own.data_ptr() for read, own in zip(memory, parameters, strict=False)
    ]
    assert not any(copies)
    results = []
    for y in (
        experts(x, index, weights),
        interlace.mixture_of_experts(x, index, weights, *parameters, activation=layout.activation),
    ):
        leaves = [x, weights, *experts.parameters()]
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    names = ["y", "x", "weights", *(name for name, _ in experts.named_parameters())]
    return {
        name: float((found - expected).norm() / expected.norm())
        for name, expected, found in zip(names, *results, strict=True)
    }


@pytest.mark.parametrize("model", OTHERS)
def test_other_experts(ranks: Any, model: str) -> None:
    """Their activation is recognised, and their parameters are read in the right order, without a
    copy.
    """
    errors = ranks(1).run(_difference, model)[0]
    assert {key: error for key, error in errors.items() if not error < 1e-5} == {}


def _refused(name: str, sizes: dict[str, Any], folder: str) -> str:
    interlace.integrations.transformers.register()
    parallel = {"tp_size": 2, "ep_size": 2, "ep_implementation": "interlace"}
    try:
        _model(name, sizes, folder, parallel)
    except ArgumentError as refusal:
        return str(refusal)
    return "loaded"


@pytest.mark.parametrize(
    ("name", "sizes", "rule"),
    [
        (
            "MixtralConfig",
            {"intermediate_size": 24, "num_local_experts": 4, "hidden_act": "tanh"},
            "have SiLU, GELU or ReLU as their activation",
        ),
    ],
)
def test_other_experts_are_refused(
    ranks: Any, tmp_path: Path, name: str, sizes: dict[str, Any], rule: str
) -> None:
    """A program that asks for Interlace is not given something else."""
    for message in ranks(2).run(_refused, name, sizes, str(tmp_path)):
        assert rule in message
        assert 'Use ep_implementation="auto".' in message


def test_the_module_of_experts_in_float8_is_read() -> None:
    """As in ``test_float8_experts.py``, by transformers' own module."""
    from transformers import Qwen3MoeConfig
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    config = Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=128, num_experts=4)
    kind = use_experts_implementation(
        experts_class=FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS, has_bias=False,
        has_gate=True,
    )  # fmt: skip
    experts = kind(config=config, block_size=(128, 128))
    layout = WeightLayout.of(experts, "interlace")
    assert [tuple(weight.shape) for weight in layout.parameters(experts)] == [
        (4, 128, 2, 256), (4, 256, 128),
    ]  # fmt: skip
    shapes = {name: tuple(scale.shape) for name, scale in layout.scales(experts).items()}
    assert shapes == {"w_in_scale": (4, 1, 2, 2), "w_out_scale": (4, 2, 1)}
    with pytest.raises(ArgumentError, match="float32 scales of blocks"):
        WeightLayout.of(kind(config=config, block_size=(128, 128), scale_fmt="ue8m0"), "interlace")
