"""Derivatives of every operator are right or refused: second ones, forward mode, vmap, autocast,
operands of mixed dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import interlace
import interlace.operators  # registers torch.ops.interlace
from interlace.registry import find_operator
from tests.errors import error_of

ROWS, COLUMNS, INNER = 5, 4, 3
UNEVEN = (3, 2)
SUMMED = ("gemm_all_reduce", "gemv_all_reduce", "gemm_reduce_scatter")


def _named(function: str) -> str:
    """The operator that a public function enters."""
    declaration = find_operator(function)
    return function if declaration is None else declaration.name


def _inputs(ranks: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Every rank's x and w, and a bias that all have."""
    generator = torch.Generator().manual_seed(3)
    x = [torch.randn(ROWS, INNER, generator=generator) for _ in range(ranks)]
    w = [torch.randn(COLUMNS, INNER, generator=generator) for _ in range(ranks)]
    return x, w, torch.randn(COLUMNS, generator=generator)


def _options(operator: str, rank: int) -> dict[str, Any]:
    if operator == "gemm_reduce_scatter":
        return {"splits": UNEVEN}
    if operator == "gemm_all_to_all":
        # Two rows from rank 0 to itself and three to rank 1; one and four from rank 1.
        return {"input_splits": [[2, 3], [1, 4]][rank], "output_splits": [[2, 1], [3, 4]][rank]}
    return {}


def _penalty(y: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Gradients of the squared norm of the gradients of ``sum(y^3)``."""
    first = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
    return torch.autograd.grad(
        sum((grad.square().sum() for grad in first), start=y.new_zeros(())), inputs
    )


def _exact(operator: str) -> list[tuple[torch.Tensor, ...]]:
    """What :func:`_penalty` gives for each rank's x and w, in float64 and in one process."""
    x, w, bias = _inputs(2)
    inputs = tuple(tensor.double().requires_grad_() for tensor in (*x, *w))
    wide_x, wide_w = inputs[:2], inputs[2:]
    if operator in SUMMED:
        y = [wide_x[0] @ wide_w[0].T + wide_x[1] @ wide_w[1].T + bias.double()]
    elif operator == "all_gather_gemm":
        y = [torch.cat(wide_x) @ each.T for each in wide_w]
    else:
        # The all-to-all puts rows elsewhere, and that is all
        y = [a @ b.T for a, b in zip(wide_x, wide_w, strict=True)]
    found = _penalty(torch.cat(y), inputs)
    return [(found[rank], found[2 + rank]) for rank in range(2)]


def second_derivatives(operator: str, impl: str, device: str = "cpu") -> list[float]:
    """On a rank: errors of the second derivatives with respect to x and w."""
    rank = dist.get_rank()
    xs, ws, bias = _inputs(2)
    x, w = xs[rank].to(device).requires_grad_(), ws[rank].to(device).requires_grad_()
    options = _options(operator, rank) | ({"bias": bias.to(device)} if operator in SUMMED else {})
    found = _penalty(getattr(interlace, operator)(x, w, impl=impl, **options), (x, w))
    wanted = _exact(operator)[rank]
    return [float((a.cpu() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("impl", ["fused", "unfused"])
@pytest.mark.parametrize("operator", [*SUMMED, "all_gather_gemm", "gemm_all_to_all"])
def test_second_derivatives(ranks: Any, operator: str, impl: str) -> None:
    for errors in ranks(2).run(second_derivatives, operator, impl):
        assert max(errors) < 200 * torch.finfo(torch.float32).eps, errors


def _calls() -> dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]]:
    """For each operator that has a gradient: a call as a function of one of its arguments, and that
    argument.
    """
    rank = dist.get_rank()
    xs, ws, _ = _inputs(2)
    x, w = xs[rank], ws[rank]
    calls: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
        name: (
            lambda x, name=name: getattr(interlace, name)(
                x, w, impl="unfused", **_options(name, rank)
            ),
            x,
        )
        for name in (*SUMMED, "all_gather_gemm", "gemm_all_to_all")
    }
    experts, weights = torch.tensor([[0]] * ROWS), torch.ones(ROWS, 1)
    w_in, w_out = torch.randn(1, COLUMNS, 2, INNER), torch.randn(1, INNER, COLUMNS)
    calls["mixture_of_experts"] = (
        lambda w_in: interlace.mixture_of_experts(x, experts, weights, w_in, w_out, impl="unfused"),
        w_in,
    )
    indices, offsets = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 3, 4])
    calls["embedding_all_to_all"] = (
        lambda table: interlace.embedding_all_to_all([table], indices, offsets, impl="unfused"),
        torch.randn(ROWS, COLUMNS),
    )
    return calls


def _refused_twice(operator: str) -> tuple[bool, Any]:
    """On a rank: whether the first derivative is a tensor of numbers where its graph is kept; the
    second one's error.
    """
    call, argument = _calls()[operator]
    argument.requires_grad_()
    (first,) = torch.autograd.grad(call(argument).pow(2).sum(), argument, create_graph=True)
    return bool(first.isfinite().all()), error_of(
        lambda: torch.autograd.grad(first.pow(2).sum(), argument)
    )


@pytest.mark.parametrize("operator", ["mixture_of_experts", "embedding_all_to_all"])
def test_second_derivatives_that_are_refused(ranks: Any, operator: str) -> None:
    for finite, error in ranks(2).run(_refused_twice, operator):
        assert finite
        assert error[0] == "ArgumentError"
        assert error[1].startswith(
            f"{operator}: this operator cannot be differentiated twice; got a second derivative."
        )


def _updates_with_the_graph_kept() -> list[bool]:
    table = torch.ones(ROWS, COLUMNS, requires_grad=True)
    indices, offsets = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 3, 4])
    y = interlace.embedding_all_to_all([table], indices, offsets, gradient=interlace.optim.SGD(1.0))
    torch.autograd.grad(y.sum(), y, create_graph=True)
    y.sum().backward(create_graph=True)
    return [bool((row == 1).all()) for row in table.detach()]


def test_a_fused_update_where_the_graph_is_kept(ranks: Any) -> None:
    """Rows 0 to 2 of every table were used; they are updated once."""
    for unchanged in ranks(2).run(_updates_with_the_graph_kept):
        assert unchanged == [False, False, False, True, True]


def _forward_mode() -> dict[str, Any]:
    outcomes = {}
    for name, (call, argument) in _calls().items():
        tangent = torch.ones_like(argument)
        found = [error_of(lambda: torch.func.jvp(call, (argument,), (tangent,)))]  # noqa: B023
        for requires_grad in (False, True):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(argument.clone().requires_grad_(requires_grad), tangent)
                found.append(error_of(call, dual))
                y = call(argument)  # an argument without a tangent, at the same time
                assert forward_ad.unpack_dual(y).tangent is None
        outcomes[name] = found
    return outcomes


def test_forward_mode_is_refused(ranks: Any) -> None:
    for outcomes in ranks(2).run(_forward_mode):
        assert len(outcomes) == 7
        for operator, errors in outcomes.items():
            for error in errors:
                assert error is not None, operator
                assert error[0] == "ArgumentError"
                assert error[1].startswith(
                    f"{_named(operator)}: this operator cannot be differentiated in forward mode; "
                    "got an argument with a tangent."
                )


def _by_torch_func() -> dict[str, Any]:
    return {
        name: error_of(torch.func.grad(lambda value: call(value).sum()), argument)  # noqa: B023
        for name, (call, argument) in _calls().items()
    }


def test_gradients_by_torch_func_are_refused(ranks: Any) -> None:
    for errors in ranks(2).run(_by_torch_func):
        for operator, error in errors.items():
            assert error is not None, operator
            assert error[0] == "ArgumentError"
            assert error[1].startswith(
                f"{_named(operator)}: this operator cannot be differentiated by "
            )


def _checkpointed() -> dict[str, bool]:
    outcomes = {}
    for name, (call, argument) in _calls().items():
        x = argument.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(call(x).sum(), x)
        for reentrant in (False, True):
            y = checkpoint(call, x, use_reentrant=reentrant)
            y.sum().backward()
            outcomes[f"{name}, {reentrant=}"] = torch.equal(x.grad, wanted)
            x.grad = None
    return outcomes


def test_activation_checkpoints(ranks: Any) -> None:
    """The non-reentrant one ends the second forward pass by an exception, which unwinds torch's C++
    while it holds results in symmetric memory.
    """
    for outcomes in ranks(2).run(_checkpointed):
        assert all(outcomes.values()), outcomes


def _without_a_gradient() -> dict[str, Any]:
    """On a rank: errors of the operators that the pass for ``torch.compile`` makes, if they are
    called with autograd.
    """
    name, ops = dist.group.WORLD.group_name, torch.ops.interlace
    x, w = torch.randn(4, INNER, requires_grad=True), torch.randn(COLUMNS, INNER)
    calls: dict[str, Callable[[], Any]] = {
        "gemm_sum_reduce_scatter": lambda: ops.gemm_sum_reduce_scatter([x], [w], name),
    }
    outcomes = {}
    for operator, call in calls.items():
        with torch.no_grad():
            call()
            with forward_ad.dual_level():
                outcomes[f"{operator} in forward mode"] = error_of(call)
        outcomes[operator] = error_of(call)
    return outcomes


def test_operators_without_a_gradient_say_so(ranks: Any) -> None:
    for outcomes in ranks(2).run(_without_a_gradient):
        assert len(outcomes) == 2
        for name, error in outcomes.items():
            assert error is not None, name
            assert error[0] == "ArgumentError"
            assert error[1].startswith(f"{name.split()[0]}: this operator cannot be differentiated")


def _mapped_over() -> dict[str, bool]:
    """On a rank: whether ``vmap`` gives what a loop does."""
    outcomes = {}
    for name, (call, argument) in _calls().items():
        batch = torch.stack([argument, -2 * argument, argument.square()])
        wanted = torch.stack([call(each) for each in batch])
        if (
            name == "embedding_all_to_all"
        ):  # torch has no vmap for operators that take lists of tensors, and says so
            with pytest.raises(RuntimeError, match="Batching rule not implemented"):
                torch.func.vmap(call)(batch)
        else:
            outcomes[name] = torch.equal(torch.func.vmap(call)(batch), wanted)
    return outcomes


def test_vmap(ranks: Any) -> None:
    for outcomes in ranks(2).run(_mapped_over):
        assert len(outcomes) == 6
        assert all(outcomes.values()), outcomes


def _under_autocast() -> dict[str, bool]:
    outcomes = {}
    for name, (call, argument) in _calls().items():
        plain = call(argument)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = call(argument)
        outcomes[name] = cast.dtype == plain.dtype and torch.equal(cast, plain)
    return outcomes


def test_autocast_does_not_reach_into_an_operator(ranks: Any) -> None:
    """An operator computes in the dtypes of its arguments, whichever implementation runs."""
    for outcomes in ranks(2).run(_under_autocast):
        assert all(outcomes.values()), outcomes


def _mixed() -> dict[str, Any]:
    name, ops, no = dist.group.WORLD.group_name, torch.ops.interlace, None
    float32, bfloat16 = torch.float32, torch.bfloat16
    x, w = torch.randn(4, INNER, dtype=bfloat16), torch.randn(COLUMNS, INNER)
    w_in, w_out = torch.randn(1, COLUMNS, 2, INNER), torch.randn(1, INNER, COLUMNS)
    experts, weights = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    bias = torch.zeros(COLUMNS)
    calls: dict[str, Callable[[], Any]] = {
        "gemm_all_reduce": lambda: ops.gemm_all_reduce(x, w, no, no, no, float32, name, "auto", ""),
        "gemm_all_reduce with bias": lambda: ops.gemm_all_reduce(
            x, w.bfloat16(), bias, no, no, bfloat16, name, "auto", ""
        ),
        "gemm_reduce_scatter": lambda: ops.gemm_reduce_scatter(
            x, w, no, no, no, no, float32, name, "auto", ""
        ),
        "gemm_sum_reduce_scatter": lambda: ops.gemm_sum_reduce_scatter([x], [w], name),
        "all_gather_gemm": lambda: ops.all_gather_gemm(
            x, w, no, no, no, no, float32, False, name, "auto", ""
        ),
        "gemm_all_to_all": lambda: ops.gemm_all_to_all(
            x, w, no, no, no, no, no, float32, name, "auto", ""
        ),
        "mixture_of_experts": lambda: ops.mixture_of_experts(
            x,
            experts,
            weights,
            w_in,
            w_out,
            no,
            no,
            no,
            no,
            2,
            4,
            name,
            "auto",
            "",
            "",
            False,
            False,
        ),
    }
    for plain in (x, w):  # calls of one dtype, which must not be taken for these
        ops.gemm_all_reduce(plain, w.to(plain.dtype), no, no, no, plain.dtype, name, "auto", "")
    return {name: error_of(call) for name, call in calls.items()}


def test_operands_of_mixed_dtypes_are_refused_by_every_operator(ranks: Any) -> None:
    """Also without the ``api`` functions, as gradients call them."""
    for errors in ranks(2).run(_mixed):
        for name, error in errors.items():
            assert error is not None, name
            assert error[0] == "ArgumentError"
            assert "dtype" in error[1]
