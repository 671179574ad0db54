"""SGLang's offline engine with and without Interlace: decoding steps, prefills, and its start.

    python benchmarks/sglang_engine.py --json FILE [--model llama-70b] [--layers 24] [--repeats 2]

As ``vllm_engine.py``, whose models it takes: an engine is a process of its own, tensor parallel
over the GPUs that are visible, with random weights, CUDA graphs and no cache of prefixes; with and
without Interlace take turns, by ``INTERLACE_SGLANG`` alone. Attention is by Triton, sampling by
PyTorch, so that no other library of kernels is needed than SGLang's own.

Times are microseconds per decoding step (what 96 more tokens take, divided by 96) and milliseconds
per prefill of one sequence. The tokens that are chosen at temperature 0 must be equal in both ways.
``log`` has the lines of Interlace's log: what was taken over, and what was left alone and why.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import documents
from engines import (
    MODELS,
    PROMPTS,
    SEQUENCES,
    VOCABULARY,
    WAYS,
    in_turns,
    require_equal_tokens,
    save_config,
    step_times,
)


def main() -> None:
    """Start the engines one after another, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="Where results go.")
    parser.add_argument("--model", choices=MODELS, default="llama-70b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        options.json.write_text(json.dumps(measured(options.model, options.layers)))
        return
    results: list[dict[str, Any]] = []
    for repeat, way in in_turns(WAYS, options.repeats):
        results.append({"way": way, "repeat": repeat, **run(way, options)})
        print(results[-1], flush=True)
        documents.write(options.json, results, model=options.model, layers=options.layers)
    require_equal_tokens(results)


def run(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start an engine, and return what it has measured, and what Interlace has logged."""
    environment = {**os.environ, "SGLANG_PLUGINS": "interlace", "INTERLACE_SGLANG": WAYS[way]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "engine.json"
        command = [sys.executable, __file__, "--engine", "--json", str(file)]
        command += ["--model", options.model, "--layers", str(options.layers)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-4000:] + done.stderr[-6000:])
        found: dict[str, Any] = json.loads(file.read_text())
    lines = re.findall(r"interlace: sglang: .*", done.stdout + done.stderr)
    return {**found, "log": list(dict.fromkeys(lines))}


def measured(model: str, layers: int) -> dict[str, Any]:
    """Return the times of one engine in this process and its workers."""
    import sglang
    import torch

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        engine = sglang.Engine(
            model_path=str(save_config(Path(folder), model, layers)), load_format="dummy",
            skip_tokenizer_init=True, random_seed=0, tp_size=torch.cuda.device_count(),
            context_length=4608, mem_fraction_static=0.7, max_running_requests=max(SEQUENCES),
            chunked_prefill_size=max(PROMPTS), disable_radix_cache=True, log_level="info",
            attention_backend="triton", sampling_backend="pytorch",
            cuda_graph_max_bs_decode=max(SEQUENCES), disable_prefill_cuda_graph=True,
        )  # fmt: skip
        result: dict[str, Any] = {"start_s": time.perf_counter() - begin}
        numbers = random.Random(1)

        def generate(sequences: int, prompt: int, tokens: int) -> tuple[float, list[Any]]:
            prompts = [
                [numbers.randrange(10, VOCABULARY) for _ in range(prompt)] for _ in range(sequences)
            ]
            sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            begin = time.perf_counter()
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
            seconds = time.perf_counter() - begin
            return seconds, [output["output_ids"] for output in outputs]

        result |= step_times(generate)
        numbers.seed(7)
        result["tokens"] = generate(4, 16, 8)[1]
        engine.shutdown()
    return result


if __name__ == "__main__":
    main()
