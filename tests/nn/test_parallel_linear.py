"""``ColumnParallelLinear`` and ``RowParallelLinear`` equal ``nn.Linear``: results, gradients and
state dicts.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import interlace
from interlace.nn import ColumnParallelLinear, RowParallelLinear, unsharded_state_dict
from tests.errors import error_of

IN, PARTS, OUT = 12, (16, 8), 20
# float32 sums of some hundred products: a few units in the last place.
TOLERANCE = 200**0.5 * torch.finfo(torch.float32).eps


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    assert result.shape == expected.shape
    return float((result.double() - expected).norm() / expected.norm())


def _mlp(bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(5)
    return nn.Linear(IN, sum(PARTS), bias), nn.Linear(PARTS[1], OUT, bias)


def _gated(hidden: torch.Tensor, parts: list[int]) -> torch.Tensor:
    """Multiply the second part by a sum of the first; the result is right only if parts are in
    order.
    """
    gate, up = hidden.split(parts, -1)
    return up * gate.unflatten(-1, (2, -1)).sum(-2)


def _compare(
    tokens: tuple[int, ...], bias: bool, sequence_parallel: bool, impl: str
) -> dict[str, float]:
    """Return the errors of an MLP's outputs and gradients against the full one in float64."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, second = _mlp(bias)
    up = ColumnParallelLinear.from_linear(first, parts=PARTS, sequence_parallel=sequence_parallel)
    down = RowParallelLinear.from_linear(second, sequence_parallel=sequence_parallel)
    up.impl = down.impl = impl
    x, grad = torch.randn(*tokens, IN), torch.randn(*tokens, OUT)
    exact = copy.deepcopy(first).double(), copy.deepcopy(second).double()
    x_exact = x.double().requires_grad_()
    # gate [.., 16] as 2 x 8 on one rank; sharded, a rank's gate is rows r * 8 to (r + 1) * 8 and
    # its up 4 columns.
    hidden = exact[0](x_exact)
    gate, value = hidden.split(PARTS, -1)
    pairs = [
        _gated(torch.cat([g, v], -1), [PARTS[0] // ranks, PARTS[1] // ranks])
        for g, v in zip(gate.chunk(ranks, -1), value.chunk(ranks, -1), strict=True)
    ]
    y_exact = exact[1](torch.cat(pairs, -1))
    y_exact.backward(grad.double())
    local = (
        slice(rank * tokens[0] // ranks, (rank + 1) * tokens[0] // ranks)
        if sequence_parallel
        else slice(None)
    )
    x_shard = x[local].clone().requires_grad_()
    y = down(_gated(up(x_shard), [part // ranks for part in PARTS]))
    y.backward(grad[local])
    assert x_exact.grad is not None
    assert x_shard.grad is not None
    errors = {"y": _error(y, y_exact[local]), "x": _error(x_shard.grad, x_exact.grad[local])}
    for layer, full in ((up, exact[0]), (down, exact[1])):
        for name, parameter in layer.named_parameters():
            expected = getattr(full, name).grad
            expected = layer.shard_of(expected) if name in layer._sharded() else expected
            errors[f"{type(layer).__name__} {name}"] = _error(parameter.grad, expected)
    return errors


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("tokens", "bias", "impl"),
    [((4, 3), True, "auto"), ((128,), True, "unfused"), ((2, 3, 2), False, "unfused")],
)
def test_two_ranks_match_the_full_layers(
    ranks: Any, tokens: Any, bias: bool, sequence_parallel: bool, impl: str
) -> None:
    """Few tokens and many run different operators."""
    for errors in ranks(2).run(_compare, tokens, bias, sequence_parallel, impl):
        assert max(errors.values()) < TOLERANCE, errors


def _in_place(kind: Any, sequence_parallel: bool, is_invariant: bool) -> list[bool]:
    """Whether gradients are as they are where a new tensor takes the result's place."""
    torch.manual_seed(5)
    layer, found = kind(IN, OUT, sequence_parallel=sequence_parallel), []
    for shape in ([4], [2, 3], []):
        if sequence_parallel and not shape:
            continue
        gradients = []
        for inplace in (True, False):
            x = torch.ones(*shape, layer.weight.shape[1], requires_grad=True)
            with interlace.batch_invariant(enabled=is_invariant):
                y = nn.functional.relu(layer(x), inplace)
                y.square().sum().backward()
            gradients.append(x.grad)
        found.append(torch.equal(*gradients))
    return found


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_results_may_be_modified_in_place(
    ranks: Any, kind: Any, sequence_parallel: bool, is_invariant: bool
) -> None:
    for found in ranks(2).run(_in_place, kind, sequence_parallel, is_invariant):
        assert all(found), found


def _penalty(first: nn.Module, second: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the squared norm of the gradients of x and of the weights."""
    inputs = [x, first.weight, second.weight]
    gradients = torch.autograd.grad(
        second(first(x).tanh()).square().sum(), inputs, create_graph=True
    )
    return list(torch.autograd.grad([gradient.square().sum() for gradient in gradients], inputs))


def _second_derivatives(sequence_parallel: bool, impl: str) -> list[float]:
    """Return the errors of an MLP's second derivatives against the full one in float64."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    first, second = nn.Linear(IN, 8), nn.Linear(8, OUT)
    x = torch.randn(4, IN)
    up = ColumnParallelLinear.from_linear(first, sequence_parallel=sequence_parallel)
    down = RowParallelLinear.from_linear(second, sequence_parallel=sequence_parallel)
    up.impl = down.impl = impl
    rows = slice(2 * rank, 2 * rank + 2) if sequence_parallel else slice(None)
    result = _penalty(up, down, x[rows].clone().requires_grad_())
    expected = _penalty(first.double(), second.double(), x.double().requires_grad_())
    expected = [expected[0][rows], up.shard_of(expected[1]), down.shard_of(expected[2])]
    return [_error(a, b) for a, b in zip(result, expected, strict=True)]


@pytest.mark.parametrize("impl", ["fused", "unfused"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_second_derivatives(ranks: Any, sequence_parallel: bool, impl: str) -> None:
    for errors in ranks(2).run(_second_derivatives, sequence_parallel, impl):
        assert max(errors) < TOLERANCE, errors


def _compiled(autocast: bool) -> bool:
    torch.manual_seed(1)
    layers = nn.Sequential(ColumnParallelLinear(IN, 8), nn.ReLU(), RowParallelLinear(8, OUT))
    for layer in layers:
        layer.impl = "unfused"
    x, gradients = torch.randn(3, IN), []

    def call(argument: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return layers(argument)

    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        layers.zero_grad()
        argument = x.clone().requires_grad_()
        function(argument).square().sum().backward()
        gradients.append([argument.grad, *(parameter.grad for parameter in layers.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_into_one_graph(ranks: Any, autocast: bool) -> None:
    assert ranks(2).run(_compiled, autocast) == [True, True]


def _model(parallel: bool) -> nn.Module:
    torch.manual_seed(9)
    if parallel:
        return nn.Sequential(
            ColumnParallelLinear(IN, sum(PARTS), parts=PARTS),
            nn.ReLU(),
            RowParallelLinear(sum(PARTS), OUT),
        )
    return nn.Sequential(nn.Linear(IN, sum(PARTS)), nn.ReLU(), nn.Linear(sum(PARTS), OUT))


def _save(full: dict[str, torch.Tensor]) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    """Return the full state dict of a sharded model, and again after ``full`` was loaded.

    The first result tells if the rank's own shards load as they are.
    """
    model = _model(parallel=True)
    # Parameters that are not sharded are in the state dict themselves, so it must be copied.
    saved = copy.deepcopy(unsharded_state_dict(model))
    shard = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(full)
    again = copy.deepcopy(unsharded_state_dict(model))
    model.load_state_dict(shard)  # a rank's own shards load as they are
    return (
        all(
            torch.equal(a, b)
            for a, b in zip(shard.values(), model.state_dict().values(), strict=True)
        ),
        saved,
        again,
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_state_dicts_are_those_of_full_layers_on_any_number_of_ranks(
    ranks: Any, world_size: int
) -> None:
    drawn = _model(parallel=False).state_dict()
    random_state = {name: torch.randn_like(value) for name, value in drawn.items()}
    for equal, full, again in ranks(world_size).run(_save, random_state):
        assert equal
        for result, expected in ((full, drawn), (again, random_state)):
            assert result.keys() == expected.keys()
            assert all(torch.equal(result[name], expected[name]) for name in expected)
            _model(parallel=False).load_state_dict(result)


def _refused() -> list[str]:
    up = ColumnParallelLinear(IN, 8, sequence_parallel=True)
    down = RowParallelLinear(8, OUT, sequence_parallel=True)
    attempts = [
        lambda: ColumnParallelLinear(IN, 9),
        lambda: ColumnParallelLinear(IN, 8, parts=(5, 3)),
        lambda: ColumnParallelLinear(IN, 8, parts=(4, 3)),
        lambda: up(torch.zeros(IN)),
        lambda: down(torch.zeros(3, 2, 4)),
    ]
    return [(error_of(attempt) or ("", "nothing"))[1] for attempt in attempts]


def test_rejected(ranks: Any) -> None:
    for messages in ranks(2).run(_refused):
        assert messages == [
            "ColumnParallelLinear: out_features must divide evenly over 2 ranks; got 9. Pad the "
            "layer to 10 output features with "
            "zeros, or use a group whose size divides 9.",
            "ColumnParallelLinear: parts must divide evenly over 2 ranks; got 5. Pad the layer to "
            "6 output features with zeros, "
            "or use a group whose size divides 5.",
            "ColumnParallelLinear: parts must be positive and sum to out_features, 8; got [4, 3].",
            "ColumnParallelLinear: x must be [sequence, ..., 12]; got shape [12].",
            "RowParallelLinear: the first dimension of x must be the sequence and divide evenly "
            "over 2 ranks under "
            "sequence_parallel; got shape [3, 2, 4]. Pad the sequence.",
        ]
    assert repr(interlace.nn.ColumnParallelLinear(4, 6)) == (
        "ColumnParallelLinear(in_features=4, out_features=6, bias=True, rank=0 of 1, impl=auto)"
    )


def _other_dtypes() -> list[tuple[str, str]]:
    """Errors of forward passes, of layers made in float64 and of one that became it later."""
    size, options = 4 * dist.get_world_size(), {"dtype": torch.float64}
    layers: list[nn.Module] = [
        ColumnParallelLinear(size, size, **options),
        ColumnParallelLinear(size, size, **options, sequence_parallel=True),
        RowParallelLinear(size, size, **options),
        RowParallelLinear(size, size, **options, sequence_parallel=True),
        interlace.nn.MoE(size, size, experts=4, **options),
        ColumnParallelLinear(size, size).double(),
    ]
    inputs = [4 if isinstance(layer, RowParallelLinear) else size for layer in layers]
    errors = [
        error_of(layer, torch.ones(2, columns, dtype=torch.float64))
        for layer, columns in zip(layers, inputs, strict=True)
    ]
    return [error[:2] if error is not None else ("", "nothing") for error in errors]


def test_a_dtype_that_operators_do_not_have_is_refused_in_the_forward_pass(ranks: Any) -> None:
    for errors in ranks(2).run(_other_dtypes):
        names = ["ColumnParallelLinear"] * 2 + ["RowParallelLinear"] * 2
        assert errors == [
            (
                "ArgumentError",
                f"{name}: x and weight must be float16, bfloat16 or float32; got torch.float64.",
            )
            for name in [*names, "MoE", "ColumnParallelLinear"]
        ]


def test_another_device_is_refused_in_the_forward_pass() -> None:
    layer, x = ColumnParallelLinear(IN, 8), torch.ones(2, IN, device="meta")
    assert error_of(layer, x)[1] == (
        "ColumnParallelLinear: x must be on the device of the weight, cpu; got meta."
    )


def _assigned() -> list[tuple[bool, int]]:
    """Of a full weight that became a layer's: whether it is right, and the bytes it has."""
    full, found = torch.arange(32.0).view(8, 4), []
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(4, 8, bias=False, device="meta")
        layer.load_state_dict({"weight": full}, assign=True)
        same = torch.equal(layer.weight, layer.shard_of(full))
        found.append((same, layer.weight.untyped_storage().nbytes()))
    return found


def test_an_assigned_state_dict_leaves_the_shard_alone_in_memory(ranks: Any) -> None:
    assert ranks(2).run(_assigned) == [[(True, 64), (True, 64)]] * 2


def _transformed() -> tuple[list[Any], bool]:
    """Errors of transforms that need gradients, and whether those without give what a loop does."""
    layer, x = ColumnParallelLinear(IN, 8), torch.randn(3, 2, IN)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(x).sum()

    errors = [
        error_of(torch.func.grad(loss), x),
        error_of(torch.func.jacrev(layer), x),
        error_of(torch.func.vmap(layer), x),
        error_of(lambda: torch.func.jvp(layer, (x,), (x,))),
    ]
    with torch.no_grad():
        expected = torch.stack([layer(part) for part in x])
        same = torch.allclose(torch.func.vmap(layer)(x), expected)
        y, tangent = torch.func.jvp(layer, (x,), (x,))
    same = same and torch.allclose(y, expected)
    return errors, same and torch.allclose(tangent, x @ layer.weight.mT, atol=1e-6)


def test_transforms_of_torch_func(ranks: Any) -> None:
    for errors, same in ranks(2).run(_transformed):
        for error in errors:
            assert error is not None
            assert error[0] == "ArgumentError"
            assert error[1].startswith(
                "ColumnParallelLinear: this layer cannot be differentiated by torch.func; got a "
            )
        assert same


def _distributed_input() -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.ones(2, IN), mesh, [Replicate()])
    return [error_of(ColumnParallelLinear(IN, 8), x)]


def test_a_distributed_tensor_is_refused(ranks: Any) -> None:
    for (error,) in ranks(2).run(_distributed_input):
        assert error is not None
        assert error[0] == "ArgumentError"
        assert error[1].startswith("ColumnParallelLinear: x must be this rank's tensor; got a DT")
