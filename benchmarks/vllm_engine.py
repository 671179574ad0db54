"""vLLM's own engine with and without Interlace: a decoding step, prefills, and its start.

    python benchmarks/vllm_engine.py --json FILE [--model llama-70b] [--layers 24] [--repeats 3]

An engine is a process of its own, tensor parallel over the GPUs that are visible, with random
weights, its CUDA graphs, and no prefix caching; with and without Interlace take turns, by
``INTERLACE_VLLM`` alone. All share one folder of vLLM's compiled graphs, which the first engine of
each way finds empty. Under a few thousand microseconds a step is mostly the engine's host, which
differs from process to process: ask for more layers, and read the spread between repeats before a
difference.

Times are microseconds per decoding step (what 96 more tokens take, divided by 96) and milliseconds
per prefill of one sequence. ``new`` are prefills of lengths that the engine has not seen, ``again``
the same lengths once more. The tokens that are chosen at temperature 0 must be equal in both ways.
With ``--timeline`` the first engine of each way ends with a profile of what the GPU of the first
rank does in decoding steps and in prefills.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import documents

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-70b": ("LlamaConfig", "LlamaForCausalLM", {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }),
    "qwen3-8b": ("Qwen3Config", "Qwen3ForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128,
    }),
}  # fmt: skip
"""The configuration's class, the model's, and sizes, by name."""

VOCABULARY = 32000
SEQUENCES = (1, 8, 32, 128)
PROMPTS = (200, 1000, 2000, 4096)
NEW_PROMPTS = 12
WAYS = {"without": "0", "with": "1"}
"""``INTERLACE_VLLM`` of each way."""

PROFILED = {
    "decode 1": (1, 16, 16), "decode 32": (32, 16, 16), "prefill 200": (1, 200, 1),
    "prefill 1000": (1, 1000, 1),
}  # fmt: skip
"""Sequences, tokens of a prompt and new tokens of what a timeline shows, by name."""


def main() -> None:
    """Start the engines one after another, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="Where results go.")
    parser.add_argument("--model", choices=MODELS, default="llama-70b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only-start", action="store_true", help="Measure no more than starts.")
    parser.add_argument("--timeline", action="store_true", help="Profile the first engines.")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        found = measured(
            options.model, options.layers, is_profiled=options.timeline,
            only_start=options.only_start,
        )  # fmt: skip
        options.json.write_text(json.dumps(found))
        return
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as compiled:
        for repeat in range(options.repeats):
            for way in WAYS if repeat % 2 == 0 else reversed(WAYS):
                is_profiled = options.timeline and repeat == 0
                found = run(way, options, compiled, is_profiled=is_profiled)
                results.append({"way": way, "repeat": repeat, **found})
                print(results[-1], flush=True)
                documents.write(options.json, results, model=options.model, layers=options.layers)
    tokens = {json.dumps(entry.get("tokens")) for entry in results}
    assert len(tokens) == 1, "the engines have chosen different tokens"


def run(
    way: str, options: argparse.Namespace, compiled: str, *, is_profiled: bool
) -> dict[str, Any]:
    """Start an engine, whose compiled graphs are kept in ``compiled``, and return what it has
    measured.
    """
    environment = {
        **os.environ, "VLLM_PLUGINS": "interlace", "INTERLACE_VLLM": WAYS[way],
        "VLLM_CACHE_ROOT": compiled,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "engine.json"
        command = [sys.executable, __file__, "--engine", "--json", str(file)]
        command += ["--model", options.model, "--layers", str(options.layers)]
        command += ["--timeline"] * is_profiled + ["--only-start"] * options.only_start
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        found: dict[str, Any] = json.loads(file.read_text())
    log = done.stdout + done.stderr
    return {**found, "capture_s": max(map(int, re.findall(r"capturing finished in (\d+)", log)))}


def measured(model: str, layers: int, *, is_profiled: bool, only_start: bool) -> dict[str, Any]:
    """Return the times of one engine in this process and its workers, and its timelines."""
    import torch
    import transformers
    from vllm import LLM, SamplingParams

    config_class, architecture, sizes = MODELS[model]
    # vLLM knows a model by its folder.
    known = Path(os.environ["VLLM_CACHE_ROOT"]) / f"{model}-{layers}"
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(transformers, config_class)(
            num_hidden_layers=layers, vocab_size=VOCABULARY, max_position_embeddings=8192,
            architectures=[architecture], dtype="bfloat16", **sizes,
        )  # fmt: skip
        config.save_pretrained(known)
        profiler = {
            "profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False,
        }  # fmt: skip
        begin = time.perf_counter()
        engine = LLM(
            model=str(known), load_format="dummy", skip_tokenizer_init=True, seed=0,
            tensor_parallel_size=torch.cuda.device_count(), max_model_len=4608,
            gpu_memory_utilization=0.7, max_num_seqs=max(SEQUENCES),
            max_num_batched_tokens=max(PROMPTS), enable_prefix_caching=False,
            **({"profiler_config": profiler} if is_profiled else {}),
        )  # fmt: skip
        start_s = time.perf_counter() - begin
        if only_start:
            return {"start_s": start_s}
        numbers = random.Random(1)

        def generate(sequences: int, prompt: int, tokens: int) -> tuple[float, list[Any]]:
            prompts = [
                {"prompt_token_ids": [numbers.randrange(10, VOCABULARY) for _ in range(prompt)]}
                for _ in range(sequences)
            ]
            sampling = SamplingParams(
                max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
            )
            begin = time.perf_counter()
            outputs = engine.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
            return seconds, [list(output.outputs[0].token_ids) for output in outputs]

        def step_us(sequences: int) -> float:
            fewer, more = (generate(sequences, 16, tokens)[0] for tokens in (16, 112))
            return (more - fewer) / 96 * 1e6

        result: dict[str, Any] = {"start_s": start_s, "decode_us": {}, "prefill_ms": {}}
        for sequences in SEQUENCES:
            generate(sequences, 16, 24)
            result["decode_us"][sequences] = spread([step_us(sequences) for _ in range(3)])
        for prompt in PROMPTS:
            generate(1, prompt, 1)
            times = [1e3 * generate(1, prompt, 1)[0] for _ in range(9)]
            result["prefill_ms"][prompt] = spread(times)
        lengths = [numbers.randrange(300, 4000) for _ in range(NEW_PROMPTS)]
        for name in ("new", "again"):
            result[f"{name}_ms"] = sum(1e3 * generate(1, each, 1)[0] for each in lengths)
        numbers.seed(7)
        result["tokens"] = generate(4, 16, 8)[1]
        if is_profiled:
            result["timeline"] = {}
            for name, (sequences, prompt, tokens) in PROFILED.items():
                engine.start_profile()
                generate(sequences, prompt, tokens)
                engine.stop_profile()
                result["timeline"][name] = newest_timeline(Path(folder))
        return result


def newest_timeline(folder: Path) -> dict[str, Any]:
    """Return what the first rank's GPU has done, by the newest profile in a folder.

    Times are microseconds: from the first kernel's begin to the last one's end, how long some
    kernel ran, and each kernel's total with its number of launches, the most costly first.
    """
    files = [each for each in folder.rglob("*.json*") if "rank0" in each.name or "tp0" in each.name]
    newest = max(files, key=lambda file: file.stat().st_mtime)
    content = newest.read_bytes()
    if newest.suffix == ".gz":
        content = gzip.decompress(content)
    kernels = sorted(
        (float(event["ts"]), float(event["dur"]), str(event["name"]))
        for event in json.loads(content)["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    busy, end, totals = 0.0, kernels[0][0], collections.Counter[str]()
    launches = collections.Counter[str]()
    for begin, duration, name in kernels:
        busy += max(0.0, begin + duration - max(begin, end))
        end = max(end, begin + duration)
        totals[name[:70]] += round(duration, 1)  # type: ignore[assignment]
        launches[name[:70]] += 1
    return {
        "span_us": round(end - kernels[0][0], 1),
        "busy_us": round(busy, 1),
        "kernels": [[name, us, launches[name]] for name, us in totals.most_common(16)],
    }


def spread(times: list[float]) -> list[float]:
    """Return the median, the least and the most of some times."""
    return [round(each, 2) for each in (statistics.median(times), min(times), max(times))]


if __name__ == "__main__":
    main()
