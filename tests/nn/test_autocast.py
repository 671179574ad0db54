"""Under autocast, layers have the dtypes of torch's own layers, forward and backward, on every
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from interlace.nn import (
    ColumnParallelLinear,
    EmbeddingTable,
    MoE,
    RowParallelLinear,
    ShardedEmbeddingBags,
)
from interlace_dlrm import DLRM
from interlace_dlrm.metrics import binary_cross_entropy

SIZE, TOKENS = 16, 4
TABLES = [EmbeddingTable(name, 6, 4, bag_length=1) for name in ("a", "b")]


def _step(
    call: Callable[[torch.Tensor], Any], x: torch.Tensor, parameters: list[nn.Parameter]
) -> dict[str, Any]:
    """Do one step under autocast.

    The result holds the dtypes of y and of the gradients, and their values.
    """
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = call(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return {
        "y": y.dtype,
        "x.grad": x.grad.dtype,
        "grads": {p.grad.dtype if p.grad is not None else None for p in parameters},
        "values": (y.detach(), x.grad, [p.grad for p in parameters]),
    }


def linear(kind: str, inputs: torch.dtype, impl: str, device: str = "cpu") -> list[str]:
    """Compare a sharded layer's step with the full ``nn.Linear``, cut to this rank's shard.

    The result names the differences.
    """
    torch.manual_seed(0)
    rank, sequence_parallel = dist.get_rank(), kind.endswith("sequence")
    full = nn.Linear(SIZE, SIZE).to(device)
    kinds: Any = ColumnParallelLinear if kind.startswith("column") else RowParallelLinear
    layer = kinds.from_linear(full, sequence_parallel=sequence_parallel)
    layer.impl = impl
    x = torch.randn(TOKENS, SIZE).to(inputs).to(device)
    rows = slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2) if sequence_parallel else slice(None)
    columns = slice(rank * SIZE // 2, (rank + 1) * SIZE // 2)
    of_x, of_y = ((rows, slice(None)), (slice(None), columns))
    if kind.startswith("row"):
        of_x, of_y = of_y, of_x
    sharded = _step(layer, x[of_x], list(layer.parameters()))
    full_step = _step(full, x, list(full.parameters()))
    y, x_grad, (w_grad, bias_grad) = full_step["values"]
    bias_grad = layer.shard_of(bias_grad) if kind.startswith("column") else bias_grad
    exact = {"y": y[of_y], "x": x_grad[of_x], "weight": layer.shard_of(w_grad), "bias": bias_grad}
    y, x_grad, (w_grad, bias_grad) = sharded["values"]
    wrong = [
        f"{name} {sharded[name]} {full_step[name]}"
        for name in ("y", "x.grad", "grads")
        if sharded[name] != full_step[name]
    ]
    for (name, a), b in zip(exact.items(), (y, x_grad, w_grad, bias_grad), strict=True):
        if (b.float() - a.float()).norm() > 4 * torch.finfo(torch.bfloat16).eps * a.float().norm():
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("impl", ["fused", "unfused"])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["column", "row", "column, sequence", "row, sequence"])
def test_linear_layers(ranks: Any, kind: str, inputs: torch.dtype, impl: str) -> None:
    assert ranks(2).run(linear, kind, inputs, impl) == [[], []]


def _experts(inputs: torch.dtype, impl: str) -> dict[str, Any]:
    layer = MoE(SIZE, SIZE, 2, 1)
    layer.impl = impl
    x = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(dist.get_rank())).to(
        inputs
    )
    layer(x.float())[0].sum().backward()
    wide = [
        parameter.grad.clone()
        for parameter in (layer.w_in, layer.w_out)
        if parameter.grad is not None
    ]
    layer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = layer(x)
    exact, _ = layer(x.float())
    y.float().sum().backward()
    grads = [
        parameter.grad for parameter in (layer.w_in, layer.w_out) if parameter.grad is not None
    ]
    pairs = [(y, exact), *zip(grads, wide, strict=True)]
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in pairs]
    return {
        "y": y.dtype,
        "grads": {p.grad.dtype for p in layer.parameters() if p.grad is not None},
        "errors": errors,
    }


@pytest.mark.parametrize("impl", ["fused", "unfused"])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_experts(ranks: Any, inputs: torch.dtype, impl: str) -> None:
    """Experts compute in autocast's dtype, the router's weights stay float32."""
    for sharded in ranks(2).run(_experts, inputs, impl):
        assert sharded["y"] == torch.bfloat16
        assert sharded["grads"] == {torch.float32}
        assert max(sharded["errors"]) < 10 * torch.finfo(torch.bfloat16).eps


def _model(impl: str) -> dict[str, Any]:
    """Return a DLRM's dtypes under autocast, and its loss beside the loss without autocast."""
    model = DLRM(TABLES, dense_features=SIZE, bottom=(8,), top=(8,))
    model.embeddings.impl = impl
    x, indices, labels = torch.randn(TOKENS, SIZE), torch.arange(2 * TOKENS) % 6, torch.ones(TOKENS)
    plain = binary_cross_entropy(model(x, indices), labels)
    bags = model.embeddings(indices)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        unchanged = torch.equal(model.embeddings(indices), bags)
        logits = model(x, indices)
        loss = binary_cross_entropy(logits.float(), labels)
    loss.backward()
    return {
        "bags": unchanged,
        "logits": logits.dtype,
        "grads": {
            parameter.grad is not None and parameter.grad.dtype for parameter in model.parameters()
        },
        "error": abs(float(loss) - float(plain)),
    }


@pytest.mark.parametrize("impl", ["fused", "unfused"])
def test_embeddings_and_the_model(ranks: Any, impl: str) -> None:
    """Bags keep their output's dtype, as ``nn.EmbeddingBag`` does; the matrix products have
    autocast's dtype.
    """
    for sharded in ranks(2).run(_model, impl):
        assert sharded["bags"]
        assert sharded["logits"] == torch.bfloat16
        assert sharded["grads"] == {torch.float32}
        assert sharded["error"] < 0.05


def _bags() -> set[torch.dtype]:
    bags = ShardedEmbeddingBags(TABLES)
    indices = torch.arange(2 * TOKENS) % 6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = bags(indices)
        loss = torch.mm(y, y.T).float().sum()
    loss.backward()
    return {
        y.dtype,
        *(weight.grad.dtype for weight in bags.parameters() if weight.grad is not None),
    }


def test_bags_before_a_product_in_a_lower_dtype(ranks: Any) -> None:
    assert ranks(2).run(_bags) == [{torch.float32}] * 2
