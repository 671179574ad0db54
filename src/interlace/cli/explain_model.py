"""``interlace explain --model``: the calls of a layer and of a step, with Interlace and without.

Times are those of ``interlace explain`` of each single call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from interlace.cli import bench
from interlace.cli.console import make_console, make_table
from interlace.cli.explain import print_legend
from interlace.cli.gpus import NORMED, SUM, choice_on, gpu_named, norm_us, provenance, times_on
from interlace.cli.outputs import Outputs
from interlace.costs import embedding_all_to_all as embedding
from interlace.costs.known_profiles import profile_of
from interlace.costs.models import EmbeddingModel, LayerProduct, Model, find_model
from interlace.costs.time import SizedCall
from interlace.errors import ArgumentError
from interlace.gemm.choice import fastest
from interlace.gemm.operator import product_operator
from interlace.operators.gemm_all_reduce.config import MOST_NORMED_ROWS
from interlace.operators.mixture_of_experts.choice import ExpertTerms, predicted_times
from interlace.operators.mixture_of_experts.config import untuned_config
from interlace.operators.mixture_of_experts.layout import ExpertSizes
from interlace.registry import operator_named
from interlace.tuning.gpu import Gpu
from interlace.units import ceil_div, format_count, format_number, parse_count, shortened

_INDEX_BYTES, _ADAGRAD_BYTES = 8, 8
"""Bytes of an index, and of row-wise Adagrad's state that an update of a row moves."""


@dataclasses.dataclass(frozen=True)
class CallTime:
    """The predicted time of one call of a layer, or of one product that is no operator's.

    Attributes:
        part: The call's place in the layer.
        operator: Name of the operator; empty for a product without a collective.
        sizes: The call's sizes on one rank, as text.
        pair_us: Microseconds of PyTorch's fastest pair; None if no time of any is predicted.
        auto_us: Microseconds of what ``impl="auto"`` takes.
        impl: What it takes.
        basis: ``"measured"``, ``"predicted"`` or ``"guessed"``.
        layers: Number of layers that have the call.
    """

    part: str
    operator: str
    sizes: str
    pair_us: float | None
    auto_us: float
    impl: str
    basis: str
    layers: int

    @property
    def without_us(self) -> float:
        """Return the microseconds without Interlace; where they are unknown, those with it."""
        return self.auto_us if self.pair_us is None else self.pair_us


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The predicted times of a step.

    Attributes:
        tokens: Tokens of the step; samples, of a recommendation model.
        layers: Number of layers.
        calls: The calls of the layers in their order.
        unit: ``"tokens"``, or ``"samples"``.
    """

    tokens: int
    layers: int
    calls: Sequence[CallTime]
    unit: str = "tokens"

    @property
    def layer_us(self) -> tuple[float, float]:
        """Return the microseconds of a layer's calls, without Interlace and with it; the mean, if
        layers differ.
        """
        return (
            sum(call.layers * call.without_us for call in self.calls) / self.layers,
            sum(call.layers * call.auto_us for call in self.calls) / self.layers,
        )

    @property
    def share(self) -> float:
        """Return the fraction of the time without Interlace that calls with a collective take."""
        of_operators = sum(call.layers * call.without_us for call in self.calls if call.operator)
        return of_operators / self.layers / self.layer_us[0]


def run_explain_model(
    model: str,
    tokens: str,
    gpu: str,
    world_size: int,
    dtype: str,
    outputs: Outputs,
    *,
    sequence_parallel: bool = False,
) -> None:
    """Print the calls of a model's layer, for each number of tokens, and what a step takes.

    Args:
        model: A model, as :func:`interlace.costs.models.find_model` takes it.
        tokens: Numbers of tokens in a step, of all ranks: ``"1,8,4096"``; of samples, of a
            recommendation model.
        dtype: bfloat16, float16, or float32 without tensor cores.
        outputs: The files to write.
        sequence_parallel: Whether activations between the products are sharded by rows.

    Raises:
        ArgumentError: There is no such model or GPU, or the ranks do not divide what they share.
    """
    described, device = find_model(model), gpu_named(gpu)
    bench.require_dtype(dtype)
    kind: torch.dtype = getattr(torch, dtype)
    parts = [parse_count(part) for part in tokens.split(",")]
    numbers = [number for number in parts if number]
    if len(numbers) < len(parts):
        raise ArgumentError(
            f"--tokens must be whole numbers from 1 to 2^30, 1,8,4096; got {shortened(tokens)}."
        )
    if isinstance(described, EmbeddingModel):
        if sequence_parallel:
            raise ArgumentError("--sequence-parallel must be of a transformer; got tables.")
        steps = [_embedding_step(described, device, number, world_size, kind) for number in numbers]
        left_out = "the MLPs, the interaction, the exchange of indices"
    else:
        steps = [
            _transformer_step(described, device, number, world_size, kind, sequence_parallel)
            for number in numbers
        ]
        left_out = _left_out(described, max(numbers), sequence_parallel)
    console = make_console()
    ranks = f"{world_size} ranks, {dtype}, {device.name}"
    for step in steps:
        _print_step(console, f"{described.name}, {ranks}", step)
    notes = [
        f"Not counted, and about the same with and without: {left_out}, and what the host takes "
        "between calls. So the gain of a whole step is smaller.",
        *_notes(steps),
        f"Rates: {profile_of(device.name).source}. {provenance(device, world_size)}",
    ]
    for note in notes:
        console.print(note, style="dim")
    calls = [call for step in steps for call in step.calls if call.operator]
    print_legend(console, [(operator_named(call.operator), call.impl) for call in calls])
    outputs.write_json(
        lambda: {
            "model": dataclasses.asdict(described), "gpu": device.name, "world_size": world_size,
            "dtype": dtype, "sequence_parallel": sequence_parallel, "notes": notes,
            "steps": [
                dataclasses.asdict(step) | {"layer_us": step.layer_us, "share": step.share}
                for step in steps
            ],
        }
    )  # fmt: skip
    outputs.say_written(console)


def _print_step(console: Console, title: str, step: StepTime) -> None:
    # Layers may have experts, or not.
    is_mixed = any(call.layers != step.layers for call in step.calls)
    parts = "part", *(["layers"] if is_mixed else []), "call", "sizes"
    size = format_count(step.tokens, step.unit.removesuffix("s"))
    table = make_table(
        *parts, "PyTorch us", "auto us", "ratio", "by", "basis",
        left=(*parts, "by", "basis"), title=f"{title}, {size}",
    )  # fmt: skip
    for call in step.calls:
        count = [str(call.layers)] if is_mixed else []
        if call.part == "output":
            table.add_row("attention", *count, "not counted")
        pair = "unknown" if call.pair_us is None else format_number(call.pair_us)
        us = pair, format_number(call.auto_us)
        ratio = f"{call.auto_us / call.without_us:.2f}" if call.operator else ""
        called = call.operator or "product"
        table.add_row(call.part, *count, called, call.sizes, *us, ratio, call.impl, call.basis)
    without, auto = step.layer_us
    sums = {"mean layer" if is_mixed else "layer": 1, f"{step.layers} layers": step.layers}
    for name, layers in ({"both": 1} if step.unit == "samples" else sums).items():
        us = format_number(layers * without), format_number(layers * auto)
        table.add_row(name, *[""] * (len(parts) - 1), *us, f"{auto / without:.2f}", style="bold")
    console.print(table)
    if step.share < 1:
        console.print(
            f"Calls with a collective are {step.share:.0%} of what is counted without Interlace."
        )
    console.print()


def _left_out(model: Model, most_tokens: int, sequence_parallel: bool) -> str:
    """Return what the times of a layer and a step leave out, in words."""
    parts = ["attention and its cache", "positions", "the activation"]
    if model.latent:
        parts.insert(1, "the product that makes keys and values of compressed ones")
    if model.has_wide_norms:
        parts.append("what ranks exchange for norms of queries and keys")
    if sequence_parallel or most_tokens > MOST_NORMED_ROWS:
        after = "" if sequence_parallel else f" of more than {MOST_NORMED_ROWS} tokens"
        parts.append(f"residuals and norms{after}")
    else:
        if model.norm_first:
            parts.append("residuals behind norms, with the norms that follow them")
        if model.experts:
            parts.append("the residual and norm behind experts")
    if model.experts:
        parts.append("the router")
        if not sequence_parallel:
            parts.append("the gather of what the experts return")
    return ", ".join([*parts, "embedding, head and sampling"])


def _notes(steps: Sequence[StepTime]) -> list[str]:
    """Return sentences on how the times of the calls of these steps are to be read."""
    calls = [call for step in steps for call in step.calls]
    operators = {call.operator for call in calls}
    sentences = [
        (
            any(call.basis == "measured" for call in calls),
            "measured: such a call was, on this GPU, and took about as long.",
        ),
        (
            NORMED in operators,
            f"{NORMED}: PyTorch's time is that of its fastest product and all-reduce, and what "
            "its residual and norm take beside them on 2 ranks, of H200s if this GPU "
            "was not measured. Engines with an all-reduce of their own take less than PyTorch.",
        ),
        (
            "mixture_of_experts" in operators,
            "mixture_of_experts: experts are shared out whole, each rank sends an equal share of "
            "the tokens, one at least, and all experts are equally likely.",
        ),
        (
            any(call.pair_us is None for call in calls),
            "unknown: counted as if PyTorch took as long as Interlace.",
        ),
        (
            "embedding_all_to_all" in operators,
            "embedding_all_to_all: bytes over the rates of memory and links. Forward, the shorter "
            "time is hidden: measured calls took 1.0 to 1.2 times that, 1.7 times with one lookup "
            "in few narrow tables. Backward, nothing is taken to be hidden, PyTorch's update to be "
            "as fast as Interlace's, and rows to be sorted in no time.",
        ),
    ]
    return [sentence for is_due, sentence in sentences if is_due]


# A transformer


def _transformer_step(
    model: Model, gpu: Gpu, tokens: int, ranks: int, dtype: torch.dtype, sequence_parallel: bool
) -> StepTime:
    """Return the times of the calls of a layer for some tokens."""
    if sequence_parallel and tokens % ranks:
        raise ArgumentError(
            f"--tokens must be multiples of the {ranks} ranks with --sequence-parallel; got "
            f"{tokens}."
        )
    name = str(dtype).removeprefix("torch.")
    calls = [
        _product_time(
            product,
            _operator(product, tokens, sequence_parallel),
            SizedCall.of_dtype(name, tokens, product.columns, product.inner, ranks),
            gpu,
            dtype,
        )
        for product in model.layer_products(ranks, sequence_parallel=sequence_parallel)
    ]
    if model.experts:
        calls.append(_experts_time(model, gpu, ceil_div(tokens, ranks), ranks, dtype))
    return StepTime(tokens, model.layers, calls)


def _operator(product: LayerProduct, tokens: int, sequence_parallel: bool) -> str:
    """Return the name of the operator that computes a product; empty if it has no collective."""
    if sequence_parallel:
        return "gemm_reduce_scatter" if product.is_summed else "all_gather_gemm"
    if not product.is_summed:
        return ""
    return NORMED if product.is_normed and tokens <= MOST_NORMED_ROWS else SUM


def _product_time(
    product: LayerProduct, operator: str, call: SizedCall, gpu: Gpu, dtype: torch.dtype
) -> CallTime:
    """Return the time of a product, and of the collective that an operator has."""
    part, layers = product.part, product.layers
    profile = profile_of(gpu.name, gpu.processors)
    sizes = f"{call.rows}x{call.columns}x{call.inner}"
    if not operator:
        us = profile.library_product_us(call)
        return CallTime(part, "", sizes, us, us, "cuBLAS", profile.basis("", "", call), layers)
    declaration = product_operator(operator)
    choice = choice_on(gpu, declaration, call, dtype)
    pair_us = auto_us = _pair_us(operator, call, gpu, dtype)
    if not declaration.is_pair(choice.impl):
        auto_us = times_on(gpu, declaration, call, dtype)[choice.impl]
    basis = "measured" if choice.is_exact else profile.basis(operator, choice.impl, call)
    return CallTime(part, operator, sizes, pair_us, auto_us, choice.impl, basis, layers)


def _pair_us(operator: str, call: SizedCall, gpu: Gpu, dtype: torch.dtype) -> float:
    """Return the microseconds of PyTorch's fastest pair."""
    if operator == NORMED:
        return _pair_us(SUM, call, gpu, dtype) + norm_us(gpu, call, dtype)
    declaration = product_operator(operator)
    times_us = times_on(gpu, declaration, call, dtype)
    return min(times_us[name] for name in declaration.pairs_among(times_us))


def _experts_time(model: Model, gpu: Gpu, tokens: int, ranks: int, dtype: torch.dtype) -> CallTime:
    """Return the time of a layer of experts, forward.

    Args:
        tokens: Tokens of each rank.
    """
    name, profile = "mixture_of_experts", profile_of(gpu.name, gpu.processors)
    sizes = ExpertSizes(
        tokens, model.top_k, model.experts, model.hidden, model.intermediate, ranks, tokens
    )
    terms = ExpertTerms(sizes, dtype, "cuda", keeps=False)
    times_us = predicted_times(profile, terms)
    choice = fastest(name, profile, times_us, lambda impl: untuned_config(impl, terms.call))
    pair_us = min(
        (times_us[pair] for pair in operator_named(name).pairs_among(times_us)), default=None
    )
    text = f"{format_count(tokens, 'token')}, {model.top_k} of {model.experts}, "
    text += f"{model.hidden}x{model.intermediate}"
    basis = profile.basis(name, choice.impl, terms.call)
    auto_us, layers = times_us[choice.impl], model.expert_layers
    return CallTime("experts", name, text, pair_us, auto_us, choice.impl, basis, layers)


# A recommendation model


def _embedding_step(
    model: EmbeddingModel, gpu: Gpu, batch: int, ranks: int, dtype: torch.dtype
) -> StepTime:
    """Return the times of looking up tables that are shared out whole, and of the backward pass
    with row-wise Adagrad, on the rank with most tables.
    """
    rates = profile_of(gpu.name, gpu.processors)
    memory_rate, launch_us = rates.product.memory_bytes_per_s, rates.product.launch_us
    widths = [[model.width] * len(range(rank, model.tables, ranks)) for rank in range(ranks)]
    tables, itemsize = len(widths[0]), dtype.itemsize
    call: dict[str, Any] = {"widths": widths, "batch": batch, "rank": 0}
    looked_up: dict[str, Any] = {"lookups": [model.lookups * batch] * tables, "itemsize": itemsize}
    moved_bytes = embedding.floor_memory_bytes(
        **call, **looked_up, output_itemsize=itemsize, index_itemsize=_INDEX_BYTES
    )
    updated_bytes = embedding.backward_floor_memory_bytes(
        **call, **looked_up, distinct_rows=looked_up["lookups"], gradient_itemsize=itemsize,
        row_accesses=2, state_bytes=_ADAGRAD_BYTES,
    )  # fmt: skip
    pair = embedding.stock_between_nodes(
        **call, output_itemsize=itemsize, node_of_rank=range(ranks)
    )
    # What PyTorch's all-to-all brings is copied to its place, and gradients are before it.
    copies_us = 1e6 * pair.landing_bytes / memory_rate
    pooling_us = embedding.pooling_us(moved_bytes, launch_us, memory_rate)
    stock_us = embedding.stock_pooling_us(moved_bytes, launch_us, memory_rate, itemsize)
    update_us = launch_us + 1e6 * updated_bytes / memory_rate
    there, back = (
        1e6 * floor(widths=widths, batch=batch, rank=0, itemsize=itemsize) / rates.link_bytes_per_s
        for floor in (embedding.floor_link_bytes, embedding.backward_floor_link_bytes)
    )
    sizes = f"{format_count(tables, 'table')} {model.width} wide, "
    sizes += f"{format_count(model.lookups, 'lookup')} each"
    times = {
        "forward": (stock_us + there + copies_us, max(pooling_us, there)),
        "backward": (back + copies_us + update_us, back + update_us),
    }
    calls = [
        CallTime(part, "embedding_all_to_all", sizes, pair_us, auto_us, "fused", "guessed", 1)
        for part, (pair_us, auto_us) in times.items()
    ]
    return StepTime(batch, 1, calls, "samples")
