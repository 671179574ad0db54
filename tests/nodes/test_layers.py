"""Layers and a DLRM on two nodes: a step of training gives what it gives on one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.nn import (
    ColumnParallelLinear,
    EmbeddingTable,
    LinearCrossEntropyLoss,
    MoE,
    RowParallelLinear,
    ShardedEmbeddingBags,
)
from interlace_dlrm import DLRM, BatchStream, SyntheticClicks, Trainer
from tests.nodes.groups import process_group_of

_ROWS = (9, 17, 5, 12)


def _linears(group: dist.ProcessGroup, impl: str, sequence_parallel: bool) -> list[Any]:
    torch.manual_seed(5)
    first, second = torch.nn.Linear(12, 24), torch.nn.Linear(24, 20)
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "group": group}
    up = ColumnParallelLinear.from_linear(first, **options)
    down = RowParallelLinear.from_linear(second, **options)
    up.impl = down.impl = impl
    x = torch.randn(128, 12)
    if sequence_parallel:
        x = x.chunk(dist.get_world_size())[dist.get_rank()]
    x = x.clone().requires_grad_()
    y = down(torch.relu(up(x)))
    y.square().sum().backward()
    return [y.detach(), x.grad, *(each.grad for layer in (up, down) for each in layer.parameters())]


def _loss(group: dist.ProcessGroup, impl: str, sequence_parallel: bool) -> list[Any]:
    torch.manual_seed(5)
    linear = torch.nn.Linear(12, 23)  # the last of four ranks has a row of padding
    head = LinearCrossEntropyLoss.from_linear(
        linear, group, sequence_parallel=sequence_parallel, label_smoothing=0.1
    )
    head.impl = impl
    x, target = torch.randn(8, 12), torch.randint(23, (8,))
    if sequence_parallel:
        x = x.chunk(dist.get_world_size())[dist.get_rank()]
    x = x.clone().requires_grad_()
    loss = head(x, target)
    loss.backward()
    return [loss.detach(), x.grad, *(each.grad for each in head.parameters())]


def _experts(group: dist.ProcessGroup, impl: str) -> list[Any]:
    layer = MoE(16, 12, 4, 2, group=group, seed=5)
    layer.impl = impl
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(6, 16, generator=generator).requires_grad_()
    y, routing = layer(x)
    (y.square().sum() + routing.load_balancing_loss()).backward()
    return [y.detach(), x.grad, *(each.grad for each in layer.parameters())]


def _tables() -> list[EmbeddingTable]:
    return [EmbeddingTable(f"C{i}", rows, 4, bag_length=2) for i, rows in enumerate(_ROWS)]


def _bags(group: dist.ProcessGroup, impl: str) -> list[Any]:
    bags = ShardedEmbeddingBags(_tables(), group=group, gradient="dense", seed=3)
    bags.impl = impl
    generator = torch.Generator().manual_seed(dist.get_rank())
    indices = torch.cat([torch.randint(rows, (3 * 2,), generator=generator) for rows in _ROWS])
    y = bags(indices)
    y.square().sum().backward()
    return [y.detach(), *(each.grad for each in bags.parameters())]


def _dlrm(group: dist.ProcessGroup, impl: str) -> list[Any]:
    rank, ranks, samples = dist.get_rank(), dist.get_world_size(), 4
    model = DLRM(
        _tables(), group=group, bottom=(8,), top=(8,), seed=3, learning_rate=0.2,
        gradient="rowwise_adagrad",
    )  # fmt: skip
    model.embeddings.impl = impl
    trainer = Trainer(model, torch.optim.SGD(model.dense.parameters(), 0.1))
    stream = BatchStream(
        SyntheticClicks(2 * samples * ranks, cardinality=20), samples * ranks, rows=_ROWS,
        lookups=2, rank=rank, world_size=ranks,
    )  # fmt: skip
    losses = [trainer.step(batch).detach() for batch in stream]
    return [*losses, *(each.detach() for each in model.parameters())]


def _steps(step: Callable[..., list[Any]], arguments: tuple[Any, ...], nodes: int) -> list[Any]:
    with process_group_of(nodes) as group:
        assert interlace.group_of(group).nodes == nodes
        return step(group, *arguments)


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        (_linears, ("chunked", True)),
        (_linears, ("chunked", False)),
        (_linears, ("auto", True)),
        (_loss, ("auto", False)),
        (_loss, ("auto", True)),
        (_experts, ("auto",)),
        (_bags, ("auto",)),
        (_bags, ("fused",)),
        (_dlrm, ("auto",)),
        (_dlrm, ("fused",)),
    ],
)
def test_a_step_on_two_nodes_is_that_on_one(ranks: Any, step: Any, arguments: Any) -> None:
    between = ranks(4).run(_steps, step, arguments, 2)
    within = ranks(4).run(_steps, step, ("unfused", *arguments[1:]), 1)
    for ours, expected in zip(between, within, strict=True):
        assert len(ours) == len(expected) >= 2
        for result, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(result, other)
