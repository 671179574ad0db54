"""Tensors that are returned unchanged, and whose gradients are not: they are scaled, or reach the
weights by which looked-up embeddings are multiplied as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interlace.comm.groups.registration import once_differentiable
from interlace.gemm.gradients import unviewed
from interlace.nn.input_distribution import Bags, InputDistribution


def learn_weights(
    output: torch.Tensor,
    bags: Bags,
    tables: Sequence[torch.Tensor],
    columns: list[int],
    distribution: InputDistribution,
) -> torch.Tensor:
    """Return ``output`` unchanged; its gradient also reaches ``bags.per_sample_weights``.

    The backward pass is collective: gradients of all samples come to the ranks that hold the
    tables, and the gradient of a weight is the dot product of its row and its bag's gradient. The
    operator's own backward pass, which may update the tables, comes after it.

    Args:
        output: ``[n, columns of all ranks]``: this rank's samples, pooled by mode ``"sum"``.
        bags: The bags of this rank's tables, of all samples.
        tables: This rank's tables, each ``[rows, width]``.
        columns: Number of columns of each rank's tables.
        distribution: What sends gradients to other ranks.
    """
    scale = bags.per_sample_weights
    if scale is None or not (torch.is_grad_enabled() and scale.requires_grad):
        return output
    learned: torch.Tensor = _SampleWeights.apply(  # type: ignore[no-untyped-call]
        output, scale, bags, columns, distribution, *(table.detach() for table in tables)
    )
    return learned


class _SampleWeights(torch.autograd.Function):
    """Pass pooled embeddings on, and give the gradient of the lookups' weights."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        scale: torch.Tensor,
        bags: Bags,
        columns: list[int],
        distribution: InputDistribution,
        *tables: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(bags.indices, bags.offsets, *tables)
        ctx.sizes, ctx.batch, ctx.columns = bags.sizes, bags.batch, columns
        ctx.distribution, ctx.dtype = distribution, scale.dtype
        return unviewed(output)

    @staticmethod
    @once_differentiable("ShardedEmbeddingBags")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        indices, offsets, *tables = ctx.saved_tensors
        group, samples = ctx.distribution.group, len(grad)
        packed = torch.cat([part.reshape(-1) for part in grad.split(ctx.columns, 1)])
        own_columns = ctx.columns[group.rank]
        received = ctx.distribution.all_to_all(
            packed,
            [samples * width for width in ctx.columns],
            [samples * own_columns] * group.world_size,
        ).view(ctx.batch, own_columns)
        parts = [grad.new_empty(0, dtype=ctx.dtype)]
        widths, lookups = [table.shape[1] for table in tables], indices.split(ctx.sizes)
        for number, (table, of_bags, rows, size) in enumerate(
            zip(tables, received.split(widths, 1), lookups, ctx.sizes, strict=True)
        ):
            bounds = offsets[number * ctx.batch : (number + 1) * ctx.batch + 1]
            of_lookups = of_bags.float().repeat_interleave(bounds.diff(), 0, output_size=size)
            products = torch.linalg.vecdot(of_lookups, table[rows].float())
            parts.append(products.to(ctx.dtype))
        return grad, torch.cat(parts), None, None, None, *([None] * len(tables))


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``x`` unchanged; the gradient that reaches ``x`` is multiplied by ``factor``.

    Args:
        x: Tensor of a floating-point dtype, any shape.
        factor: Of the gradient.
    """
    scaled: torch.Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaleGradient(torch.autograd.Function):
    """Return the input unchanged, and multiply its gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return unviewed(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None
