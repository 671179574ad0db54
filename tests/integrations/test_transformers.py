"""Models of ``transformers``, unedited, with tensor parallelism by its own plan: what is fused, and
that results and gradients are those of the same program without Interlace.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.compile import Finding, eager_backend, recording

pytest.importorskip("transformers", minversion="5.17", reason="make test-integrations installs it")
pytest.importorskip("accelerate", reason="transformers needs it to shard a model")

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
LAYERS = SIZES["num_hidden_layers"]
MODELS = {"Llama": "LlamaConfig", "Qwen3": "Qwen3Config"}
# Models that end halves of their layers in other ways: Gemma's weight is 1 more than its parameter;
# Gemma 2 and 3 normalise before they add the residual, too.
DECODERS = MODELS | {
    "Mistral": "MistralConfig",
    "Gemma": "GemmaConfig",
    "Gemma2": "Gemma2Config",
    "Gemma3": "Gemma3TextConfig",
}


def _sharded(config_name: str, folder: str) -> Any:
    """A model with random weights, sharded over the ranks as a program would load it."""
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    rank, ranks = dist.get_rank(), dist.get_world_size()
    # What torchrun sets, and transformers reads.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    config = getattr(transformers, config_name)(**SIZES, head_dim=16)
    if rank == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto"),
        # Gemma 2 has no other.
        attn_implementation="eager" if config_name == "Gemma2Config" else "sdpa",
        dtype=torch.float32,
    )


def _tokens(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SIZES["vocab_size"], (rows, columns), generator=generator)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _inference(config_name: str, folder: str) -> tuple[float, list[Finding], list[Finding]]:
    """Logits' error; what the backend fused, and what ``explain`` says that it does."""
    model = _sharded(config_name, folder).eval()
    tokens = _tokens(2, 8)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
        return y

    with torch.no_grad():
        expected = logits(tokens)
        said = interlace.compile.explain(logits, tokens).findings
        torch.compiler.reset()
        with recording() as findings:
            found = torch.compile(logits, backend=eager_backend)(tokens)
    return _error(found, expected), list(findings), list(said)


@pytest.mark.parametrize("config_name", DECODERS.values(), ids=DECODERS)
def test_inference(ranks: Any, tmp_path: Path, config_name: str) -> None:
    """Every all-reduce, in place in a forward hook, is fused with its product, and with the
    residual and the norm that follow. The logits are gathered along the vocabulary, after their
    product, which no operator does.
    """
    for error, findings, said in ranks(2).run(_inference, config_name, str(tmp_path)):
        assert error < 1e-5
        for report in (findings, said):
            *others, head = report
            # Since 5.18 or later the vocabulary is cut, too, and a lookup's parts are added up.
            layers = [finding for finding in others if "embed_tokens" not in finding.module]
            assert {finding.operator for finding in others if finding not in layers} <= {None}
            # Some versions' layers of Qwen3 are one graph, which runs for each of them.
            counts = {2, 2 * LAYERS} if config_name == "Qwen3Config" else {2 * LAYERS}
            assert len(layers) in counts
            assert {finding.operator for finding in layers} == {"gemm_all_reduce_norm"}
            assert (head.collective, head.operator) == ("all_gather_into_tensor", None)


def _training(
    config_name: str, folder: str
) -> tuple[float, dict[str, float], list[tuple[str, str | None]]]:
    """The loss's error, the gradients', and what was fused in which graph."""
    from torch.distributed.tensor import DTensor

    model = _sharded(config_name, folder).train()
    tokens = _tokens(4, 32)  # as many tokens as gemm_all_reduce is for

    def step(run: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        gradients = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        local = {
            name: each.to_local() if isinstance(each, DTensor) else each
            for name, each in gradients.items()
        }
        return loss.detach(), {name: each.clone() for name, each in local.items()}

    expected_loss, expected = step(model)
    torch.compiler.reset()
    with recording() as findings:
        loss, gradients = step(torch.compile(model, backend=eager_backend))
    assert gradients.keys() == expected.keys()
    errors = {name: _error(gradients[name], expected[name]) for name in expected}
    return _error(loss, expected_loss), errors, [(each.graph, each.operator) for each in findings]


@pytest.mark.parametrize("config_name", MODELS.values(), ids=MODELS)
def test_training(ranks: Any, tmp_path: Path, config_name: str) -> None:
    """Forward, the row-parallel layers' sums; backward, the gradients of the column-parallel ones.

    torch 2.13 does not trace the training of Qwen3 of transformers 5.17, by ``aot_eager`` either
    (RecursionError).
    """
    if config_name == "Qwen3Config":
        pytest.importorskip("transformers", minversion="5.23")
    for error, errors, fused in ranks(2).run(_training, config_name, str(tmp_path)):
        assert error < 1e-5
        assert {name: each for name, each in errors.items() if not each < 1e-4} == {}
        forward = [operator for graph, operator in fused if graph == "forward"]
        backward = [operator for graph, operator in fused if graph == "backward"]
        # The logits' gather is left alone, and so is what adds up the embeddings, if anything does.
        assert forward in (
            [*lookup, *["gemm_all_reduce"] * 2 * LAYERS, None] for lookup in ([], [None])
        )
        assert backward.count("gemm_all_reduce") >= 2 * LAYERS
