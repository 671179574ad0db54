"""Models of ``transformers``, unedited: a Llama by ``torch.compile``, and a Qwen3-MoE's experts.

    python benchmarks/transformers_models.py --json FILE [--part dense] [--ways Inductor Interlace]
    torchrun --nproc-per-node 2 benchmarks/transformers_models.py --json FILE ...

Each rank has a GPU. Weights are random, and the same in every way.

    dense      a Llama with sizes of Llama 3 8B, sharded by its own plan (``tp_plan="auto"``): the
               logits of a prompt (``prefill``), and a forward and a backward pass (``training``)
    experts    a Qwen3-MoE with sizes of Qwen3-30B-A3B, not compiled: forward and backward of the
               whole model (``step``) and of one layer's experts (``block``), by transformers' own
               expert parallelism, with each of its implementations of experts, and by Interlace

Everything is checked before and after it is timed, and a wrong way fails the program at its end.
Results are compared with the same computation in float32: errors may be four times those of the
eager model, or of transformers' own experts, and a dense model that lacks a rank's part of one
product must exceed these bounds. The whole model with experts is compared with transformers' own,
and more loosely: another rounding sends some tokens to another expert.

Times are medians of steps that the host enqueues, of the slowest rank. A way that raises an error
is recorded with it, and results are written after each way. ``--size tiny`` runs without GPUs and
times nothing there; under torchrun it needs TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import gc
import math
import os
import re
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import interlace
import interlace.compile
import interlace.integrations.transformers
from interlace.bench.timing import measure_step

SIZES: dict[str, dict[str, tuple[int, int]]] = {
    "dense": {
        "num_hidden_layers": (2, 8), "hidden_size": (64, 4096), "intermediate_size": (128, 14336),
        "num_attention_heads": (4, 32), "num_key_value_heads": (2, 8), "vocab_size": (96, 128256),
        "max_position_embeddings": (32, 4096),
    },
    "experts": {
        "num_hidden_layers": (2, 4), "hidden_size": (64, 2048), "moe_intermediate_size": (48, 768),
        "num_attention_heads": (4, 32), "num_key_value_heads": (2, 4), "head_dim": (16, 128),
        "num_experts": (8, 128), "num_experts_per_tok": (2, 8), "norm_topk_prob": (True, True),
        "vocab_size": (96, 151936), "max_position_embeddings": (16, 2048),
    },
}  # fmt: skip
"""Of ``--size tiny``, and of the real models but for the number of layers. Sequences are as long as
there are positions."""
MODELS = {"dense": ("Llama", 1), "experts": ("Qwen3Moe", 2)}
"""Their names in transformers, and numbers of sequences."""
DENSE_WAYS: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "Inductor": ("inductor", {}),
    # The name "interlace" is known where the package is installed; this is what it stands for.
    "Interlace": (interlace.compile.backend, {}),
    "Inductor async-TP": ("inductor", {"_micro_pipeline_tp": True}),
    "Interlace, pass alone": (interlace.compile.eager_backend, None),
}
"""Backends of ``torch.compile`` and their options; the last way is the one without GPUs."""
EXPERT_WAYS = (
    "auto", "interlace", "all_to_all", "all_reduce",
    "auto, eager", "auto, deepgemm", "auto, batched_mm", "auto, sonicmoe",
)  # fmt: skip
"""``ep_implementation`` and, unless it is grouped_mm, ``experts_implementation``."""

FACTOR, ANYWAY, LOSS, WHOLE = 4.0, 3e-2, 2e-3, 0.4
"""Errors may be ``FACTOR`` times those of what a way is compared with; ``ANYWAY``, which a rounding
or two explain; a loss's, whose terms' errors cancel in one way more than in another, ``LOSS``; and
the difference of an expert's gradient of a whole model ``WHOLE``."""
GAINS = {"q_proj": 2.0, "o_proj": 4.0, "down_proj": 2.0}
"""Weights' standard deviations, where not 1 over the root of the inputs: attention that averages
over all tokens alike, and experts' averages, would add next to nothing to the residual."""
LIMIT_S = 240.0
"""When a way has taken so long, a rank waits for another one for ever, and the process ends."""

Tensors = dict[str, torch.Tensor]
Errors = dict[str, float]  # relative ones by the name of a tensor, the largest of all ranks
Entry = dict[str, Any]  # what the file has of one way


class Report:
    """What has been measured so far; rank 0 prints and writes it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.file, self.end = options.json, time.monotonic() + options.budget
        self.results: list[Entry] = []
        self.more = {
            "ranks": dist.get_world_size(),
            "transformers": transformers.__version__,
            "dtype": "bfloat16",
            "factor": FACTOR,
            "models": {
                part: {**sizes, "tokens": f"{MODELS[part][1]} x {sizes['max_position_embeddings']}"}
                for part, sizes in options.sizes.items()
            },
        }

    def attempt(self, part: str, workload: str, way: str, call: Callable[[Entry], None]) -> None:
        """Let a call complete the entry of a way, on all ranks; record the error if it raises one.

        An error must be raised by all ranks, as ranks without it would wait for the others.
        """
        entry: Entry = {"part": part, "workload": workload, "way": way}
        self.results.append(entry)
        late = torch.tensor(float(time.monotonic() > self.end))
        dist.broadcast(late, 0)
        if late.item():
            entry["left_out"] = "out of time"
        else:
            entry["error"], error = "it did not end", ""
            self._write()
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            try:
                call(entry)
            except Exception as raised:
                traceback.print_exc(limit=-4)
                # Folders of the machine that measured say nothing to those who read the file.
                text = re.sub(r"(?<![\w.])/(?:[\w.+~-]+/)+", "", str(raised))
                error = f"{type(raised).__name__}: {' '.join(text.split())}"[:300]
            errors = [""] * dist.get_world_size()
            dist.all_gather_object(errors, error)
            del entry["error"]
            if any(errors):
                entry["error"] = next(filter(None, errors))
                # A failed call breaks the group of Interlace, which the next way needs.
                with contextlib.suppress(interlace.InterlaceError):
                    interlace.recover()
            faulthandler.cancel_dump_traceback_later()
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
        self._write()
        if dist.get_rank() == 0:
            said = [entry.get(key) for key in ("left_out", "error", "correct", "step", "block")]
            print(f"{part}, {workload}, {way}:", *filter(None, said), flush=True)

    def _write(self) -> None:
        if dist.get_rank() == 0 and self.file is not None:
            documents.write(self.file, self.results, **self.more)


def errors_of(found: Tensors, exact: Tensors) -> Errors:
    """Return the relative error of each tensor, of the rank where it is largest."""
    assert found.keys() == exact.keys(), (sorted(found), sorted(exact))
    errors = torch.zeros(len(exact), dtype=torch.float64)
    for i, (name, right) in enumerate(exact.items()):
        error = (found[name].float() - right).norm() / right.norm().clamp(min=1e-30)
        errors[i] = float(error.nan_to_num(nan=math.inf, posinf=math.inf))
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return dict(zip(exact, errors.tolist(), strict=True))


def bounds(first: Errors) -> Errors:
    """Return what errors may be, by those of what a way is compared with."""
    floors = {name: LOSS if name == "loss" else ANYWAY for name in first}
    return {name: max(FACTOR * error, floors[name]) for name, error in first.items()}


def judge(entry: Entry, errors: Errors, allowed: Errors) -> None:
    """Add errors and their bounds to an entry; of two errors of a tensor, the larger one counts."""
    known = entry.setdefault("errors", {})
    known |= {name: max(error, known.get(name, 0.0)) for name, error in errors.items()}
    entry["allowed"] = entry.get("allowed", {}) | {name: allowed[name] for name in errors}
    entry["correct"] = all(error <= entry["allowed"][name] for name, error in known.items())


def timed(step: Callable[[], object]) -> dict[str, Any] | None:
    """Return the time of a step; None without GPUs, where times mean nothing."""
    return dataclasses.asdict(measure_step(step)) if torch.cuda.is_available() else None


def make(part: str, sizes: dict[str, int], **options: Any) -> tuple[Any, torch.Tensor]:
    """Return a model of transformers with random weights, sharded, and tokens that ranks share."""
    kind, sequences = MODELS[part]
    transformers.logging.set_verbosity_error()  # all weights are missing, as they shall be
    transformers.logging.disable_progress_bar()
    config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=False)
    model = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(
        None,
        config=config,
        state_dict={},
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
        **options,
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue  # norms, which are 1
        # Ranks draw the same where they hold the same.
        owner = dist.get_rank() if isinstance(parameter, DTensor) else 0
        values = local(parameter.detach())
        generator = torch.Generator(values.device).manual_seed(zlib.crc32(name.encode()) + owner)
        gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
        # An embedding is looked up, and has no sum.
        terms = 1 if "embed_tokens" in name else parameter.shape[-1]
        values.normal_(0, gain / math.sqrt(terms), generator=generator)
    shape = sequences, config.max_position_embeddings
    tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    return model, tokens.to(model.device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(run: Callable[..., Any], model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Run a model forward and backward, which leaves gradients; return the loss."""
    model.zero_grad(set_to_none=True)
    loss: torch.Tensor = run(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def taken(leaves: Tensors, pattern: str = "") -> Tensors:
    """Return this rank's gradients of leaves whose names the pattern finds, and forget all."""
    found = {}
    for name, leaf in leaves.items():
        if leaf.grad is not None and re.search(pattern, name):
            found[name] = local(leaf.grad).detach()
        leaf.grad = None
    return found


class CountOperators(CustomGraphPass):
    """A pass of Inductor that changes nothing, and counts collectives and what they became."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        names = (str(node.target).removesuffix(".default") for node in graph.nodes)
        counted = r"(_c10d_functional|symm_mem|interlace)\.(?!wait)"
        self.counts.update(name for name in names if re.match(counted, name))

    def uuid(self) -> None:
        """Have no key, so that no graph comes from a cache, past this pass and Interlace's."""


class Workload:
    """A workload of the dense model, what is right, and what errors may be."""

    def __init__(self, name: str, model: Any, tokens: torch.Tensor) -> None:
        self.name, self.model, self.tokens = name, model.train(name == "training"), tokens
        kept = [(module, dict(module._parameters)) for module in model.modules()]
        for module, parameters in kept:
            for key, each in parameters.items():
                if each is not None:
                    module._parameters[key] = torch.nn.Parameter(each.detach().float())
        self.exact = {key: each.float() for key, each in self.results(model).items()}
        for module, parameters in kept:
            module._parameters.update(parameters)
        self.eager = errors_of(self.results(model), self.exact)
        self.allowed = bounds(self.eager)
        self.lost: dict[str, Errors] = {}
        middle = model.config.num_hidden_layers // 2
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            weight = local(model.get_parameter(f"model.layers.{middle}.{part}.weight").detach())
            before = weight.clone()
            weight *= dist.get_rank() < dist.get_world_size() - 1
            lost = self.lost[part] = errors_of(self.results(model), self.exact)
            weight.copy_(before)
            assert any(error > self.allowed[key] for key, error in lost.items()), (part, lost)

    def step(self, run: Callable[..., Any]) -> torch.Tensor:
        """Run a step; return the logits of a prompt, or the loss."""
        if self.name == "training":
            return train(run, self.model, self.tokens)
        with torch.no_grad():
            logits: torch.Tensor = run(input_ids=self.tokens, use_cache=False).logits
        return logits

    def results(self, run: Callable[..., Any]) -> Tensors:
        """Run a step; return what is compared."""
        result = self.step(run)
        if self.name == "prefill":
            return {"logits": result}
        # The first and the last layer, beside what the backward pass comes to at its end.
        ends = rf"layers\.(0|{self.model.config.num_hidden_layers - 1})\."
        pattern = rf"embed_tokens|{ends}(input_layernorm|.*\.(q|o|gate|down)_proj)"
        return {"loss": result, **taken(dict(self.model.named_parameters()), pattern)}

    def run_way(self, entry: Entry) -> None:
        """Check a way, time it, and check it again, when operators have made their choices."""
        backend, options = DENSE_WAYS[entry["way"]]
        counter = CountOperators()
        if options is not None:
            options = {"fx_graph_cache": False, "post_grad_custom_post_pass": counter, **options}
        run = torch.compile(self.model, backend=backend, options=options)
        with interlace.compile.recording() as findings:
            start = time.monotonic()
            judge(entry, errors_of(self.results(run), self.exact), self.allowed)
            entry["first_s"] = round(time.monotonic() - start, 1)
            entry["step"] = timed(lambda: self.step(run))
            judge(entry, errors_of(self.results(run), self.exact), self.allowed)
        entry["errors_of_eager"], entry["errors_without_a_part"] = self.eager, self.lost
        entry["operators"] = dict(counter.counts)
        report = interlace.compile.Report(tuple(findings))
        for key in ("fused", "merged", "left") if findings else ():
            entry[key] = Counter(
                f"{each.graph}: {each.operator}" if each.operator
                else f"{each.graph}: {each.collective} of {list(each.shape)}: {each.reason}"
                for each in getattr(report, key)
            )  # fmt: skip


class Experts:
    """The model with experts, inputs of a layer's experts alone, and what is right of both."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        model, self.tokens = self._make("auto")
        layer = model.train().model.layers[0]
        weight = local(layer.mlp.experts.down_proj)
        generator = torch.Generator(weight.device).manual_seed(2)
        size = 2, self.tokens.numel(), weight.shape[1]
        drawn = torch.randn(size, device=weight.device, generator=generator)
        self.x, self.gradient = drawn.to(weight.dtype)
        with torch.no_grad():
            _, self.weights, self.index = layer.mlp.gate(self.x)
        self.x.requires_grad_()
        self.weights.requires_grad_()
        # This rank's experts one by one in float32, added up over ranks.
        leaves = {
            name: local(leaf).detach().float().requires_grad_()
            for name, leaf in self._leaves(layer.mlp.experts).items()
        }
        x, weights, gate_up, down = leaves.values()
        y = torch.zeros_like(x)
        for number in range(len(down)):
            chosen = self.index == dist.get_rank() * len(down) + number
            token, slot = chosen.nonzero(as_tuple=True)
            gate, up = F.linear(x[token], gate_up[number]).chunk(2, dim=-1)
            each = F.linear(F.silu(gate) * up, down[number])
            y = y.index_add(0, token, each * weights[token, slot, None])
        y.backward(self.gradient.float())
        self.exact = {"block: y": y.detach(), **taken(leaves)}
        for shared in ("y", "x", "weights"):
            dist.all_reduce(self.exact[f"block: {shared}"])
        self.allowed = bounds(errors_of(self.block(layer.mlp.experts), self.exact))
        self.whole = {name: each.float() for name, each in self.results(model).items()}

    def _make(self, way: str) -> tuple[Any, torch.Tensor]:
        parallel, _, experts = way.partition(", ")
        ranks = dist.get_world_size()
        plan = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation=parallel)
        options = {"distributed_config": plan, "experts_implementation": experts or None}
        return make("experts", self.sizes, **options)

    def _leaves(self, experts: Any) -> Tensors:
        """Return what the experts of a layer have gradients of."""
        leaves = {"x": self.x, "weights": self.weights, **dict(experts.named_parameters())}
        return {f"block: {name}": leaf for name, leaf in leaves.items()}

    def step(self, experts: Any) -> torch.Tensor:
        """Run the experts of a layer forward and backward, which leaves gradients."""
        for leaf in (self.x, self.weights, *experts.parameters()):
            leaf.grad = None
        y: torch.Tensor = experts(self.x, self.index, self.weights)
        y.backward(self.gradient)
        return y.detach()

    def block(self, experts: Any) -> Tensors:
        """Run the experts of a layer; return what is compared."""
        return {"block: y": self.step(experts), **taken(self._leaves(experts))}

    def results(self, model: Any) -> Tensors:
        """Run the model forward and backward; return what is compared."""
        loss = train(model, model, self.tokens)
        ends = rf"layers\.(0|{model.config.num_hidden_layers - 1})\.mlp\.experts"
        return {"loss": loss, **taken(dict(model.named_parameters()), ends)}

    def run_way(self, entry: Entry) -> None:
        """Check a way, time the whole model and a layer's experts, and check these again."""
        model, _ = self._make(entry["way"])
        start = time.monotonic()
        experts = model.train().model.layers[0].mlp.experts
        entry["experts"] = model.config._experts_implementation
        judge(entry, errors_of(self.block(experts), self.exact), self.allowed)
        limits = {name: FACTOR * LOSS if name == "loss" else WHOLE for name in self.whole}
        judge(entry, errors_of(self.results(model), self.whole), limits)
        entry["first_s"] = round(time.monotonic() - start, 1)
        entry["step"] = timed(lambda: train(model, model, self.tokens))
        entry["block"] = timed(lambda: self.step(experts))
        # Once more, with what operators have left from other calls.
        judge(entry, errors_of(self.block(experts), self.exact), self.allowed)


def worker(options: argparse.Namespace) -> list[Entry]:
    """Measure on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # What torchrun sets, and transformers reads.
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{ranks}")
    report = Report(options)
    if "dense" in options.sizes:
        plan = DistributedConfig(tp_size=ranks, tp_plan="auto")
        model, tokens = make("dense", options.sizes["dense"], distributed_config=plan)
        *by_inductor, alone = DENSE_WAYS
        default = by_inductor if torch.cuda.is_available() else [alone]
        for name in ("prefill", "training"):
            workload = Workload(name, model, tokens)
            for way in DENSE_WAYS:
                if way in (options.ways or default):
                    report.attempt("dense", name, way, workload.run_way)
        del model, workload
    if "experts" in options.sizes:
        interlace.integrations.transformers.register()
        truth = Experts(options.sizes["experts"])
        for way in EXPERT_WAYS:
            if way in (options.ways or EXPERT_WAYS):
                report.attempt("experts", "training", way, truth.run_way)
    return report.results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--part", choices=list(SIZES), help="default: both")
    parser.add_argument("--size", default="full", choices=["tiny", "full"])
    parser.add_argument("--ways", nargs="+", default=[], metavar="WAY", help="names as in results")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for beginning ways")
    options = parser.parse_args()
    ways = {"dense": [*DENSE_WAYS], "experts": [*EXPERT_WAYS]}
    parts = [options.part] if options.part else list(SIZES)
    known = [way for part in parts for way in ways[part]]
    if unknown := set(options.ways) - set(known):
        parser.error(f"--ways must be of {'; '.join(known)}; got {'; '.join(unknown)}")
    options.sizes = {
        part: {name: pair[options.size == "full"] for name, pair in SIZES[part].items()}
        for part in parts
    }
    # A rank that compiles may let the other one wait.
    os.environ.setdefault("INTERLACE_DEADLINE_S", "60")
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    backend = "auto" if options.size == "tiny" else "cuda"
    results = interlace.launch(worker, ranks, options, backend=backend)[0]
    wrong = [each["way"] for each in results if not each.get("correct", True)]
    if wrong:
        raise SystemExit(f"wrong: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
