"""Engines and trainers that are measured with and without Interlace: models, turns, and the times
that are taken of each engine.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

_LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-70b": ("LlamaConfig", "LlamaForCausalLM", _LLAMA_70B),
    "llama-70b-fp8": (
        "LlamaConfig", "LlamaForCausalLM", {**_LLAMA_70B, "quantization_config": _BLOCKS},
    ),
    "qwen3-8b": ("Qwen3Config", "Qwen3ForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128,
    }),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    }),
    "mixtral-8x7b": ("MixtralConfig", "MixtralForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
}  # fmt: skip
"""The configuration's class, the model's, and sizes, by name."""

VOCABULARY = 32000
SEQUENCES = (1, 8, 32, 128)
PROMPTS = (200, 1000, 2000, 4096)
WAYS = {"without": "0", "with": "1"}
"""The value of each way for the variable that switches a plug-in on."""

Generate = Callable[[int, int, int], tuple[float, list[Any]]]
"""Generates, given numbers of sequences, of tokens of each prompt and of new tokens; returns the
seconds and the new tokens of each sequence.
"""


def in_turns(ways: Collection[str], repeats: int) -> Iterator[tuple[int, str]]:
    """Yield each repeat with each way, in the other order in every second repeat."""
    names = list(ways)
    for repeat in range(repeats):
        for way in names if repeat % 2 == 0 else reversed(names):
            yield repeat, way


def require_equal_tokens(results: list[dict[str, Any]]) -> None:
    """Refuse engines that have chosen different tokens.

    Raises:
        AssertionError: They have.
    """
    tokens = {json.dumps(entry["tokens"]) for entry in results}
    assert len(tokens) == 1, "the engines have chosen different tokens"


def save_config(folder: Path, model: str, layers: int) -> Path:
    """Write a model's configuration, and return its folder."""
    import transformers

    config_class, architecture, sizes = MODELS[model]
    known = folder / f"{model}-{layers}"
    config = getattr(transformers, config_class)(
        num_hidden_layers=layers, vocab_size=VOCABULARY, max_position_embeddings=8192,
        architectures=[architecture], dtype="bfloat16", **sizes,
    )  # fmt: skip
    config.save_pretrained(known)
    return known


def step_times(generate: Generate) -> dict[str, Any]:
    """Return microseconds per decoding step by number of sequences, which are what 96 more tokens
    take, divided by 96, and milliseconds per prefill of one sequence by its tokens.
    """

    def step_us(sequences: int) -> float:
        fewer, more = (generate(sequences, 16, tokens)[0] for tokens in (16, 112))
        return (more - fewer) / 96 * 1e6

    result: dict[str, Any] = {"decode_us": {}, "prefill_ms": {}}
    for sequences in SEQUENCES:
        generate(sequences, 16, 24)
        result["decode_us"][sequences] = spread([step_us(sequences) for _ in range(3)])
    for prompt in PROMPTS:
        generate(1, prompt, 1)
        times = [1e3 * generate(1, prompt, 1)[0] for _ in range(9)]
        result["prefill_ms"][prompt] = spread(times)
    return result


def spread(values: list[float], digits: int = 2) -> list[float]:
    """Return the median, the least and the most of some values, rounded."""
    return [round(each, digits) for each in (statistics.median(values), min(values), max(values))]
