"""Embedding tables and the all-to-all of their rows: tensors, the stock pair, and Interlace."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
import interlace.optim
from benchmarks.peers.case import Case, Sizes, device, ways_of

RATE, EPSILON = 0.1, 1e-8
"""Of row-wise Adagrad. The rate is so large that a row without its update is noticed."""

CRITEO = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209,
    11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
"""Rows of the 26 tables of Criteo's click logs, at most 40 million, as MLPerf's DLRM has them."""
_SHARE = 0.15
"""The part of a GPU's memory that Criteo's tables may take once; each way has a copy of its own."""

TABLE_SIZES: tuple[Sizes, ...] = (
    # Rows of each table of a rank, widths, global batch, lookups of a bag, dtype, and indices.
    ((200000,) * 32, (256,), 4096, 1, "float32", "uniform"),
    ((200000,) * 32, (256,), 4096, 8, "float32", "uniform"),
    ((200000,) * 32, (256,), 4096, 32, "float32", "uniform"),
    ((200000,) * 32, (128,), 8192, 20, "float16", "uniform"),
    ((1000000,) * 26, (128,), 8192, 1, "float32", "uniform"),
    ((200000,) * 32, (128,), 4096, -60, "float32", "uniform"),
    ((200000,) * 32, (128,), 8192, 20, "bfloat16", "uniform"),
    ((200000,) * 32, (128,), 4096, 64, "float16", "uniform"),
    ((200000,) * 32, (128,), 8192, 20, "float16", "Zipf"),
    ((200000,) * 32, (32, 64, 128, 256), 4096, 8, "float32", "uniform"),
    (CRITEO, (128,), 8192, 1, "float32", "Zipf"),
)
"""Lookups below 0: any number from 0 to as many. Criteo's tables are dealt to the ranks."""


def zipf(count: int, rows: int, exponent: float = 1.05) -> torch.Tensor:
    """Return row numbers whose frequencies fall by Zipf's law, with frequent rows scattered."""
    chance = torch.rand(count, device=device(), dtype=torch.float64)
    power = 1.0 - exponent
    ordinal = ((chance * ((rows + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power) - 1.0).long()
    scattered: torch.Tensor = ordinal.clamp(0, rows - 1) * 2654435761 % rows
    return scattered


def _lookups(
    sizes: list[int], batch: int, lookups: int, distribution: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and offsets of all bags, table after table."""
    bags = len(sizes) * batch
    if lookups < 0:
        lengths = torch.randint(0, 1 - lookups, (bags,), device=device())
    else:
        lengths = torch.full((bags,), lookups, device=device())
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    counts = lengths.view(-1, batch).sum(1).tolist()
    indices = [
        zipf(count, rows)
        if distribution == "Zipf"
        else torch.randint(0, rows, (count,), device=device())
        for count, rows in zip(counts, sizes, strict=True)
    ]
    return torch.cat(indices), offsets


def _capped(sizes: list[int], width: int, itemsize: int) -> list[int]:
    """Halve the largest tables until all fit into their part of the GPU's memory."""
    most = torch.cuda.get_device_properties(device()).total_memory * _SHARE
    while sum(sizes) * width * itemsize > most:
        sizes = [min(rows, max(sizes) // 2) for rows in sizes]
    return sizes


def _inputs(
    rows: tuple[int, ...], widths: tuple[int, ...], batch: int, lookups: int, dtype_name: str,
    distribution: str,
) -> SimpleNamespace:  # fmt: skip
    ranks, dtype = dist.get_world_size(), getattr(torch, dtype_name)
    # Every rank has tables of the same sizes, so that the stock all-to-all has equal parts.
    sizes = list(rows)
    if rows == CRITEO:
        sizes = _capped(sizes[::ranks], max(widths), dtype.itemsize)
    of_tables = [width for width, _ in zip(itertools.cycle(widths), sizes, strict=False)]
    indices, offsets = _lookups(sizes, batch, lookups, distribution)
    generator = torch.Generator(device()).manual_seed(1 + dist.get_rank())
    weights = [
        torch.randn(count, width, device=device(), dtype=dtype, generator=generator).mul_(0.1)
        for count, width in zip(sizes, of_tables, strict=True)
    ]
    columns, own = sum(of_tables), batch // ranks
    grad = torch.randn(own, ranks * columns, device=device(), generator=generator)
    return SimpleNamespace(
        weights=weights, sizes=sizes, widths=of_tables, indices=indices, offsets=offsets,
        batch=batch, columns=columns, grad=(grad * 0.01).to(dtype), dtype=dtype,
    )  # fmt: skip


def exchange(pooled: torch.Tensor) -> torch.Tensor:
    """Send each rank its samples' vectors: from ``[B, D]`` to ``[B / R, R * D]``."""
    ranks, (batch, columns) = dist.get_world_size(), pooled.shape
    arrived = torch.empty_like(pooled)
    dist.all_to_all_single(arrived, pooled)
    by_sample = arrived.view(ranks, batch // ranks, columns).transpose(0, 1)
    return by_sample.reshape(batch // ranks, ranks * columns)


def exchange_back(grad: torch.Tensor, columns: int) -> torch.Tensor:
    """Send each rank its tables' gradients: from ``[B / R, R * D]`` to ``[B, D]``."""
    ranks, own = dist.get_world_size(), len(grad)
    leaving = grad.view(own, ranks, columns).transpose(0, 1).contiguous()
    arrived = torch.empty_like(leaving)
    dist.all_to_all_single(arrived, leaving)
    return arrived.view(ranks * own, columns)


def _described(inputs: Any, lookups: int, distribution: str) -> str:
    tables, sizes = len(inputs.sizes), set(inputs.sizes)
    rows = f"{max(sizes)}" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
    widths = ", ".join(str(width) for width in dict.fromkeys(inputs.widths))
    bags = f"0 to {-lookups}" if lookups < 0 else str(lookups)
    kind = str(inputs.dtype).removeprefix("torch.")
    more = "" if distribution == "uniform" else f", {distribution}"
    return f"{tables} x {rows} x {widths}, {inputs.batch}, {bags}, {kind}{more}"


def tables(*sizes: Any) -> Case:
    """Sums of bags, and their exchange, without gradients."""
    inputs = _inputs(*sizes)
    ends = inputs.offsets[:: inputs.batch].tolist()
    bags = [
        (inputs.indices[first:last], inputs.offsets[t * inputs.batch :][: inputs.batch] - first)
        for t, (first, last) in enumerate(itertools.pairwise(ends))
    ]
    name = str(sizes)

    def alone(i: int) -> torch.Tensor:
        pooled = [
            F.embedding_bag(indices, weight, offsets, mode="sum")
            for weight, (indices, offsets) in zip(inputs.weights, bags, strict=True)
        ]
        return torch.cat(pooled, 1)

    def pair(i: int) -> torch.Tensor:
        return exchange(alone(i))

    def ours(i: int) -> torch.Tensor:
        return interlace.embedding_all_to_all(
            inputs.weights, inputs.indices, inputs.offsets, name=name
        )

    described = _described(inputs, sizes[3], sizes[5])
    return Case(described, inputs, ways_of(alone, pair, ours), calls=8, settling=12)


def tables_both(*sizes: Any) -> Case:
    """The same, and row-wise Adagrad in the backward pass. PyTorch has no pair for this.

    A call returns its sums, and the tables: those that are compared are of the first call.
    """
    case = tables(*sizes)
    inputs = case.inputs
    trained = [weight.clone().requires_grad_() for weight in inputs.weights]
    states = [torch.zeros(rows, device=device()) for rows in inputs.sizes]
    update = interlace.optim.RowWiseAdagrad(learning_rate=RATE, epsilon=EPSILON, states=states)
    name = f"trained {sizes}"

    def ours(i: int) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            y = interlace.embedding_all_to_all(
                trained, inputs.indices, inputs.offsets, gradient=update, name=name
            )
            y.backward(inputs.grad)
        return y.detach(), *(weight.detach() for weight in trained)

    return dataclasses.replace(
        case, ways={"Interlace": ours}, reference="Interlace", is_captured=False, calls=4
    )
