"""Frozen parameters get no gradient and change no other, on all ranks or on some of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from interlace.nn import (
    ColumnParallelLinear,
    EmbeddingTable,
    LinearCrossEntropyLoss,
    MoE,
    RowParallelLinear,
    ShardedEmbeddingBags,
    UlyssesAttention,
)
from interlace_dlrm import DLRM
from interlace_dlrm.metrics import binary_cross_entropy

SIZE, TOKENS = 8, 4
TABLES = [EmbeddingTable(name, 6, 4, bag_length=1) for name in ("a", "b", "c", "d")]
INDICES = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1])  # of two samples


def _gradients(module: nn.Module, call: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    module.zero_grad(set_to_none=True)
    call().square().sum().backward()
    return {
        name: value.grad.to_dense()
        for name, value in module.named_parameters()
        if value.grad is not None
    }


def _layers(impl: str, on: str) -> dict[str, Any]:
    """Return, by layer, the names of parameters with wrong gradients."""
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {
        "column": ColumnParallelLinear(SIZE, SIZE),
        "row": RowParallelLinear(SIZE, SIZE),
        "column, sequence": ColumnParallelLinear(SIZE, SIZE, sequence_parallel=True),
        "row, sequence": RowParallelLinear(SIZE, SIZE, sequence_parallel=True),
        "loss": LinearCrossEntropyLoss(SIZE, 7, bias=True),
        "attention": UlyssesAttention(SIZE, 2, bias=True),
        "experts": MoE(SIZE, SIZE, 2, 1),
    }
    wrong = {}
    for name, layer in layers.items():
        layer.impl = impl
        x = torch.randn(TOKENS, SIZE // 2 if name.startswith("row") else SIZE, requires_grad=True)

        def call(layer: nn.Module = layer, x: torch.Tensor = x) -> torch.Tensor:
            y = layer(x, *([INDICES[:TOKENS]] if isinstance(layer, LinearCrossEntropyLoss) else []))
            gradients: torch.Tensor = y[0] if isinstance(y, tuple) else y
            return gradients

        full_gradients = _gradients(layer, call)
        x_grad, x.grad = x.grad, None
        assert x_grad is not None
        others = {"experts": {"w_in"}, "attention": {"qkv.weight", "out.weight"}}
        frozen = others.get(name, {"weight"})
        if on == "rank 0" and dist.get_rank() != 0:
            frozen = set()
        for parameter in frozen:
            layer.get_parameter(parameter).requires_grad_(False)
        gradients = _gradients(layer, call)
        assert x.grad is not None
        wrong[name] = [
            parameter_name
            for parameter_name in full_gradients
            if parameter_name not in frozen
            and not torch.equal(gradients[parameter_name], full_gradients[parameter_name])
        ]
        wrong[name] += [parameter_name for parameter_name in frozen if parameter_name in gradients]
        wrong[name] += [] if torch.equal(x.grad, x_grad) else ["x"]
    return wrong


@pytest.mark.parametrize("impl", ["fused", "unfused"])
@pytest.mark.parametrize("on", ["all ranks", "rank 0"])
def test_weights(ranks: Any, impl: str, on: str) -> None:
    for wrong in ranks(2).run(_layers, impl, on):
        assert not any(wrong.values()), wrong


def _bags(impl: str, gradient: str, prefix: str = "") -> ShardedEmbeddingBags:
    """Make bags whose tables have a prefix.

    Ranks remember by the tables' names which of them they train, so bags that are frozen otherwise
    need other names.
    """
    tables = [dataclasses.replace(table, name=f"{prefix}{table.name}") for table in TABLES]
    bags = ShardedEmbeddingBags(tables, gradient=gradient, learning_rate=0.5)
    bags.impl = impl
    return bags


def _tables(impl: str, gradient: str, frozen: tuple[str, ...]) -> list[str]:
    """Return the names of parameters that are wrong after a step."""
    prefix = f"{impl}-{gradient}-{''.join(frozen)}-"
    bags, free = _bags(impl, gradient, prefix), _bags(impl, gradient)
    before = {name: value.detach().clone() for name, value in bags.named_parameters()}
    trained = {}  # parameters of the frozen and the free bags, by the name among the former
    for (name, parameter), free_parameter in zip(
        bags.named_parameters(), free.parameters(), strict=True
    ):
        parameter.requires_grad_(not any(f"shards.{prefix}{table}:" in name for table in frozen))
        if parameter.requires_grad:
            trained[name] = (parameter, free_parameter)
    gradients = _gradients(bags, lambda: bags(INDICES))
    _gradients(free, lambda: free(INDICES))
    wrong = [
        name
        for name, value in bags.named_parameters()
        if name not in trained and not torch.equal(value, before[name])
    ]
    if gradient in ("sgd", "rowwise_adagrad"):
        return wrong + [
            name
            for name, pair in trained.items()
            if not torch.equal(*pair) or torch.equal(pair[0], before[name])
        ]
    wrong += sorted(set(gradients) ^ set(trained))
    for name, (_, free_parameter) in trained.items():
        if free_parameter.grad is None or not torch.equal(
            gradients[name], free_parameter.grad.to_dense()
        ):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    ("impl", "gradient"),
    [
        ("fused", "dense"),
        ("fused", "sparse"),
        ("fused", "sgd"),
        ("fused", "rowwise_adagrad"),
        ("unfused", "dense"),
        ("unfused", "sgd"),
    ],
)
@pytest.mark.parametrize("frozen", [("a",), ("first rank",)])
def test_tables(ranks: Any, impl: str, gradient: str, frozen: tuple[str, ...]) -> None:
    """One table is frozen, or all tables of one rank."""
    if frozen == ("first rank",):
        bags = ranks(2).run(_tables_of_the_first_rank)[0]
        frozen = tuple(bags)
        assert 0 < len(frozen) < len(TABLES)
    assert ranks(2).run(_tables, impl, gradient, frozen) == [[], []]


def _tables_of_the_first_rank() -> list[str]:
    return [shard.table.name for shard in ShardedEmbeddingBags(TABLES).plan.of_rank(0)]


def _model() -> dict[str, Any]:
    """Freeze parts of a DLRM after a step and thaw them again; tell, by part, if the gradients are
    right.
    """
    model = DLRM(
        TABLES, dense_features=SIZE, bottom=(4,), top=(4,), gradient="sgd", learning_rate=0.0
    )
    model.embeddings.impl = "unfused"
    x = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        binary_cross_entropy(model(x, INDICES), torch.ones(2)).backward()
        return {
            name: value.grad.clone()
            for name, value in model.dense.named_parameters()
            if value.grad is not None
        }

    full_gradients = step()
    outcomes = {}
    frozen = [name for name in full_gradients if name.startswith("bottom")]
    for name, which in (
        ("bottom", frozen),
        ("nothing", []),
        ("everything", list(full_gradients)),
        ("nothing again", []),
    ):
        for parameter, value in model.dense.named_parameters():
            value.requires_grad_(parameter not in which)
        gradients = step()
        equal = all(
            torch.equal(gradients[parameter_name], full_gradients[parameter_name])
            for parameter_name in gradients
        )
        outcomes[name] = equal and set(gradients) == set(full_gradients) - set(which)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, gradients)
    outcomes["gradients are the same on all ranks"] = all(
        torch.equal(gathered[0][parameter_name], gathered[1][parameter_name])
        for parameter_name in full_gradients
    )
    return outcomes


def test_parts_of_a_model(ranks: Any) -> None:
    """Gradients are added up once, whatever was frozen and thawed before."""
    for outcomes in ranks(2).run(_model):
        assert all(outcomes.values()), outcomes
