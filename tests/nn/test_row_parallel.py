"""``interlace.nn.RowParallelLinear`` equals ``nn.Linear`` with its input features sharded over
ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import interlace
from interlace.nn import RowParallelLinear

IN, OUT = 48, 20
LEADING = ((), (3,), (2, 5))


def test_single_process_is_the_whole_layer() -> None:
    torch.manual_seed(3)
    full = nn.Linear(IN, OUT)
    torch.manual_seed(3)
    sharded = RowParallelLinear(IN, OUT)
    assert torch.equal(sharded.weight, full.weight)
    assert sharded.bias is not None
    assert torch.equal(sharded.bias, full.bias)
    assert {name: p.shape for name, p in sharded.state_dict().items()} == {
        "weight": (OUT, IN),
        "bias": (OUT,),
    }
    assert (
        repr(sharded)
        == "RowParallelLinear(in_features=48, out_features=20, bias=True, rank=0 of 1, impl=auto)"
    )


def test_explain_names_the_choice() -> None:
    text = interlace.explain("gemv_all_reduce", torch.zeros(2, 8), torch.zeros(5, 8))
    assert text.startswith("gemm_all_reduce of x [2, 8] and w [5, 8], float32, on 1 rank: gemv (")
    assert "because" in text


def test_explain_refuses_what_the_operator_refuses() -> None:
    with pytest.raises(
        interlace.ArgumentError, match=r"operator must be one of all_gather_gemm, .*; got 'gemv'\."
    ):
        interlace.explain("gemv", torch.zeros(8), torch.zeros(5, 8))
    with pytest.raises(interlace.ArgumentError, match="same last dimension"):
        interlace.explain("gemv_all_reduce", torch.zeros(7), torch.zeros(5, 8))


def test_sizes_must_be_positive() -> None:
    with pytest.raises(interlace.ArgumentError, match="must be positive"):
        RowParallelLinear(0, OUT)


def test_from_linear_keeps_flags_and_copies() -> None:
    full = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16).eval()
    full.weight.requires_grad_(False)
    sharded = RowParallelLinear.from_linear(full)
    assert sharded.bias is None
    assert not sharded.training
    assert not sharded.weight.requires_grad
    assert sharded.weight.dtype is torch.bfloat16
    assert sharded.weight.data_ptr() != full.weight.data_ptr()


def _compare() -> dict[str, Any]:
    """Return the errors of output and gradients against the full layer in float64."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    columns = slice(rank * IN // world_size, (rank + 1) * IN // world_size)
    torch.manual_seed(7)
    full = nn.Linear(IN, OUT)
    torch.manual_seed(7)
    drawn = RowParallelLinear(IN, OUT)
    outcome: dict[str, Any] = {
        "drawn": bool(torch.equal(drawn.weight, full.weight[:, columns])),
        "errors": {},
    }
    sharded = RowParallelLinear.from_linear(full)
    exact = copy.deepcopy(full).double()
    for leading in LEADING:
        x = torch.randn(*leading, IN)
        grad = torch.randn(*leading, OUT)
        x_exact = x.double().requires_grad_()
        x_shard_k = x[..., columns].clone().requires_grad_()
        exact.zero_grad()
        sharded.zero_grad()
        y_exact = exact(x_exact)
        y = sharded(x_shard_k)
        y_exact.backward(grad.double())
        y.backward(grad)
        assert x_exact.grad is not None
        assert x_shard_k.grad is not None
        assert sharded.bias is not None
        pairs = {
            "y": (y, y_exact),
            "x": (x_shard_k.grad, x_exact.grad[..., columns]),
            "weight": (sharded.weight.grad, exact.weight.grad[:, columns]),  # type: ignore[index]
            "bias": (sharded.bias.grad, exact.bias.grad),
        }
        for name, (got, expected) in pairs.items():
            assert got is not None
            assert expected is not None
            assert got.shape == expected.shape
            outcome["errors"][f"{name} {leading}"] = float(
                (got - expected).norm() / expected.norm()
            )
    sharded.impl = "unfused"
    outcome["errors"]["unfused"] = float((sharded(x_shard_k) - y_exact).norm() / y_exact.norm())
    outcome["refused"] = []
    for attempt in (lambda: RowParallelLinear(IN + 1, OUT), lambda: sharded(x)):
        try:
            attempt()
        except interlace.ArgumentError as error:
            outcome["refused"].append(str(error))
    return outcome


def test_two_ranks_match_the_full_layer(ranks: Any) -> None:
    for outcome in ranks(2).run(_compare):
        assert outcome["drawn"], "the same seed must give the shards of nn.Linear's weight"
        # float32 sums of at most 48 products: a few units in the last place.
        assert max(outcome["errors"].values()) < 48**0.5 * torch.finfo(torch.float32).eps, outcome[
            "errors"
        ]
        uneven, not_sharded = outcome["refused"]
        assert uneven.startswith(
            "RowParallelLinear: in_features must divide evenly over 2 ranks; got 49."
        )
        assert "Pad the layer to 50 input features" in uneven
        assert not_sharded.startswith(
            "RowParallelLinear: x must be this rank's features, [..., 24], of 48 in all"
        )
