"""``interlace explain --model``: the calls of a layer and of a step, and what a model is."""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from interlace.cli.app import app
from interlace.costs.datasheets import DATASHEETS
from interlace.costs.models import (
    _FAMILIES,
    EmbeddingModel,
    Model,
    explained_models,
    find_model,
)
from interlace.errors import ArgumentError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
GEMMA_2_9B = {
    "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 42,
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 36,
    "num_local_experts": 128, "num_experts_per_tok": 4, "experts_per_token": 4,
}  # fmt: skip
LLAMA_4_MAVERICK = {
    "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "head_dim": 128,
    "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8,
    "num_hidden_layers": 48, "num_local_experts": 128, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
}  # fmt: skip
ERNIE_21B = {
    "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_attention_heads": 20, "num_key_value_heads": 4,
    "num_hidden_layers": 28, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1,
}  # fmt: skip
# Published configurations without the keys that say no size: ranks, configuration, layers and sizes
# of each call.
PUBLISHED: dict[str, tuple[int, dict[str, Any], dict[str, tuple[int, str]]]] = {
    "DeepSeek-V3": (8, DEEPSEEK_V3, {
        "q, kv down": (61, "2112x7168"),  # 1536 + 512 + 64
        "q up": (61, "3072x1536"),  # 16 heads of 128 + 64
        "output": (61, "7168x2048"),  # 16 heads of 128
        "gate, up": (3, "4608x7168"),
        "down": (3, "7168x2304"),
        "shared gate, up": (58, "512x7168"),
        "shared down": (58, "7168x256"),
        "experts": (58, "1 token, 8 of 256, 7168x2048"),
    }),
    "DeepSeek-V2-Lite": (4, DEEPSEEK_V3 | {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
    }, {
        "q": (27, "768x2048"),  # 4 heads of 192
        "kv down": (27, "576x2048"),
        "output": (27, "2048x512"),
        "gate, up": (1, "5472x2048"),
        "down": (1, "2048x2736"),
        "shared gate, up": (26, "1408x2048"),  # 2 x 2 x 1408 over 4 ranks
        "shared down": (26, "2048x704"),
        "experts": (26, "2 tokens, 6 of 64, 2048x1408"),
    }),
    "Kimi-K2": (8, {"text_config": DEEPSEEK_V3 | {
        "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "first_k_dense_replace": 1,
    }}, {
        "q, kv down": (61, "2112x7168"),
        "q up": (61, "1536x1536"),
        "output": (61, "7168x1024"),
        "gate, up": (1, "4608x7168"),
        "down": (1, "7168x2304"),
        "shared gate, up": (60, "512x7168"),
        "shared down": (60, "7168x256"),
        "experts": (60, "1 token, 8 of 384, 7168x2048"),
    }),
    "GLM-4.7-Flash": (4, DEEPSEEK_V3 | {
        "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240,
        "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
        "num_key_value_heads": 20, "n_routed_experts": 64, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
    }, {
        "q, kv down": (47, "1344x2048"),
        "q up": (47, "1280x768"),  # 5 heads of 192 + 64
        "output": (47, "2048x1280"),
        "gate, up": (1, "5120x2048"),
        "down": (1, "2048x2560"),
        "shared gate, up": (46, "768x2048"),
        "shared down": (46, "2048x384"),
        "experts": (46, "2 tokens, 4 of 64, 2048x1536"),
    }),
    "GLM-4.5-Air": (8, {
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    }, {
        "qkv": (46, "1792x4096"),  # 12 + 2 heads of 128
        "output": (46, "4096x1536"),
        "gate, up": (1, "2736x4096"),
        "down": (1, "4096x1368"),
        "shared gate, up": (45, "352x4096"),
        "shared down": (45, "4096x176"),
        "experts": (45, "1 token, 8 of 128, 4096x1408"),
    }),
    "ERNIE-4.5-21B-A3B": (4, ERNIE_21B, {
        "qkv": (28, "896x2560"),  # 5 + 2 heads of 128
        "output": (28, "2560x640"),
        "gate, up": (1, "6144x2560"),
        "down": (1, "2560x3072"),
        "shared gate, up": (27, "1536x2560"),  # 2 x 2 x 1536 over 4 ranks
        "shared down": (27, "2560x768"),
        "experts": (27, "2 tokens, 6 of 64, 2560x1536"),
    }),
    "Llama-4-Maverick": (8, {"text_config": LLAMA_4_MAVERICK}, {
        "qkv": (48, "896x5120"),  # 5 + 2 heads of 128
        "output": (48, "5120x640"),
        "gate, up": (24, "4096x5120"),
        "down": (24, "5120x2048"),
        "shared gate, up": (24, "2048x5120"),
        "shared down": (24, "5120x1024"),
        "experts": (24, "1 token, 1 of 128, 5120x8192"),
    }),
    "Llama-4-Scout, as transformers saves it": (8, LLAMA_4_MAVERICK | {
        "num_local_experts": 16, "interleave_moe_layer_step": 1, "moe_layers": [*range(48)],
    }, {
        "qkv": (48, "896x5120"),
        "output": (48, "5120x640"),
        "shared gate, up": (48, "2048x5120"),
        "shared down": (48, "5120x1024"),
        "experts": (48, "1 token, 1 of 16, 5120x8192"),
    }),
    "Qwen2-57B-A14B": (4, {
        "model_type": "qwen2_moe", "hidden_size": 3584, "intermediate_size": 18944,
        "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "num_experts": 64, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    }, {
        "qkv": (28, "1152x3584"),  # 7 + 2 heads of 128
        "output": (28, "3584x896"),
        "shared gate, up": (28, "10240x3584"),
        "shared down": (28, "3584x5120"),
        "experts": (28, "2 tokens, 8 of 64, 3584x2560"),
    }),
    "gpt-oss-120b": (8, GPT_OSS_120B, {
        "qkv": (36, "640x2880"),  # 8 + 2 heads of 64
        "output": (36, "2880x512"),
        "experts": (36, "1 token, 4 of 128, 2880x2880"),
    }),
    "MiniMax-M2": (8, {
        "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536,
        "head_dim": 128, "num_attention_heads": 48, "num_key_value_heads": 8,
        "num_hidden_layers": 62, "num_local_experts": 256, "num_experts_per_tok": 8,
        "shared_intermediate_size": 0,
    }, {
        "qkv": (62, "1024x3072"),  # 6 + 2 heads of 128
        "output": (62, "3072x768"),
        "experts": (62, "1 token, 8 of 256, 3072x1536"),
    }),
    "Gemma-2-9B": (8, GEMMA_2_9B, {
        "qkv": (42, "1024x3584"),  # 2 + 2 heads of 256
        "output": (42, "3584x512"),
        "gate, up": (42, "3584x3584"),
        "down": (42, "3584x1792"),
    }),
    "Gemma-3-4B": (2, {"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }}, {
        "qkv": (34, "2048x2560"),  # 4 + 2 x 2 heads of 256
        "output": (34, "2560x1024"),
        "gate, up": (34, "10240x2560"),
        "down": (34, "2560x5120"),
    }),
    "OLMo-2-13B": (8, {
        "model_type": "olmo2", "hidden_size": 5120, "intermediate_size": 13824,
        "num_attention_heads": 40, "num_key_value_heads": 40, "num_hidden_layers": 40,
    }, {
        "qkv": (40, "1920x5120"),
        "output": (40, "5120x640"),
        "gate, up": (40, "3456x5120"),
        "down": (40, "5120x1728"),
    }),
    "StarCoder2-15B": (4, {
        "model_type": "starcoder2", "hidden_size": 6144, "intermediate_size": 24576,
        "num_attention_heads": 48, "num_key_value_heads": 4, "num_hidden_layers": 40,
    }, {
        "qkv": (40, "1792x6144"),  # 12 + 2 heads of 128
        "output": (40, "6144x1536"),
        "up": (40, "6144x6144"),
        "down": (40, "6144x6144"),
    }),
}  # fmt: skip
QWEN = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "head_dim": 128,
}


@pytest.fixture(autouse=True)
def nothing_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of pytest-xdist have COLUMNS, as a terminal has."""
    monkeypatch.delenv("COLUMNS", raising=False)


def explain(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def document(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    """Return what a command writes as JSON."""
    file = tmp_path / "explained.json"
    done = explain(*arguments, "--json", file)
    assert done.exit_code == 0, done.output
    written: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return written


@pytest.mark.parametrize(("gpu", "ranks"), [("h100", 8), ("h200", 2)])
def test_a_layer_is_the_sum_of_its_calls(tmp_path: Path, gpu: str, ranks: int) -> None:
    where = ("--tensor", ranks, "--gpu", gpu)
    written = document(tmp_path, "--model", "llama3-70b", "--tokens", "8,4096", *where)
    assert written["model"]["layers"] == 80
    for step in written["steps"]:
        calls = step["calls"]
        assert [each["part"] for each in calls] == ["qkv", "output", "gate, up", "down"]
        assert step["layer_us"] == [
            pytest.approx(sum(each[us] for each in calls)) for us in ("pair_us", "auto_us")
        ]
        for each in calls:
            if not each["operator"]:
                assert each["pair_us"] == each["auto_us"]
                continue
            single = document(tmp_path, each["operator"], each["sizes"], *where)["calls"][0]
            assert each["impl"] == single["impl"]
            assert each["auto_us"] == single["times_us"][single["impl"]]
            # PyTorch's all-reduce in symmetric memory may precede its norm as well.
            pairs = [
                us for name, us in single["times_us"].items() if name in ("unfused", "symm_mem")
            ]
            if each["operator"] == "gemm_all_reduce":
                assert each["pair_us"] == min(pairs)
            elif ranks == 2:
                assert 0.7 * min(pairs) < each["pair_us"] <= min(pairs)
        of_operators = sum(each["pair_us"] for each in calls if each["operator"])
        assert step["share"] == pytest.approx(of_operators / step["layer_us"][0])
    few, many = written["steps"]
    assert {each["operator"] for each in few["calls"]} == {"", "gemm_all_reduce_norm"}
    assert {each["operator"] for each in many["calls"]} == {"", "gemm_all_reduce"}
    assert few["calls"][0]["sizes"] == f"8x{10240 // ranks}x8192"


def test_a_norm_takes_the_same_time_behind_any_sum(tmp_path: Path) -> None:
    """The pair with a norm was measured on two ranks alone; on eight it is predicted to take
    several times too long, as the bytes that the fused kernel sends grow with the ranks.
    """
    sizes = "256x8192x3584"
    norms = []
    for ranks in (2, 8):
        where = ("--gpu", "h100", "--tensor", ranks)
        model = f"hidden=8192,heads=64,inner={3584 * ranks},layers=1"
        (step,) = document(tmp_path, "--model", model, "--tokens", 256, *where)["steps"]
        (down,) = (each for each in step["calls"] if each["sizes"] == sizes)
        times_us = document(tmp_path, "gemm_all_reduce", sizes, *where)["calls"][0]["times_us"]
        norms.append(down["pair_us"] - min(times_us["unfused"], times_us["symm_mem"]))
    assert norms[0] == pytest.approx(norms[1])
    assert 20 < norms[0] < 60


@pytest.mark.parametrize("gpu", ["h200", "l40s"])
def test_a_single_call_with_a_norm_is_no_faster_than_its_sum(tmp_path: Path, gpu: str) -> None:
    """Eight L40S were predicted to take 245 us for sums that their links need 459 us for, and eight
    H200s an eighth of the pair's time.
    """
    where = ("--gpu", gpu, "-n", 8)
    shapes = ("4096x8192x1024", "256x16384x2048")
    normed, summed = (
        document(tmp_path, operator, *shapes, *where)["calls"]
        for operator in ("gemm_all_reduce_norm", "gemm_all_reduce")
    )
    for with_norm, alone in zip(normed, summed, strict=True):
        times_us, sum_us = with_norm["times_us"], alone["times_us"]
        assert times_us["gemm"] >= min(sum_us.values())
        assert sum_us["unfused"] < times_us["unfused"] < 4 * times_us["gemm"]
    printed = explain("gemm_all_reduce_norm", shapes[0], *where).output
    alone = explain("gemm_all_reduce", shapes[0], *where).output
    links = [line for line in alone.splitlines() if "the links alone" in line]
    assert links[0].split() in [line.split() for line in printed.splitlines()]


@pytest.mark.parametrize(
    ("operator", "rows", "columns", "inner", "where"),
    [
        ("all_gather_gemm", 131072, 53248, 16384, ("--gpu", "h200", "-n", 2)),
        ("gemm_all_reduce_norm", 128, 8192, 4096, ("-n", 2, "--dtype", "float32")),
        ("gemm_all_reduce", 131072, 6144, 768, ("--gpu", "l40s", "-n", 8)),
    ],
)
def test_no_time_is_below_what_the_data_sheet_allows(
    tmp_path: Path, operator: str, rows: int, columns: int, inner: int, where: tuple[Any, ...]
) -> None:
    written = document(tmp_path, operator, f"{rows}x{columns}x{inner}", *where)
    (call,) = written["calls"]
    datasheet = DATASHEETS[written["gpu"]]
    is_exact = written["dtype"] == "float32"
    tera_flops = datasheet.float32_tera_flops if is_exact else datasheet.tera_flops
    for us in call["times_us"].values():
        assert us >= 2 * rows * columns * inner / (tera_flops * 1e6) * (1 - 1e-9)
    if operator == "gemm_all_reduce":
        sent_bytes = 2 * 7 / 8 * rows * columns * 2
        assert min(call["times_us"].values()) >= sent_bytes / datasheet.link_gigabytes / 1001


def test_what_is_printed() -> None:
    done = explain("--model", "llama3-70b", "--tensor", 8, "--tokens", "1,4096", "--gpu", "h100")
    assert done.exit_code == 0
    title = "Llama-3-70B, 8 ranks, bfloat16, NVIDIA H100 80GB HBM3"
    assert f"{title}, 1 token\n" in done.output
    assert f"{title}, 4096 tokens\n" in done.output
    assert done.output.count("attention  not counted") == 2
    assert done.output.count("80 layers ") == 2
    assert "Calls with a collective are " in done.output
    assert (
        "Not counted, and about the same with and without: attention and its cache" in done.output
    )
    assert "Calls with more than 4 ranks were never run: all times with 8 are" in done.output
    assert "chunked (gemm_all_reduce): torch.mm for each rank's rows, and copy" in done.output
    assert "guessed" not in done.output
    guessed = explain("--model", "llama3-8b", "--tensor", 2, "--tokens", 1, "--gpu", "b200")
    assert "Measured on NVIDIA B200: no calls." in guessed.output
    assert " predicted" not in guessed.output
    assert "never run" not in guessed.output


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tensor-parallel.md").read_text(encoding="utf-8")
    shown = page.split("```text\n")[1].split("\n```")[0].splitlines()
    done = explain("--model", "llama3-70b", "--tensor", 8, "--tokens", "8,4096", "--gpu", "h100")
    printed = [line.rstrip() for line in done.output.splitlines()]
    assert printed[: len(shown)] == shown
    # The first page has some of these lines.
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    some = readme.split("$ interlace explain --model")[1].split("```")[0].splitlines()[1:]
    assert len(some) == 5
    assert set(some[:4]) <= set(printed)
    *_, layer = (line.split() for line in printed if line.startswith("layer"))
    assert some[4].split()[-3:] == layer[1:4]


def test_single_calls_say_so_too(tmp_path: Path) -> None:
    done = explain("gemm_all_reduce", "64x8192x1024", "-n", 8, "--gpu", "h100")
    assert "Calls with more than 4 ranks were never run" in done.output
    assert "\nsymm_mem: cuBLAS, then PyTorch's all-reduce in symmetric memory" in done.output
    few = explain("gemm_all_reduce", "64x8192x1024", "-n", 4, "--gpu", "h100")
    assert "never run" not in few.output
    assert "Measured on NVIDIA H100 80GB HBM3: calls with 2 ranks." in few.output


def test_calls_that_were_measured_are_told_apart(tmp_path: Path) -> None:
    """docs/decoding.md has 4 x 8192 x 14336 on two H200s."""
    written = document(tmp_path, "--model", "llama3-70b", "--tensor", 2, "--tokens", "3,4")
    bases = [{each["part"]: each["basis"] for each in step["calls"]} for step in written["steps"]]
    assert [each["down"] for each in bases] == ["predicted", "measured"]
    assert {each["qkv"] for each in bases} == {"predicted"}
    assert any(note.startswith("measured: ") for note in written["notes"])


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", explained_models())
def test_every_model_of_the_table(tmp_path: Path, name: str, ranks: int) -> None:
    model = find_model(name)
    file = tmp_path / "explained.json"
    sizes = ("--model", name, "--tensor", ranks, "--tokens", "1,8,4096", "--json", file)
    done = explain(*sizes)
    if isinstance(model, Model) and model.heads % ranks:
        assert f"--tensor must divide the {model.heads} heads of {name}" in done.output
        return
    if isinstance(model, Model) and model.kv_heads % ranks and ranks % model.kv_heads:
        assert "heads of keys and values" in done.output
        return
    assert done.exit_code == 0, done.output
    written = json.loads(file.read_text(encoding="utf-8"))
    assert [step["tokens"] for step in written["steps"]] == [1, 8, 4096]
    for step in written["steps"]:
        without, auto = step["layer_us"]
        assert 0 < auto < 1.2 * without
        assert auto > 0.2 * without


def test_experts_and_sequence_parallelism(tmp_path: Path) -> None:
    common = ("--model", "qwen3-30b-a3b", "--tensor", 8, "--tokens", 64)
    written = document(tmp_path, *common, "--sequence-parallel")
    (step,) = written["steps"]
    assert [each["operator"] for each in step["calls"]] == [
        "all_gather_gemm", "gemm_reduce_scatter", "mixture_of_experts",
    ]  # fmt: skip
    assert step["share"] == 1
    # Each of four heads of keys and values is on two ranks.
    assert step["calls"][0]["sizes"] == f"64x{(32 // 8 + 2) * 128}x2048"
    assert step["calls"][2]["sizes"] == "8 tokens, 8 of 128, 2048x768"
    (step,) = document(tmp_path, *common)["steps"]
    assert [each["operator"] for each in step["calls"]] == [
        "", "gemm_all_reduce_norm", "mixture_of_experts",
    ]  # fmt: skip
    # PyTorch's grouped products are of bfloat16.
    (step,) = document(tmp_path, *common, "--dtype", "float16")["steps"]
    assert step["calls"][2]["pair_us"] is None
    assert "unknown" in explain(*common, "--dtype", "float16").output


def test_tables(tmp_path: Path) -> None:
    """Forward as measured: 64 tables 256 wide, 4096 samples, one lookup, float32 on four H200s took
    585 us, and 1685 with PyTorch's operators (docs/results.md).
    """
    sizes = "tables=256,width=256,lookups=1"
    common = ("--tensor", 4, "--tokens", 4096, "--dtype", "float32")
    (step,) = document(tmp_path, "--model", sizes, *common)["steps"]
    forward, backward = step["calls"]
    assert forward["auto_us"] == pytest.approx(585, rel=0.1)
    assert forward["auto_us"] < forward["pair_us"] < 1685
    assert backward["auto_us"] < backward["pair_us"]
    assert forward["basis"] == backward["basis"] == "guessed"
    assert forward["sizes"] == "64 tables 256 wide, 1 lookup each"
    done = explain("--model", "dlrm", "--tokens", 65536)
    assert "DLRM-Criteo, 4 ranks, bfloat16, NVIDIA H200, 65536 samples" in done.output
    assert "Not counted, and about the same with and without: the MLPs" in done.output


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama3-70b", "Llama-3-70B"),
        ("Llama 3 8B", "Llama-3-8B"),
        ("llama3-405b", "Llama-3.1-405B"),
        ("qwen3-235b", "Qwen3-235B-A22B"),
        ("dlrm", "DLRM-Criteo"),
    ],
)
def test_names(text: str, name: str) -> None:
    assert find_model(text) == explained_models()[name]


def test_configurations_and_lists_of_sizes(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    sizes = Model(tmp_path.name, 4096, 14336, 32, 8, 128, layers=32)
    assert find_model(str(file)) == find_model(str(tmp_path)) == sizes
    file.write_text(json.dumps({"text_config": LLAMA | {"head_dim": None}}))
    assert find_model(str(file)) == sizes
    file.write_text(json.dumps(QWEN))
    assert find_model(str(file)) == Model(tmp_path.name, 4096, 768, 32, 8, 128, 128, 8, 32)
    seed = LLAMA | {"model_type": "seed_oss", "num_attention_heads": 80, "head_dim": 128}
    file.write_text(json.dumps(seed))
    assert find_model(str(file)) == Model(tmp_path.name, 4096, 14336, 80, 8, 128, layers=32)
    mixtral = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}
    file.write_text(json.dumps(mixtral))
    assert find_model(str(file)) == Model(tmp_path.name, 4096, 14336, 32, 8, 128, 8, 2, 32)
    text = "hidden=4096, heads=32, kv_heads=8, inner=14336, layers=32"
    assert find_model(text) == Model(text, 4096, 14336, 32, 8, 128, layers=32)
    assert find_model("tables=4,width=8") == EmbeddingModel("tables=4,width=8", 4, 8)


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_configurations(tmp_path: Path, case: str) -> None:
    """The sizes are N x K on one rank, and of a layer's experts."""
    ranks, configuration, expected = PUBLISHED[case]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(configuration))
    common = ("--model", file, "--tensor", ranks)
    written = document(tmp_path, *common, "--tokens", 8)
    (step,) = written["steps"]
    found = {
        each["part"]: (each["layers"], each["sizes"].removeprefix("8x")) for each in step["calls"]
    }
    assert found == expected
    counts = dict.fromkeys((True, False), 0.0)
    for each in step["calls"]:
        counts[True] += each["layers"] * each["pair_us"]
        counts[False] += each["layers"] * each["auto_us"]
        normed = each["part"] in ("output", "down")
        assert (each["operator"] == "gemm_all_reduce_norm") == normed
    assert step["layer_us"] == [pytest.approx(us / step["layers"]) for us in counts.values()]
    assert 0 < step["share"] < 1


def test_layers_that_differ_are_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    done = explain("--model", tmp_path, "--tensor", 8, "--tokens", 8)
    rows = [line.split()[:4] for line in done.output.splitlines()]
    assert ["attention", "61", "not", "counted"] in rows
    assert ["down", "3", "gemm_all_reduce_norm", "8x7168x2304"] in rows
    assert ["experts", "58", "mixture_of_experts", "1"] in rows
    assert "mean layer" in done.output
    assert "the product that makes keys and values of compressed ones" in done.output
    same = explain("--model", "gemma-2-9b", "--tokens", 8).output
    assert "mean layer" not in same
    assert "residuals behind norms, with the norms that follow them" in same
    wide = explain("--model", "olmo-2-13b", "--tokens", 8).output
    assert "what ranks exchange for norms of queries and keys" in wide


def test_the_page_lists_the_configurations_that_are_taken() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tensor-parallel.md").read_text(encoding="utf-8")
    rows = page.split("| layers | `model_type` |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(_FAMILIES)


def test_compressed_keys_cannot_be_gathered() -> None:
    done = explain("--model", "deepseek-v3", "--tokens", 8, "--sequence-parallel")
    assert done.exit_code == 1
    assert "--model must have attention whose first product ranks share out" in done.output


def test_keys_that_a_family_does_not_read(tmp_path: Path) -> None:
    """Experts of a model without any, and their width of a model whose experts have another key."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA_2_9B | {"num_experts": 1, "moe_topk": 1}))
    dense = find_model(str(file))
    assert isinstance(dense, Model)
    assert (dense.experts, dense.layers) == (0, 42)
    file.write_text(json.dumps(GPT_OSS_120B | {"moe_intermediate_size": 100}))
    experts = find_model(str(file))
    assert isinstance(experts, Model)
    assert experts.intermediate == 2880


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LLAMA | {"hidden_size": None}, "config.json: hidden_size must be a whole number from 1 to "
         "1048576; got none."),
        (LLAMA | {"hidden_size": 10**400}, "hidden_size must be a whole number from 1 to 1048576"),
        (LLAMA | {"num_hidden_layers": -1}, "num_hidden_layers must be a whole number"),
        (LLAMA | {"intermediate_size": "14336"}, "intermediate_size must be a whole number"),
        (LLAMA | {"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        (LLAMA | {"num_attention_heads": 33}, "hidden_size must be a multiple of num_attention"),
        (QWEN | {"num_experts_per_tok": None}, "num_experts_per_tok must be a whole number"),
        (QWEN | {"num_experts": None}, "num_experts or num_local_experts or n_routed_experts or "
         "moe_num_experts must be there, as qwen3_moe has"),
        (LLAMA | {"model_type": "mistral", "num_key_value_heads": None},
         "num_key_value_heads must be there, as mistral has a default of its own; got none."),
        (LLAMA | {"model_type": "smollm3", "num_key_value_heads": None},
         "num_key_value_heads must be there, as smollm3 has a default"),
        (LLAMA | {"model_type": "ernie4_5"}, "head_dim must be there, as ernie4_5 has a default"),
        (QWEN | {"mlp_only_layers": [0]}, "mlp_only_layers must be absent, 0 or empty; got [0]"),
        (QWEN | {"decoder_sparse_step": 2}, "decoder_sparse_step must be 1"),
        (LLAMA | {"model_type": "falcon"},
         "starcoder2, whose layers can be described; got 'falcon'."),
        (LLAMA | {"model_type": ["llama"]}, "whose layers can be described; got ['llama']."),
        (LLAMA | {"kv_lora_rank": 512}, "kv_lora_rank must be absent"),
        (LLAMA | {"model_type": "stablelm", "use_parallel_residual": True},
         "use_parallel_residual must be absent, 0 or empty; got True."),
        ({key: value for key, value in DEEPSEEK_V3.items() if key != "q_lora_rank"},
         "q_lora_rank must be there, as deepseek_v3 has a default"),
        (DEEPSEEK_V3 | {"v_head_dim": None}, "v_head_dim must be there"),
        (DEEPSEEK_V3 | {"q_lora_rank": -1}, "q_lora_rank must be a whole number from 1 to"),
        (DEEPSEEK_V3 | {"kv_lora_rank": 0}, "kv_lora_rank must be a whole number"),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": "64"}, "qk_rope_head_dim must be a whole number"),
        (DEEPSEEK_V3 | {"first_k_dense_replace": 61},
         "first_k_dense_replace must be a whole number from 0 to 60; got 61."),
        (DEEPSEEK_V3 | {"intermediate_size": None}, "intermediate_size must be a whole number"),
        (DEEPSEEK_V3 | {"moe_intermediate_size": None}, "moe_intermediate_size must be a whole"),
        (DEEPSEEK_V3 | {"n_shared_experts": 1.5}, "n_shared_experts must be a whole number from 0"),
        (DEEPSEEK_V3 | {"moe_layer_freq": [0, 1]}, "moe_layer_freq must be 1, experts in each"),
        (ERNIE_21B | {"moe_layer_end_index": 20}, "must be -1 or that of the last layer, 27; got"),
        (LLAMA_4_MAVERICK | {"interleave_moe_layer_step": 0},
         "interleave_moe_layer_step must be a whole number from 1 to 48; got 0."),
        (LLAMA_4_MAVERICK | {"moe_layers": [48]},
         "moe_layers must be a list of numbers from 0 to 47; got [48]."),
        (LLAMA_4_MAVERICK | {"moe_layers": "all"}, "moe_layers must be a list of numbers"),
        (GEMMA_2_9B | {"head_dim": None}, "head_dim must be there, as gemma2 has a default"),
        ([], "got no JSON object"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    done = explain("--model", file)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama3-70b"], "OLMo-2-13B, Granite-3-8B, DLRM-Criteo; got 'lama3-70b'. Did "
         "you mean Llama-3-70B? Or give a config.json"),
        (["--model", "mixtral"], "one of Mixtral-8x7B, Mixtral-8x22B; got 'mixtral'. That is"),
        (["--model", "DeepSeek-V4"], "--model must be one of"),
        (["--model", "DeepSeek-V2-Lite", "--tensor", "5"], "divide the 16 heads of DeepSeek-V2"),
        (["--model", "absent.json"], "absent.json must be a config.json of transformers"),
        (["--model", "hidden=8,head=2"], "got 'head'. Did you mean heads?"),
        (["--model", "hidden=4096,heads=x,inner=1,layers=1"], "heads must be a whole number"),
        (["--model", "hidden=4096,heads=6,inner=8,layers=1"], "hidden must be a multiple of heads"),
        (["--model", "hidden=60,heads=12,kv_heads=6,inner=64,layers=1"],
         "--tensor must divide the 6 heads of keys and values of"),
        (["--model", "hidden=64,heads=8,kv_heads=16,inner=64,layers=1"],
         "heads must be a multiple of kv_heads, whose heads they share; got 8 and 16."),
        (["--model", "hidden=64,heads=8,inner=64,layers=1,experts=8,top_k=9"],
         "top_k must be at most experts; got 9 and 8."),
        (["--model", "hidden=64,hidden=8,heads=8,inner=64,layers=1"], "a size must be given once"),
        (["--model", "hidden=64,heads=8,inner=66,layers=1"], "divide the 66 inner columns of"),
        (["--model", "tables=26"], "width must be a whole number from 1 to 1048576; got none."),
        (["--model", "qwen2.5-7b", "--tensor", "8"], "divide the 28 heads of Qwen2.5-7B; got 8."),
        (["--model", "mixtral-8x7b", "--tensor", "3"], "must divide the 32 heads of Mixtral-8x7B"),
        (["--model", "llama3-8b", "--tokens", "1,x"], "from 1 to 2^30, 1,8,4096; got '1,x'"),
        (["--model", "llama3-8b", "--tokens", "9" * 5000], "from 1 to 2^30, 1,8,4096; got '999"),
        (["--model", "tables=9" + 5000 * "9" + ",width=8"], "tables must be a whole number from"),
        (["--model", "9" * 5000], "--model must be one of"),
        (["--model", "llama3-8b", "--tokens", "2", "--sequence-parallel"], "multiples of the 4"),
        (["--model", "dlrm", "--sequence-parallel"], "must be of a transformer"),
        (["--model", "llama3-8b", "--gpu", "b2000"], "got 'b2000'. Did you mean NVIDIA B200?"),
        (["--model", "llama3-8b", "--nodes", "2"], "must come without an operator, --nodes and"),
        (["gemm_all_reduce", "8x8x8", "--model", "llama3-8b"], "must come without an operator"),
        (["gemm_all_reduce"], "explain must have an operator and shapes"),
        (["gemm_all_redce", "8x8x8"], "gemv_all_reduce; got 'gemm_all_redce'. Did you mean "
         "gemm_all_reduce? Experts and embeddings"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments: list[str], message: str) -> None:
    done = explain(*arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())


def test_one_rank_has_nothing_to_exchange() -> None:
    done = explain("--model", "llama3-8b", "--tensor", 1)
    assert done.exit_code == 2
    assert "greater than or equal to 2" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("preset", "name"),
    [("transformer/llama3-70b", "Llama-3-70B"), ("moe/mixtral-8x7b", "Mixtral-8x7B")],
)
def test_the_simulator_has_the_same_sizes(preset: str, name: str) -> None:
    """Its presets give each number a source, and are files of their own."""
    text = importlib.resources.files("interlace_sim").joinpath(f"presets/{preset}.yaml").read_text()
    values = {
        key: entry["value"]
        for key, entry in yaml.safe_load(text).items()
        if isinstance(entry, dict)
    }
    model = find_model(name)
    assert isinstance(model, Model)
    inner = values["expert_ffn"] if model.experts else values["ffn"]
    sizes = (values["hidden"], inner, values["heads"], values["key_value_heads"], values["layers"])
    assert sizes == (model.hidden, model.intermediate, model.heads, model.kv_heads, model.layers)
    assert values.get("experts", 0) == model.experts


def test_a_model_that_is_not_explained_is_refused() -> None:
    with pytest.raises(ArgumentError, match="--model must be one of"):
        find_model("gpt-3-175b")
