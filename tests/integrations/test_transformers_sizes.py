"""The sizes that ``interlace explain --model`` reads from a configuration are those of the weights
that transformers makes of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.costs.models import _FAMILIES, Model, find_model

pytest.importorskip("transformers", minversion="5.23", reason="make test-integrations installs it")

SIZES = {
    "hidden_size": 96, "intermediate_size": 176, "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_hidden_layers": 5, "vocab_size": 160, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts_per_tok": 3,
}  # fmt: skip
OWN_HEADS = {"head_dim": 24}
COMPRESSED = {
    "num_key_value_heads": 6, "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "q_lora_rank": 56,
}  # fmt: skip
SHARED = {
    "moe_intermediate_size": 72, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 72}
FURTHER: dict[str, dict[str, Any]] = {
    "deepseek_v2": COMPRESSED | SHARED | {"q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": COMPRESSED | SHARED | {"first_k_dense_replace": 2},
    "dots1": SHARED,
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 72, "moe_layer_start_index": 2,
    },
    "glm4_moe": SHARED | OWN_HEADS,
    "glm4_moe_lite": COMPRESSED | SHARED,
    "llama4_text": {
        "num_local_experts": 8, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 200,
    },
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 88},
}  # fmt: skip


def weights(model_type: str, sizes: dict[str, Any], folder: Path) -> dict[str, int]:
    """Return the number of elements of each weight of the layers, whose configuration is saved."""
    from transformers import CONFIG_MAPPING, AutoModel

    config = CONFIG_MAPPING[model_type](**sizes)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    parameters = {name: weight.numel() for name, weight in model.named_parameters()}
    return {name: number for name, number in parameters.items() if "layers." in name}


# transformers has no class for Kimi K2, which comes with one like DeepSeek V3's, and takes the flat
# configurations of Qwen2-VL apart.
@pytest.mark.parametrize("model_type", sorted({*_FAMILIES} - {"kimi_k2", "qwen2_vl", "qwen2_5_vl"}))
def test_sizes_are_those_of_the_weights(tmp_path: Path, model_type: str) -> None:
    family = _FAMILIES[model_type]
    further = FURTHER.get(model_type, EXPERTS if "experts" in family.required else {})
    if "head_dim" in family.required and "head_dim" not in family.names:
        further = OWN_HEADS | further
    found = weights(model_type, SIZES | further, tmp_path)
    if model_type == "glm4_moe_lite":  # Its class makes one dense layer whatever is given.
        text = (tmp_path / "config.json").read_text(encoding="utf-8")
        text = re.sub(r'"mlp_layer_types": \[[^]]*\],', '"first_k_dense_replace": 1,', text)
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    model = find_model(str(tmp_path))
    assert isinstance(model, Model)
    of_parts = {
        "output": r"self_attn\.(o_proj|dense)\.weight",
        "attention": r"self_attn\.(q|k|v|qkv|q_a|q_b|kv_a)_proj(_with_mqa)?\.weight",
        "up": r"\.(gate_proj|up_proj|gate_up_proj|c_fc)(\.weight)?$",
        "down": r"\.(down_proj|c_proj)(\.weight)?$",
    }
    counts = {
        part: sum(number for name, number in found.items() if re.search(pattern, name))
        for part, pattern in of_parts.items()
    }
    expected = dict.fromkeys(of_parts, 0)
    before = ("qkv", "q", "kv down", "q, kv down", "q up")
    for product in model.layer_products(1):
        part = "attention" if product.part in before else product.part.split()[-1]
        expected[part] += product.layers * product.columns * product.inner
    one = model.experts * model.expert_layers * model.hidden * model.intermediate
    expected["up"] += 2 * one
    expected["down"] += one
    assert counts == expected
    heads = model.heads * model.head_dim
    wide = [name for name, number in found.items() if "q_norm" in name and number == heads]
    assert bool(wide) == model.has_wide_norms
    behind = [name for name in found if re.search(r"post_(feedforward|mlp)_layernorm", name)]
    assert bool(behind) == model.norm_first
