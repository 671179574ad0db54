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
the same lengths once more, and ``later`` as many further ones. The tokens that are chosen at
temperature 0 must be equal in both ways. With ``--timeline`` the first engine of each way ends with
a profile of what the GPU of the first rank does in decoding steps and in prefills.
``--expert-parallel`` shares out the experts of a model that has some.

``--host`` measures something else: an engine captures no more than 8 tokens, so that prefills are
eager as in a server whose prompts exceed its graphs. One engine of each way runs at a time, and
they take turns with each prefill, as hosts differ from minute to minute; each repeat starts both
anew. Milliseconds by number of tokens, of the whole and of the slowest worker's host, and what
Python does in the first worker in five short prefills, by function: calls, milliseconds of its own,
and with what it calls. A profile lengthens all of it by about a half.

    python benchmarks/vllm_engine.py --json FILE --checks all [--layers 4] [--at-once 2]

measures nothing: for each of ``CHECKS`` one engine of each way generates from the same prompts at
temperature 0. Weights are drawn anew after the engine has started, as those that vLLM draws make
all logits nearly equal. The logprobs of the first token must agree to ``LOGPROB_TOLERANCE``, and
tokens must be equal up to the first one for which the best two logprobs are nearly equal; with
experts, for most prompts (``ROUTED_OTHERWISE``). In float8 a third engine, vLLM's own without its
compiler, says how far two right engines may be apart: logprobs with Interlace must not differ from
those without by more than ``OWN_DIFFERENCES`` times as much. The results have the counts of a
worker, too: what was fused, and what was left alone and why. A check
that fails does not end the others.

Ranks share a GPU where there are fewer GPUs than ranks, which are at least two in each stage of a
pipeline: what is generated can be compared so, and milliseconds of the host, but not of the whole.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import gzip
import json
import os
import pstats
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import documents
from engines import (
    MODELS,
    PROMPTS,
    SEQUENCES,
    VOCABULARY,
    WAYS,
    Generate,
    in_turns,
    require_equal_tokens,
    save_config,
    spread,
    step_times,
)

CHECKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix caching": {"enable_prefix_caching": True},
    "chunked prefill": {"enable_chunked_prefill": True, "max_num_batched_tokens": 256},
    "mixed batches": {"max_num_seqs": 4, "max_num_batched_tokens": 512},
    "LoRA": {"enable_lora": True, "max_lora_rank": 16},
    "speculative decoding": {"speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }},
    "pipeline parallel": {"pipeline_parallel_size": 2},
    "batch invariant": {},
    "FP8": {"quantization": "fp8"},
    "FP8 blocks": {},
    "experts": {},
    "expert parallel": {"enable_expert_parallel": True},
    "expert parallel, Mixtral": {"enable_expert_parallel": True},
}  # fmt: skip
"""What the engines of each check are given beside the options of all."""

OTHER_MODELS = {
    "FP8 blocks": "llama-70b-fp8", "experts": "qwen3-30b-a3b", "expert parallel": "qwen3-30b-a3b",
    "expert parallel, Mixtral": "mixtral-8x7b",
}  # fmt: skip
"""The model of a check, where it is not that of ``--model``."""

LOGPROB_TOLERANCE = 2 * 2**-5 + 2**-10
"""The largest difference of two logprobs: two units in the last place of a logit in bfloat16.

The best of 32000 logits are between 4 and 8, where bfloat16 has steps of 2^-5. Sums over ranks are
rounded at other places in both ways, so logits may be one step apart, and so may what they are
compared with. What is subtracted from all of them is a mean over 32000, which moves far less.
"""

ROUTED_OTHERWISE = 1 / 4
"""The share of prompts that may be further apart where tokens are routed to experts.

A token whose second and third best experts are nearly equal may take the other one in one of both
engines, and goes on with other numbers, however small the difference was that decided: of twelve
first tokens behind four layers with two of eight experts, one. Each further token may be one, too.
"""

OWN_DIFFERENCES = 2
"""How many times as far as two engines of vLLM's own another one may be from them in float8.

Where a sum is rounded to the next number of bfloat16, an activation may be rounded to the next of
float8, 16 times as far, so no number of steps bounds what follows. Compiled and not, vLLM rounds
the steps of a norm in two ways. Both differences are the largest of as many draws, and twice one
of them is beyond what chance makes of the other.
"""

EAGER = "without, not compiled"
"""The way of the third engine."""

TOP = 5
"""Logprobs per token that are compared."""

NEW_PROMPTS = 12
HOST_PROMPTS = (300, 600, 800, 1000, 1400, 2000, 4096)
HOST_WARM_UPS, HOST_TURNS = 5, 15

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
    parser.add_argument("--host", action="store_true", help="Measure eager prefills and the host.")
    parser.add_argument("--expert-parallel", action="store_true", help="Share out experts.")
    parser.add_argument("--checks", help="Names of checks, separated by semicolons, or all.")
    parser.add_argument("--at-once", type=int, default=1, help="Engines of checks at a time.")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine and options.checks:
        found = generated(options.model, options.layers, options.checks, is_eager=options.eager)
        options.json.write_text(json.dumps(found))
        return
    if options.checks:
        check_all(options)
        return
    if options.engine and options.host:
        serve_prefills(options.model, options.layers, expert_parallel=options.expert_parallel)
        return
    if options.engine:
        found = measured(
            options.model, options.layers, is_profiled=options.timeline,
            only_start=options.only_start, expert_parallel=options.expert_parallel,
        )  # fmt: skip
        options.json.write_text(json.dumps(found))
        return
    if options.host:
        measure_hosts(options)
        return
    import torch

    if torch.cuda.device_count() < 2:
        parser.error("engines are timed on two GPUs or more; on one there are --host and --checks")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as compiled:
        for repeat, way in in_turns(WAYS, options.repeats):
            is_profiled = options.timeline and repeat == 0
            found = run(way, options, compiled, is_profiled=is_profiled)
            results.append({"way": way, "repeat": repeat, **found})
            print(results[-1], flush=True)
            documents.write(options.json, results, model=options.model, layers=options.layers)
    if not options.only_start:
        require_equal_tokens(results)


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
        command += ["--expert-parallel"] * options.expert_parallel
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        found: dict[str, Any] = json.loads(file.read_text())
    log = done.stdout + done.stderr
    return {**found, "capture_s": max(map(int, re.findall(r"capturing finished in (\d+)", log)))}


def check_all(options: argparse.Namespace) -> None:
    """Run the checks that were asked for, and write and print what agrees."""
    names = list(CHECKS) if options.checks == "all" else options.checks.split(";")
    results: list[dict[str, Any]] = []
    engines = [(name, way) for name in names for way in (*WAYS, *[EAGER] * ("FP8" in name))]
    with ThreadPoolExecutor(options.at_once) as pool:
        outcomes = pool.map(lambda each: run_check(*each, options), engines)
        found = dict(zip(engines, outcomes, strict=True))
    for name in names:
        without, with_ = found[name, "without"], found[name, "with"]
        engines_of_check = [found[each] for each in engines if each[0] == name]
        errors = [each["error"] for each in engines_of_check if "error" in each]
        result = {"check": name, "errors": errors}
        if not errors:
            tolerance = LOGPROB_TOLERANCE
            if "FP8" in name:
                own = agreement(without["outputs"], found[name, EAGER]["outputs"])
                result["own_difference"] = own["largest_difference_of_logprobs"]
                tolerance = max(tolerance, OWN_DIFFERENCES * result["own_difference"])
            of_experts = name.startswith("expert")
            result |= agreement(
                without["outputs"], with_["outputs"], tolerance, of_experts=of_experts
            )
            result["counts"] = with_["counts"]
        results.append(result)
        print(result, flush=True)
        documents.write(options.json, results, model=options.model, layers=options.layers)


def run_check(name: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start an engine of a check, and return what it has generated, or its error."""
    environment = {
        **os.environ, "VLLM_PLUGINS": "interlace", "INTERLACE_VLLM": WAYS.get(way, "0"),
        # Graphs from the cache would not be counted, and a function is sent to the workers.
        "VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }  # fmt: skip
    if name == "batch invariant":
        environment["VLLM_BATCH_INVARIANT"] = "1"
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "engine.json"
        command = [sys.executable, __file__, "--engine", "--json", str(file), "--checks", name]
        command += ["--model", OTHER_MODELS.get(name, options.model)]
        command += ["--layers", str(options.layers)] + ["--eager"] * (way == EAGER)
        environment["VLLM_CACHE_ROOT"] = environment["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=180
            )
        except subprocess.TimeoutExpired:
            return {"error": f"{way}: it did not end"}
        print(f"{name}, {way}: {time.perf_counter() - begin:.0f} s", flush=True)
        if done.returncode:
            return {"error": f"{way}: {(done.stdout + done.stderr)[-3000:]}"}
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def agreement(
    without: list[Any],
    with_: list[Any],
    tolerance: float = LOGPROB_TOLERANCE,
    *,
    of_experts: bool = False,
) -> dict[str, Any]:
    """Return how far two engines agree.

    Args:
        without, with_: For each prompt a list of steps, and for each step the chosen token and its
            ``TOP`` best logprobs, as pairs of token and logprob from the best on.
        tolerance: The largest difference of two logprobs.
        of_experts: Whether tokens are routed, of which :data:`ROUTED_OTHERWISE` says what to
            expect. No more than the first tokens are compared then.

    Returns:
        The largest difference between logprobs of first tokens, for tokens that both engines have
        among their best; how far the best two were apart at most where another token was chosen;
        how many prompts got the same tokens, and how many agree, of how many; and whether enough
        of them do. A prompt agrees if its first logprobs do, and tokens up to the first near tie:
        two logprobs that are off by ``tolerance`` each, in opposite directions.
    """
    differences, gaps, same = [], [], 0
    for ours, theirs in zip(with_, without, strict=True):
        first, expected = dict(ours[0][1]), dict(theirs[0][1])
        common = first.keys() & expected
        differences.append(max((abs(first[each] - expected[each]) for each in common), default=0.0))
        chosen = ((step[0], other[0]) for step, other in zip(ours, theirs, strict=True))
        other = next((step for step, tokens in enumerate(chosen) if len(set(tokens)) > 1), None)
        same += other is None
        # Behind another token, the engines continue different texts.
        is_compared = other == 0 or (other is not None and not of_experts)
        best = theirs[other][1] if is_compared else [(0, 0.0), (0, 0.0)]
        gaps.append(best[0][1] - best[1][1])
    agreeing = sum(
        difference <= tolerance and gap <= 2 * tolerance
        for difference, gap in zip(differences, gaps, strict=True)
    )
    least = (1 - ROUTED_OTHERWISE * of_experts) * len(without)
    return {
        "largest_difference_of_logprobs": round(max(differences), 4),
        "largest_gap_at_other_tokens": round(max(gaps), 4),
        "prompts_with_equal_tokens": [same, len(without)],
        "prompts_that_agree": [agreeing, len(without)],
        "agrees": agreeing >= least,
    }


def generated(model: str, layers: int, check: str, *, is_eager: bool) -> dict[str, Any]:
    """Return what an engine of a check generates from ``prompts_of``, and a worker's counts.

    Args:
        is_eager: Whether the model is neither compiled nor captured.
    """
    from vllm import SamplingParams

    arguments: dict[str, Any] = {
        "max_num_seqs": 16, "max_num_batched_tokens": 2048, "enable_prefix_caching": False,
        **CHECKS[check],
    }  # fmt: skip
    folder, engine = make_engine(
        model, layers, max_model_len=2048, gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=2**32, enforce_eager=is_eager,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}, **arguments,
    )  # fmt: skip
    engine.collective_rpc(draw_weights)
    request = {}
    if check == "LoRA":
        from vllm.lora.request import LoRARequest

        save_adapter(folder / "adapter", model, layers)
        request = {"lora_request": LoRARequest("adapter", 1, str(folder / "adapter"))}
    sampling = SamplingParams(
        max_tokens=16, temperature=0, ignore_eos=True, detokenize=False, logprobs=TOP
    )
    outputs = []
    # The second time, a cache of prefixes has them.
    for _ in range(2 if check == "prefix caching" else 1):
        prompts = [{"prompt_token_ids": tokens} for tokens in prompts_of(check)]
        for output in engine.generate(prompts, sampling, use_tqdm=False, **request):
            (completion,) = output.outputs
            steps = []
            for token, best in zip(completion.token_ids, completion.logprobs, strict=True):
                pairs = sorted(((each.logprob, key) for key, each in best.items()), reverse=True)
                steps.append([token, [[key, logprob] for logprob, key in pairs[:TOP]]])
            outputs.append(steps)
    return {"outputs": outputs, "counts": engine.collective_rpc(counts_of_worker)[0]}


def prompts_of(check: str) -> list[list[int]]:
    """Return the tokens of a check's prompts: of several lengths, of which some share a prefix."""
    numbers = random.Random(3)

    def drawn(count: int) -> list[int]:
        return [numbers.randrange(10, VOCABULARY) for _ in range(count)]

    prefix = drawn(640)
    prompts = [drawn(count) for count in (5, 17, 64, 200, 300, 900, 1500)]
    prompts += [prefix + drawn(count) for count in (3, 40, 200)]
    # Proposals from the prompt need texts that repeat themselves.
    prompts += [drawn(12) * 20 for _ in range(2)]
    return prompts * 2 if check == "mixed batches" else prompts


def draw_weights(worker: Any) -> None:
    """Draw the weights of a worker's model as a new model has them; vLLM sends this to workers."""
    import torch

    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for index, (name, weight) in enumerate(worker.model_runner.model.named_parameters()):
            if name.endswith(("weight_scale", "weight_scale_inv")):
                weight.fill_(2**-6)  # a power of two, which every kernel takes
                continue
            if weight.dtype not in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
                continue
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            # A router is the same on all ranks; all other matrices are sharded.
            seed = index if name.endswith(".gate.weight") else index + 1000 * (rank + 1)
            generator = torch.Generator(weight.device).manual_seed(seed)
            if weight.dtype == torch.float8_e4m3fn:
                drawn = torch.empty_like(weight, dtype=torch.bfloat16)
                weight.copy_(drawn.normal_(generator=generator))
            else:
                weight.normal_(0, 0.02, generator=generator)


def counts_of_worker(worker: Any) -> dict[str, Any]:
    """Return what Interlace has fused and left alone in a worker's graphs."""
    import interlace

    counts = interlace.counts()["vllm"]
    left = {f"{operator}: {reason}": count for (operator, reason), count in counts.left.items()}
    return {"fused": dict(counts.taken), "left_alone": left}


def save_adapter(folder: Path, model: str, layers: int) -> None:
    """Write a LoRA adapter of rank 8 for the row-parallel layers of a dense model."""
    import torch
    from safetensors.torch import save_file

    sizes = MODELS[model][2]
    heads = sizes["num_attention_heads"]
    width = sizes.get("head_dim", sizes["hidden_size"] // heads) * heads
    inner = {"self_attn.o_proj": width, "mlp.down_proj": sizes["intermediate_size"]}
    generator, tensors = torch.Generator().manual_seed(5), {}
    for layer in range(layers):
        for name, columns in inner.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("A", (8, columns)), ("B", (sizes["hidden_size"], 8))):
                drawn = 0.05 * torch.randn(shape, generator=generator)
                tensors[f"{prefix}.lora_{part}.weight"] = drawn.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none",
        "target_modules": [name.split(".")[1] for name in inner],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(described))


def measured(
    model: str,
    layers: int,
    *,
    is_profiled: bool,
    only_start: bool,
    expert_parallel: bool,
) -> dict[str, Any]:
    """Return the times of one engine in this process and its workers, and its timelines."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = {
            "profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False,
        }  # fmt: skip
        begin = time.perf_counter()
        _, engine = make_engine(
            model, layers, max_model_len=4608,
            gpu_memory_utilization=0.7, max_num_seqs=max(SEQUENCES),
            max_num_batched_tokens=max(PROMPTS), enable_prefix_caching=False,
            enable_expert_parallel=expert_parallel,
            **({"profiler_config": profiler} if is_profiled else {}),
        )  # fmt: skip
        start_s = time.perf_counter() - begin
        if only_start:
            return {"start_s": start_s}
        numbers = random.Random(1)
        generate = generator(engine, numbers)
        result: dict[str, Any] = {"start_s": start_s, **step_times(generate)}
        new, later = ([numbers.randrange(300, 4000) for _ in range(NEW_PROMPTS)] for _ in range(2))
        for name, lengths in (("new", new), ("again", new), ("later", later)):
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


def make_engine(model: str, layers: int, **arguments: Any) -> tuple[Path, Any]:
    """Return the folder of a model's sizes, by which vLLM knows it, and its engine: tensor parallel
    over all GPUs in each stage of a pipeline, and over at least two ranks.
    """
    import torch
    from vllm import LLM

    gpus, stages = torch.cuda.device_count(), arguments.get("pipeline_parallel_size", 1)
    ranks = max(gpus // stages, 2)
    options = {
        "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0,
        "tensor_parallel_size": ranks, **arguments,
    }  # fmt: skip
    if ranks * stages > gpus:
        # What vLLM has of its own for peers' memory takes each rank to have a GPU.
        os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
        options |= {
            "distributed_executor_backend": "mp", "disable_custom_all_reduce": True,
            "worker_extension_cls": "shared_gpu.SharedGPU",
            "gpu_memory_utilization": options["gpu_memory_utilization"] * gpus / (ranks * stages),
        }  # fmt: skip
    folder = save_config(Path(os.environ["VLLM_CACHE_ROOT"]), model, layers)
    return folder, LLM(model=str(folder), **options)


def generator(engine: Any, numbers: random.Random) -> Generate:
    """Return what generates from random prompts with an engine."""
    from vllm import SamplingParams

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

    return generate


def measure_hosts(options: argparse.Namespace) -> None:
    """Let an engine of each way take turns with eager prefills, and write what they took."""
    results: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        with contextlib.ExitStack() as stack:
            ask = {way: stack.enter_context(host_engine(way, options)) for way in WAYS}
            times: dict[str, dict[str, dict[int, Any]]] = {
                way: {"prefill_ms": {}, "host_ms": {}} for way in WAYS
            }
            for tokens in HOST_PROMPTS:
                turns = [
                    {way: ask[way](tokens) for way in WAYS}
                    for _ in range(HOST_WARM_UPS + HOST_TURNS)
                ]
                for way in WAYS:
                    taken = zip(*(turn[way] for turn in turns[HOST_WARM_UPS:]), strict=True)
                    for name, samples in zip(times[way], taken, strict=True):
                        times[way][name][tokens] = spread(list(samples))
            for way in WAYS:
                profile = ask[way](None)
                results.append({"way": way, "repeat": repeat, **times[way], "host": profile})
                print(way, times[way], flush=True)
        documents.write(options.json, results, model=options.model, layers=options.layers)


@contextlib.contextmanager
def host_engine(way: str, options: argparse.Namespace) -> Iterator[Callable[[int | None], Any]]:
    """Start an engine whose prefills are eager; give what asks :func:`serve_prefills` there."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "VLLM_PLUGINS": "interlace", "INTERLACE_VLLM": WAYS[way],
            # Functions are sent to the workers.
            "VLLM_CACHE_ROOT": folder, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        }  # fmt: skip
        command = [sys.executable, __file__, "--engine", "--host", "--json", os.devnull]
        command += ["--model", options.model, "--layers", str(options.layers)]
        command += ["--expert-parallel"] * options.expert_parallel
        log = Path(folder) / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, env=environment, text=True, stderr=errors,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            ) as engine,
        ):  # fmt: skip

            def ask(question: int | None) -> Any:
                assert engine.stdin is not None
                assert engine.stdout is not None
                print(json.dumps(question), file=engine.stdin, flush=True)
                answer = engine.stdout.readline()
                if not answer:
                    raise SystemExit(log.read_text()[-8000:])
                return json.loads(answer)

            try:
                yield ask
            finally:
                assert engine.stdin is not None
                engine.stdin.close()  # it ends by itself, and its workers with it
                try:
                    engine.wait(60)
                except subprocess.TimeoutExpired:
                    engine.kill()


def serve_prefills(model: str, layers: int, *, expert_parallel: bool) -> None:
    """Be an engine that reads numbers of tokens, a line each, and answers with the milliseconds of
    a prefill and those of its slowest worker's host; to ``null`` with what the first worker's host
    does in short ones.
    """
    # What the engine writes to its output is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _, engine = make_engine(
        model, layers, max_model_len=max(HOST_PROMPTS) + 8,
        gpu_memory_utilization=0.4, kv_cache_memory_bytes=2**32, max_num_seqs=8,
        max_num_batched_tokens=max(HOST_PROMPTS), enable_prefix_caching=False,
        enable_expert_parallel=expert_parallel,
        compilation_config={"cudagraph_capture_sizes": [1, 8]},
    )  # fmt: skip
    generate = generator(engine, random.Random(1))
    engine.collective_rpc(time_host)
    for line in sys.stdin:
        tokens = json.loads(line)
        answer = (
            host_profile(engine, generate)
            if tokens is None
            else [1e3 * generate(1, tokens, 1)[0], max(engine.collective_rpc(host_ms))]
        )
        print(json.dumps(answer), file=answers, flush=True)


def time_host(worker: Any) -> None:
    """Time a worker's steps from here on; vLLM sends this to workers."""
    execute = worker.model_runner.execute_model

    def execute_model(*args: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        output = execute(*args, **named)
        worker.host_ms += 1e3 * (time.perf_counter() - begin)
        return output

    worker.host_ms, worker.model_runner.execute_model = 0.0, execute_model


def host_ms(worker: Any) -> float:
    """Return the milliseconds of the host in a worker's steps since the last question."""
    found, worker.host_ms = worker.host_ms, 0.0
    return float(found)


def host_profile(engine: Any, generate: Generate) -> list[list[Any]]:
    """Return what the first worker's host does in five short prefills."""
    engine.collective_rpc(start_of_profile)
    for _ in range(5):
        generate(1, HOST_PROMPTS[0], 1)
    profile: list[list[Any]] = engine.collective_rpc(end_of_profile)[0]
    return profile


def start_of_profile(worker: Any) -> None:
    """Profile Python in a worker from here on; vLLM sends this to workers."""
    worker.profile_of_host = cProfile.Profile()
    worker.profile_of_host.enable()


def end_of_profile(worker: Any) -> list[list[Any]]:
    """Return the functions that have taken a worker most of the time since
    :func:`start_of_profile`, each with its calls, milliseconds of its own, and of all that it
    calls.
    """
    worker.profile_of_host.disable()
    entries = pstats.Stats(worker.profile_of_host).stats.items()  # type: ignore[attr-defined]
    functions = [
        [f"{'/'.join(Path(file).parts[-3:])}:{line} {name}", calls, 1e3 * own, 1e3 * total]
        for (file, line, name), (_, calls, own, total, _) in entries
    ]
    functions.sort(key=lambda each: each[3], reverse=True)
    return [
        [name, calls, round(own, 2), round(all_, 2)] for name, calls, own, all_ in functions[:60]
    ]


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


if __name__ == "__main__":
    main()
