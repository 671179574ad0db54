"""``generate`` of ``transformers`` in its default compile mode, ``reduce-overhead``, with the pass:
1,000 tokens of a Llama that is sharded by its own plan. Run with ``-m gpu``.

Tokens are drawn at random, with the same seed on every rank, so that the model does not fall into
repeating itself, where a result of an earlier step would look right. The logits of every step are
then compared with those of one forward pass over the whole sequence, without Interlace, without a
cache and without graphs. The same is done with the program without Interlace, to tell what rounding
alone amounts to. A logit that counts as wrong is one that the program without Interlace would not
give, not one that is merely the second best by less than rounding.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config

import interlace
from interlace.comm.groups.group import _groups
from interlace.compile import recording
from tests.compile.programs import fuse_everything
from tests.gpu.graphs import graphs_of_inductor

pytestmark = pytest.mark.gpu

pytest.importorskip("transformers", minversion="5.17", reason="make test-integrations installs it")
pytest.importorskip("accelerate", reason="transformers needs it to shard a model")

TOKENS, PROMPT = 1000, 8
SIZES = {
    "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 1024,
    "max_position_embeddings": 2048,
}  # fmt: skip
LAYERS = SIZES["num_hidden_layers"]
TOLERANCE = 0.1
"""Relative error of a step's logits, in bfloat16 about 0.01 to 0.02 by rounding alone. Those of
another step, or of a layer whose sum is another call's, are off by 0.3 and more."""


def _sharded(folder: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.distributed import DistributedConfig

    rank, ranks = dist.get_rank(), dist.get_world_size()
    # What torchrun sets, and transformers reads.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    if rank == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto"),
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def _run(model: Any, tokens: int) -> dict[str, Any]:
    """Generate by the default compile mode, and compare each step's logits with the forward pass of
    the same tokens, operator by operator.
    """
    torch.compiler.reset()
    counters.clear()
    model.__dict__.pop("_compiled_call", None)
    prompt = torch.arange(1, PROMPT + 1, device=model.device)[None]
    torch.manual_seed(5)
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        cache_implementation="static",
        return_dict_in_generate=True,
        output_logits=True,
    )
    interlace.synchronize()
    logits = torch.cat(generated.logits).float()
    sequence = generated.sequences
    with torch.no_grad():
        expected = model(input_ids=sequence, use_cache=False).logits[0, PROMPT - 1 : -1].float()
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    chosen = expected.gather(1, logits.argmax(1, keepdim=True))[:, 0]
    # In standard deviations of the logits: how far the step's best token is from the expected one.
    gaps = (expected.max(1).values - chosen) / expected.std(1)
    return {
        "sequence": sequence[0].tolist(),
        "different_tokens": len(set(sequence[0].tolist())),
        "worst_step": int(errors.argmax()),
        "worst_error": float(errors.max()),
        "median_error": float(errors.median()),
        "steps_with_another_best_token": int((gaps > 0).sum()),
        "largest_gap": float(gaps.max()),
        "graphs": graphs_of_inductor(),
    }


def _both(folder: str, tokens: int) -> dict[str, Any]:
    """What ``generate`` gives with Interlace and without, and what was fused."""
    model = _sharded(folder)
    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True):
        fuse_everything(patch)
        with recording() as findings, interlace.compile.installed():
            ours = _run(model, tokens)
        sums = [str(found) for found in findings if found.operator == "gemm_all_reduce_norm"]
        groups = [group for groups in list(_groups.values()) for group in groups.values()]
        runs = sorted(
            f"{dict(measured.multiples)}"
            for group in groups
            for measured in group.cache.measured.values()
        )
        failure, plain = "", None
        try:
            plain = _run(model, tokens)
        except Exception as error:  # torch or transformers, as nothing of Interlace runs here
            failure = f"{type(error).__name__}: {error}"
    return {
        "ours": ours,
        "plain": plain,
        "failure_of_plain": failure,
        "sums": sums,
        "measured": runs,
        "findings": [str(finding) for finding in findings],
    }


def _summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return a run without its tokens."""
    return {key: value for key, value in (result or {}).items() if key != "sequence"}


@pytest.mark.usefixtures("own_gpus")  # as transformers places models
def test_a_thousand_tokens(ranks: Any, tmp_path: Path) -> None:
    results = ranks(2).run(_both, str(tmp_path / "model"), TOKENS, timeout_s=540)
    for rank, result in enumerate(results):
        ours, plain = result["ours"], result["plain"]
        print(f"rank {rank}, with Interlace: {_summary(ours)}")
        print(f"rank {rank}, without: {_summary(plain)} {result['failure_of_plain']}")
        print(f"rank {rank}, sums fused: {len(result['sums'])}; {result['measured']}")
    sequences = [result["ours"]["sequence"] for result in results]
    assert sequences[0] == sequences[1], "ranks have drawn different tokens, so logits differ"
    for result in results:
        ours, plain = result["ours"], result["plain"]
        assert len(ours["sequence"]) == PROMPT + TOKENS
        assert ours["different_tokens"] > min(TOKENS, SIZES["vocab_size"]) // 4
        assert ours["worst_error"] < TOLERANCE, _summary(ours)
        assert len(result["sums"]) == 2 * LAYERS, result["findings"]
        assert ours["graphs"]["recorded"] >= 1
        assert not result["failure_of_plain"]
        assert ours["worst_error"] < 2 * plain["worst_error"] + 0.01
        # No cut at an operator: not more pieces than without them.
        for what in ("functions", "skipped"):
            assert ours["graphs"][what] <= plain["graphs"][what], (ours["graphs"], plain["graphs"])
