r"""Decode with a Llama of ``transformers`` under tensor parallelism: eager, Inductor, Interlace.

No line of the model mentions Interlace; it is sharded by its own plan, ``tp_plan="auto"``, and its
weights are random, so a model of any size needs no files.

    pip install transformers accelerate
    python examples/huggingface_decode.py

Without arguments it runs a tiny model on two ranks, with GPUs or without, and checks itself: the
logits of a step and the tokens of ``generate`` are those of the eager model. It prints what was
fused. On GPUs, with times:

    python examples/huggingface_decode.py --world-size 2 --size 8b --dtype bfloat16 --times
    torchrun --nproc-per-node 4 examples/huggingface_decode.py --size 70b --dtype bfloat16 --times

For each way it prints the time of one step that is captured whole in a CUDA graph, as serving
programs do, beside the time to read a rank's weights once, below which no step can be; and tokens
per second of ``generate``, end to end, with the mode of ``torch.compile`` that ``--mode`` names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import torch._inductor.config
import torch.distributed as dist
import transformers
import typer
from rich import box
from rich.table import Table
from shared import commands
from shared.errors import DTYPES
from shared.ways import print_findings
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.distributed import DistributedConfig

import interlace
import interlace.compile
from interlace.bench.timing import Timing, measure_step

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
# What other orders of roundings may change, relative to the logits.
ALLOWED = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}
SAMPLES = 20
SHOWN = 10  # findings
# Steps of a cache: those before a capture, and those that ``measure_step`` runs.
MOST_STEPS = 64
TO_MEASURE = 3
_COPIED_BYTES = 1 << 30
# transformers 5.24 has another name for what keys and values are kept in.
_CACHE = "cache"
if _CACHE not in inspect.signature(LlamaForCausalLM.forward).parameters:
    _CACHE = "past_key_values"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings, the same on every rank."""

    size: Annotated[str, typer.Option(help=f"The model: {', '.join(SIZES)}.")] = "tiny"
    layers: Annotated[int, typer.Option(help="Layers; 0: those of the model.")] = 0
    batch: Annotated[int, typer.Option(help="Sequences.")] = 2
    context: Annotated[int, typer.Option(help="Tokens of each sequence before the step.")] = 8
    new_tokens: Annotated[int, typer.Option(help="Tokens that generate adds to each.")] = 6
    dtype: commands.Dtype = "float32"
    mode: Annotated[str, typer.Option(help="torch.compile's mode in generate.")] = "reduce-overhead"
    merge_products: Annotated[
        bool,
        typer.Option(
            "--merge-products/--separate-products", help="Queries, keys, values in one kernel."
        ),
    ] = True
    times: commands.Times = False

    def config(self) -> LlamaConfig:
        """Return the model's configuration."""
        sizes = dict(SIZES[self.size])
        if self.layers:
            sizes["num_hidden_layers"] = self.layers
        positions = self.context + max(self.new_tokens, MOST_STEPS)
        return LlamaConfig(**sizes, max_position_embeddings=positions, tie_word_embeddings=False)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run the model.

    Attributes:
        name: Its name in the table.
        backend: The backend of ``torch.compile``; None runs the model as it is.
        one_shot: Whether Inductor takes symmetric memory's one-shot all-reduce where it can.
        options: Options of the backend.
    """

    name: str
    backend: str | Callable[..., Any] | None
    one_shot: bool = False
    options: dict[str, Any] | None = None

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        """Forget what earlier ways compiled, and let graphs be compiled in this way."""
        torch.compiler.reset()
        with torch._inductor.config.patch({"_collective.auto_select": self.one_shot}):
            yield

    def compiled(self, model: LlamaForCausalLM) -> Callable[..., Any]:
        """Return the model's forward pass, compiled."""
        if self.backend is None:
            return model
        return torch.compile(model, backend=self.backend, options=self.options)

    def compile_config(self, mode: str) -> CompileConfig | None:
        """Return how ``generate`` compiles, or None if it must not."""
        if self.backend is None:
            return None
        # torch.compile takes a mode or options, which may spell the mode out.
        if self.options is not None:
            options = {**torch._inductor.list_mode_options(mode), **self.options}
            config = CompileConfig(backend=self.backend, mode=None, options=options)
        elif self.backend is interlace.compile.eager_backend:
            config = CompileConfig(backend=self.backend, mode=None)
        else:
            config = CompileConfig(backend=self.backend, mode=mode)
        config._compile_all_devices = True  # by default, generate compiles on GPUs only
        return config


def ways_of(settings: Settings) -> list[Way]:
    """Return the ways to run the model; eager first, by which the others are judged."""
    eager = Way("eager", None)
    # Inductor takes a while to compile, so it runs only for times.
    if not settings.times:
        return [eager, Way("interlace, no Inductor", interlace.compile.eager_backend)]
    options = None if settings.merge_products else {"interlace.merge_products": False}
    ways = [eager, Way("Inductor", "inductor")]
    if torch.cuda.is_available():
        ways.append(Way("Inductor, one-shot", "inductor", one_shot=True))
    return [*ways, Way("interlace", interlace.compile.backend, options=options)]


# The model and its inputs


def sharded_model(settings: Settings) -> LlamaForCausalLM:
    """Return a model with random weights, sharded over the ranks by its own plan."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # What torchrun sets, and transformers reads.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    transformers.logging.set_verbosity_error()  # all weights are missing, as they shall be
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(
        None,
        config=settings.config(),
        state_dict={},
        distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto"),
        attn_implementation="sdpa",
        dtype=DTYPES[settings.dtype],
    )
    return model.eval()


class Inputs:
    """The prompt, and what a step takes: a token of each sequence, with keys and values before it.

    Every step is the same, so its results are: it sees the context and the first key and value that
    were stored after it, which are its own, and none of those of the steps before it.
    """

    def __init__(self, model: LlamaForCausalLM, settings: Settings) -> None:
        generator = torch.Generator().manual_seed(1)
        size = settings.batch, settings.context + 1
        tokens = torch.randint(0, model.config.vocab_size, size, generator=generator)
        tokens = tokens.to(model.device)
        self.prompt, self.token = tokens[:, :-1], tokens[:, -1:]
        self.positions = torch.full_like(self.token, settings.context)
        self.length = settings.context + MOST_STEPS
        seen = torch.arange(self.length, device=model.device) <= settings.context
        self.mask = seen.expand(settings.batch, 1, 1, -1)

    def cache(self, model: LlamaForCausalLM) -> StaticCache:
        """Return keys and values of the prompt, with room for steps."""
        cache = StaticCache(config=model.config, max_cache_len=self.length)
        model(input_ids=self.prompt, use_cache=True, **{_CACHE: cache})
        return cache

    def step(self, call: Callable[..., Any], cache: StaticCache) -> torch.Tensor:
        """Return the logits of one step, ``[batch, 1, vocabulary]``."""
        logits: torch.Tensor = call(
            input_ids=self.token,
            position_ids=self.positions,
            attention_mask=self.mask,
            use_cache=True,
            **{_CACHE: cache},
        ).logits
        return logits


# One rank's part


@dataclasses.dataclass
class Result:
    """What a way has computed, and its times.

    Attributes:
        name: The way.
        error: The difference of the logits from the eager ones, relative to their norm.
        same_tokens: The share of generated tokens that are the eager ones.
        findings: What the pass has done.
        step: The time of a step in a CUDA graph, or None without times.
        tokens_per_s: Tokens of all sequences that ``generate`` adds per second, or None.
    """

    name: str
    error: float
    same_tokens: float = 0.0
    findings: list[interlace.compile.Finding] = dataclasses.field(default_factory=list)
    step: Timing | None = None
    tokens_per_s: float | None = None


@torch.no_grad()
def worker(settings: Settings) -> tuple[list[Result], float | None]:
    """Run every way on this rank.

    Returns:
        A result for each way, and the time to read a rank's weights once, in microseconds.
    """
    model = sharded_model(settings)
    is_timed = settings.times and model.device.type == "cuda"
    if is_timed:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        assert dist.group.WORLD is not None
        enable_symm_mem_for_group(dist.group.WORLD.group_name)
    inputs = Inputs(model, settings)
    expected = inputs.step(model, inputs.cache(model)).float()
    expected_tokens = generated(model, inputs, settings, None)
    results = []
    for way in ways_of(settings):
        cache = inputs.cache(model)
        with way.switched_on(), interlace.compile.recording() as findings:
            call = way.compiled(model)
            logits, timing = inputs.step(call, cache), None
            if is_timed:
                logits, timing = captured(lambda call=call, cache=cache: inputs.step(call, cache))
            error = float((logits.float() - expected).norm() / expected.norm())
            del call, cache, logits
        result = Result(way.name, error, findings=list(findings), step=timing)
        with way.switched_on():
            compile_config = way.compile_config(settings.mode)
            generate = functools.partial(generated, model, inputs, settings, compile_config)
            result.same_tokens = float((generate() == expected_tokens).float().mean())
            if is_timed:
                result.tokens_per_s = expected_tokens.numel() / seconds(generate)
        results.append(result)
    return results, us_to_read(model) if is_timed else None


def generated(
    model: LlamaForCausalLM,
    inputs: Inputs,
    settings: Settings,
    compile_config: CompileConfig | None,
) -> torch.Tensor:
    """Return the tokens that ``generate`` adds to the prompt, ``[batch, new_tokens]``."""
    tokens = model.generate(
        inputs.prompt,
        attention_mask=torch.ones_like(inputs.prompt),
        max_new_tokens=settings.new_tokens,
        min_new_tokens=settings.new_tokens,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=compile_config,
        disable_compile=compile_config is None,
    )
    return tokens[:, inputs.prompt.shape[1] :]


def captured(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Timing]:
    """Capture a step in a CUDA graph; return the logits of its last replay, and its time."""
    graph, logits = graph_of(step)
    timing = measure_step(graph.replay, samples=SAMPLES)
    return logits.clone(), timing


def graph_of(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a CUDA graph of a step, and the logits that its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # Operators measure their implementations at their first calls, which no graph can hold.
    with torch.cuda.stream(stream):
        for _ in range(TO_MEASURE):
            step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits = step()
    return graph, logits


def seconds(call: Callable[[], object]) -> float:
    """Return the time of a call on the slowest rank, in seconds; an earlier one has compiled it."""
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    elapsed = torch.tensor(time.perf_counter() - start, device="cuda")
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def us_to_read(model: LlamaForCausalLM) -> float:
    """Return the microseconds that a copy would take to read this rank's weights once."""
    nbytes = 0
    for name, parameter in model.named_parameters():
        # A step looks up a few rows of the embedding.
        if "embed_tokens" not in name:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            nbytes += local.nbytes
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=model.device)
    target = torch.empty_like(source)
    copy = measure_step(lambda: target.copy_(source))
    return nbytes / (2 * source.nbytes) * copy.median_us


# The report


def main(settings: Settings, ranks: int, backend: str) -> None:
    """Decode with a Llama of transformers: eager, by Inductor and by Interlace, checked."""
    commands.require_dtype(settings.dtype)
    if settings.size not in SIZES:
        raise typer.BadParameter(f"--size must be one of {', '.join(SIZES)}; got {settings.size}.")
    sizes = SIZES[settings.size]
    commands.require_even(ranks, size=sizes["num_key_value_heads"])
    outcomes = interlace.launch(worker, ranks, settings, backend=backend)
    console = commands.make_console()
    results, floor_us = outcomes[0]
    findings = results[-1].findings
    print_findings(console, findings[:SHOWN])
    if len(findings) > SHOWN:
        console.print(f"  and {len(findings) - SHOWN} more")
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="Step: one token of each sequence in a CUDA graph, median (p10 to p90) of the "
        "slowest rank. Tokens/s: generate, prompt included.",
    )
    headings = ("way", "error", "same tokens", "fused", "step us", "tokens/s")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for result in results:
        fused = sum(finding.operator is not None for finding in result.findings)
        table.add_row(
            result.name,
            f"{result.error:.1e}",
            f"{result.same_tokens:.0%}",
            f"{fused} of {len(result.findings)}",
            "" if result.step is None else _text(result.step),
            "" if result.tokens_per_s is None else f"{result.tokens_per_s:.1f}",
        )
    if floor_us is not None:
        most = settings.batch / floor_us * 1e6
        table.add_row("reading the weights", "", "", "", f"{floor_us:.0f}", f"{most:.1f}")
    console.print(table)
    for result in (result for results, _ in outcomes for result in results):
        # Not `error > allowed`: a NaN must not pass.
        assert result.error <= ALLOWED[settings.dtype], result
        # In float32 no two logits are so near each other that roundings change the larger one.
        assert settings.dtype != "float32" or result.same_tokens == 1, result
    assert any(finding.operator for finding in findings)


def _text(timing: Timing) -> str:
    """Format the median and spread of the slowest rank."""
    return f"{timing.median_us:.0f} ({timing.p10_us:.0f} to {timing.p90_us:.0f})"


if __name__ == "__main__":
    commands.run_with_options(main, Settings)
