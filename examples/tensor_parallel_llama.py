r"""A tensor-parallel Llama-shaped model, compared with the same model on one device.

Without arguments it runs a tiny model on two ranks and checks itself, with and without sequence
parallelism: loss, logits and every gradient must be as near to a model of higher precision as the
single-device model is. On GPUs, with the sizes of a layer of Llama 3 70B:

    python examples/tensor_parallel_llama.py --world-size 4 --dtype bfloat16 --layers 2 \
        --width 8192 --heads 64 --kv-heads 8 --hidden 28672 --vocabulary 32000 \
        --sequence 4096 --batch 1 --steps 20 --impl fused --impl unfused
    torchrun --nproc-per-node 4 examples/tensor_parallel_llama.py --dtype bfloat16 ...
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich import box
from rich.table import Table
from shared import commands
from shared.errors import DTYPES, Judge, errors_of, higher
from shared.llama import Block, LlamaSettings
from torch import nn

import interlace
from interlace.nn import ColumnParallelLinear, RowParallelLinear
from interlace.nn.parallel_linear import ParallelLinear


@dataclasses.dataclass(frozen=True)
class Settings(LlamaSettings):
    """Settings of a model and its comparison."""

    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 1
    vocabulary: Annotated[int, typer.Option(help="Number of different tokens.")] = 64
    impl: Annotated[
        list[str] | None,
        typer.Option(help="auto, fused or unfused; may be repeated. Default: auto and unfused."),
    ] = None
    steps: commands.Steps = 1
    seed: Annotated[int, typer.Option(help="Seed of parameters and tokens.")] = 0


# The model. Activations are of S positions of B sequences, with the sequence first, so that a share
# of the positions is contiguous memory.


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Embed positions in ``[S, B, heads, D]`` by rotation (Su et al., arXiv:2104.09864).

    The angles are float32 at least.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = 500_000.0 ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = (
        torch.arange(x.shape[0], device=x.device, dtype=dtype)[:, None, None, None] * frequencies
    )
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, ``[S, B, width] -> [S, B, width]``.

    Several query heads share a key and value head.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.size = settings.width // settings.heads
        # Queries, keys and values are one matrix product.
        self.parts = [
            settings.heads * self.size,
            settings.kv_heads * self.size,
            settings.kv_heads * self.size,
        ]
        self.projection: nn.Module = nn.Linear(settings.width, sum(self.parts), bias=False)
        self.output: nn.Module = nn.Linear(settings.width, settings.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.projection(x)
        # On several ranks, y holds the features of this rank's heads only.
        ranks = sum(self.parts) // y.shape[-1]
        q, k, v = (
            part.unflatten(-1, (-1, self.size))
            for part in y.split([part // ranks for part in self.parts], -1)
        )
        q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate(q), rotate(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(mixed.permute(2, 0, 1, 3).flatten(-2))


class SwiGLU(nn.Module):
    """The MLP ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        # Gate and up are one matrix product.
        self.parts = [settings.hidden, settings.hidden]
        self.gate_up: nn.Module = nn.Linear(settings.width, sum(self.parts), bias=False)
        self.down: nn.Module = nn.Linear(settings.hidden, settings.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A shard has its share of gate and of up, so its two halves are gate and up, too.
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """The model, ``tokens [S, B] -> logits [S, B, vocabulary]``.

    With a sharded head, the logits are of this rank's share of the vocabulary.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocabulary, settings.width)
        self.blocks = nn.ModuleList(
            Block(settings.width, Attention(settings), SwiGLU(settings))
            for _ in range(settings.layers)
        )
        self.norm = nn.RMSNorm(settings.width, eps=1e-5)
        self.head: nn.Module = nn.Linear(settings.width, settings.vocabulary, bias=False)
        self.sequence_parallel = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Tensor parallelism: the first linear layer of each pair becomes column-parallel and the second one
# row-parallel. Nothing else changes.


def parallelise(model: Llama, sequence_parallel: bool) -> Llama:
    """Replace the linear layers of a full model, which every rank has, by this rank's shards."""
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        attention.projection = column(attention.projection, attention.parts, sequence_parallel)
        attention.output = RowParallelLinear.from_linear(
            attention.output, sequence_parallel=sequence_parallel
        )
        mlp.gate_up = column(mlp.gate_up, mlp.parts, sequence_parallel)
        mlp.down = RowParallelLinear.from_linear(mlp.down, sequence_parallel=sequence_parallel)
    model.head = column(model.head, None, sequence_parallel)
    model.sequence_parallel = sequence_parallel
    return model


def column(
    linear: nn.Linear, parts: list[int] | None, sequence_parallel: bool
) -> ColumnParallelLinear:
    """Make this rank's shard of a full layer, cut along its output features."""
    return ColumnParallelLinear.from_linear(
        linear, parts=parts, sequence_parallel=sequence_parallel
    )


def parallel_layers(model: nn.Module) -> Iterator[tuple[str, ParallelLinear]]:
    """Yield the sharded layers of a model, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            yield name, module


class _ShardedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits whose last dimension is sharded; the same on every rank."""

    @staticmethod
    def forward(ctx: Any, logits_shard: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wide = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        largest = wide.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        powers = (wide - largest[:, None]).exp()
        # The column of each target among this rank's columns, of which it may be none.
        column = targets - dist.get_rank() * wide.shape[1]
        is_local = (column >= 0) & (column < wide.shape[1])
        column = column.clamp(0, wide.shape[1] - 1)[:, None]
        target_logit = torch.where(is_local, wide.gather(1, column)[:, 0], 0.0)
        # One all-reduce for two sums: of the powers, and of the targets' logits.
        sums = torch.stack([powers.sum(-1), target_logit])
        dist.all_reduce(sums)
        gradient = (powers / sums[0][:, None]).scatter_add(
            1, column, -is_local[:, None].to(wide.dtype)
        ) / len(targets)
        ctx.save_for_backward(gradient.to(logits_shard.dtype))
        return (sums[0].log() + largest - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0] * grads[0], None


def loss_of(
    model: Llama, tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and the logits ``[S B, vocabulary]`` or this rank's columns of them."""
    logits = model(tokens).flatten(0, -2)
    if isinstance(model.head, ParallelLinear):
        return _ShardedCrossEntropy.apply(logits, targets.flatten()), logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets.flatten()), logits


def step(model: Llama, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run forward and backward pass; return loss, logits and gradients by name."""
    model.zero_grad()
    loss, logits = loss_of(model, tokens, targets)
    loss.backward()
    if isinstance(model.head, ParallelLinear):
        # With sequence parallelism, norms and the embedding have seen this rank's positions only.
        interlace.nn.sum_replicated_gradients(model)
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss.detach(), "logits": logits.detach(), **gradients}


# The comparison


def compare(settings: Settings) -> dict[str, Any]:
    """Run the model in every way on this rank, and compare it with the model on one device.

    Returns:
        For every way its name, implementation, errors and the median time of a step, in ms.
    """
    device = interlace.group_of().device
    # One seed for all ranks, so that every rank has the same model and data.
    torch.manual_seed(settings.seed)
    single = Llama(settings).to(device, DTYPES[settings.dtype])
    tokens, targets = torch.randint(settings.vocabulary, (2, settings.sequence, settings.batch)).to(
        device
    )
    # A model of higher precision shows the rounding errors of one device, by which those of several
    # devices are judged.
    exact_model = copy.deepcopy(single).to(higher(settings.dtype))
    exact = {name: value.clone() for name, value in step(exact_model, tokens, targets).items()}
    runs = [
        (
            "one device",
            "",
            errors_of(step(single, tokens, targets), exact),
            milliseconds(single, tokens, targets, settings),
        )
    ]
    single.zero_grad()
    for sequence_parallel in (False, True):
        model = parallelise(copy.deepcopy(single), sequence_parallel)
        exact_shards = shards_of(exact, model)
        for impl in settings.impl or ("auto", "unfused"):
            for _, layer in parallel_layers(model):
                layer.impl = impl
            name = "tensor + sequence parallel" if sequence_parallel else "tensor parallel"
            errors = errors_of(step(model, tokens, targets), exact_shards)
            runs.append((name, impl, errors, milliseconds(model, tokens, targets, settings)))
    return {"runs": runs, "device": device.type}


def shards_of(full: dict[str, torch.Tensor], model: Llama) -> dict[str, torch.Tensor]:
    """Return this rank's part of the full model's loss, logits and gradients."""
    shards = dict(full)
    for name, layer in parallel_layers(model):
        shards[f"{name}.weight"] = layer.shard_of(full[f"{name}.weight"])
    shards["logits"] = full["logits"].chunk(dist.get_world_size(), -1)[dist.get_rank()]
    return shards


def milliseconds(
    model: Llama, tokens: torch.Tensor, targets: torch.Tensor, settings: Settings
) -> float:
    """Return the median time, in ms, of a step that starts on all ranks at once."""
    times = []
    for _ in range(settings.steps):
        dist.barrier()
        interlace.synchronize()
        start = time.perf_counter()
        step(model, tokens, targets)
        interlace.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def report(results: list[dict[str, Any]], settings: Settings) -> None:
    """Print a row for each way to run the model, with the values of its worst rank.

    Fails if an error is larger than rounding explains.
    """
    by_way = list(zip(*(result["runs"] for result in results), strict=True))
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{len(results)} ranks, {settings.dtype}; relative errors",
    )
    for heading in ("model", "impl", "loss", "logits", "gradients", "step ms"):
        table.add_column(heading, justify="left" if heading in ("model", "impl") else "right")
    judge = Judge(settings.dtype)
    # The single device comes first, and sets the errors that the others are allowed.
    for ranks in by_way:
        name, impl = ranks[0][:2]
        errors = judge.worst(f"{name}, {impl}", [rank[2] for rank in ranks])
        gradients = max(error for key, error in errors.items() if key not in ("loss", "logits"))
        shown = (f"{error:.1e}" for error in (errors["loss"], errors["logits"], gradients))
        table.add_row(name, impl, *shown, f"{max(rank[3] for rank in ranks):.1f}")
    assert not judge.failures, judge.failures
    console = commands.make_console()
    console.print(table)
    if results[0]["device"] == "cpu":
        console.print(
            "Times on the CPU, where kernels run in an interpreter, say nothing about speed."
        )


def main(settings: Settings, ranks: int, backend: str) -> None:
    """Compare a tensor-parallel model with the same model on one device, and time its steps."""
    settings.require_fitting(ranks, vocabulary=settings.vocabulary)
    if (settings.width // settings.heads) % 2:
        raise typer.BadParameter("--heads must divide --width into even sizes.")
    report(interlace.launch(compare, ranks, settings, backend=backend), settings)


if __name__ == "__main__":
    commands.run_with_options(main, Settings)
