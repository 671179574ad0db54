"""A product, its all-reduce, and the residual and norm that follow become one operator, in every
spelling of a norm; graphs that need a value from in between keep their norm.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import interlace
from interlace.compile import eager_backend, recording
from interlace.compile.graph import Writer
from tests.compile.norms import (
    EPS,
    FUSED,
    NORMED,
    ROUNDINGS,
    XW,
    N,
    Program,
    R,
    V,
    float8,
    rms,
    torchs,
)
from tests.compile.programs import (
    FEW,
    K,
    all_reduce,
    aten,
    fused,
    tensors,
    traced,
)
from tests.pool import COMPILING_S

c10d = torch.ops._c10d_functional


def _fused(dtype: torch.dtype, programs: list[str]) -> dict[str, tuple[list[str], float]]:
    outcomes = {}
    for name in programs:
        program, shapes, _ = FUSED[name]
        arguments = tensors(*shapes, dtype=dtype)
        names, findings, error = fused(traced(program, arguments), arguments)
        assert {finding.operator for finding in findings} == {NORMED}, (name, findings)
        outcomes[name] = names, error
    return outcomes


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.quick),
                                   torch.float16, torch.float32])  # fmt: skip
def test_norms_become_part_of_the_operator(ranks: Any, dtype: torch.dtype) -> None:
    # Graphs of float16 have the calls of those of bfloat16.
    programs = list(FUSED)[::5] if dtype == torch.float16 else list(FUSED)
    for outcomes in ranks(2).run(_fused, dtype, programs):
        assert {name: names for name, (names, _) in outcomes.items()} == {
            name: [NORMED] * FUSED[name][2] for name in programs
        }
        allowed = ROUNDINGS[dtype]
        assert {name: error for name, (_, error) in outcomes.items() if not error < allowed} == {}


# name: the program, whether the cast is part of the operator
CASTS: dict[str, tuple[Program, bool]] = {
    "divided": (lambda y, s: float8(y, s.abs() / 100).float(), True),
    "multiplied": (lambda y, s: float8(y, s.abs() * 100, multiplies=True).float(), True),
    "used as it is, too": (lambda y, s: float8(y, s.abs() / 100).float() + y, False),
    "without saturation": (lambda y, s: (y / s.abs()).to(torch.float8_e4m3fn).float(), False),
    "without a scale": (lambda y, _: y.clamp(-448, 448).to(torch.float8_e4m3fn).float(), False),
    "a tighter clamp before": (lambda y, s: float8((y / s).clamp(-4, 4), s).float(), False),
    "a tighter clamp of the quotient": (
        lambda y, s: (y / s).clamp(-4, 4).clamp(-448, 448).to(torch.float8_e4m3fn).float(),
        False,
    ),
    "a looser clamp of the quotient": (
        lambda y, s: (y / s).clamp_min(-1000).clamp(-448, 448).to(torch.float8_e4m3fn).float(),
        True,
    ),
    "bounds that cross": (
        lambda y, s: (y / s).clamp(448.0, -448.0).to(torch.float8_e4m3fn).float(),
        False,
    ),
    "whole numbers": (lambda y, s: float8((y * 9).int().float(), s).float(), False),
    "rounded before it is divided": (lambda y, s: float8(y.half().float(), s).float(), False),
    "rounded before a bias is added": (
        lambda y, s: y.to(torch.float8_e4m3fn).float() + s.expand(N),
        False,
    ),
    "by a scale per row": (
        lambda y, _: (y / (y.abs().amax(-1, True) / 448)).clamp(-448, 448).float(),
        False,
    ),
}


def _cast() -> dict[str, tuple[bool, list[str], float]]:
    """Whether the operator casts; the operators; the errors."""
    outcomes = {}
    for name, (program, _) in CASTS.items():
        arguments = tensors(*XW, R, V, (1,))
        module = traced(_after_norm(program), arguments)
        names, _, error = fused(module, arguments)
        (call,) = module.graph.find_nodes(
            op="call_function", target=torch.ops.interlace.gemm_all_reduce_norm.default
        )
        outcomes[name] = torch.float8_e4m3fn in call.args, names, error
    return outcomes


def _after_norm(program: Program) -> Program:
    return lambda x, w, r, v, s: program(rms(r + all_reduce(x @ w.t()), v), s)


def test_casts_to_float8(ranks: Any) -> None:
    """A cast with one scale that saturates is part of the operator."""
    for outcomes in ranks(2).run(_cast):
        assert {name: cast for name, (cast, *_) in outcomes.items()} == {
            name: wanted for name, (_, wanted) in CASTS.items()
        }
        assert {tuple(names) for _, names, _ in outcomes.values()} == {(NORMED,)}
        # The interpreter truncates some values that it converts to float8.
        allowed = {name: 0.1 if cast else 1e-3 for name, (cast, *_) in outcomes.items()}
        assert {
            name: error for name, (*_, error) in outcomes.items() if not error < allowed[name]
        } == {}


def _invariant() -> list[tuple[list[str], float]]:
    """Few rows and many, where calls must be batch-invariant."""
    outcomes = []
    program, *_ = FUSED["transformers' norm"]
    with interlace.batch_invariant():
        for rows in (FEW, 260):
            arguments = tensors((rows, K), (N, K), (rows, N), V, dtype=torch.bfloat16)
            names, _, error = fused(traced(program, arguments), arguments)
            outcomes.append((names, error))
    return outcomes


def test_batch_invariant_norms(ranks: Any) -> None:
    """A row's roundings do not depend on the number of rows."""
    for outcomes in ranks(2).run(_invariant):
        assert [names for names, _ in outcomes] == [[NORMED], [NORMED]]
        assert max(error for _, error in outcomes) < ROUNDINGS[torch.bfloat16]


# name: the program, shapes of its arguments, why the norm is not part of the operator; None if it
# is no norm
LEFT: dict[str, tuple[Program, list[tuple[int, ...]], str | None]] = {
    "a mean in another dtype": (
        lambda x, w: (
            lambda s: s * torch.rsqrt(s.pow(2).mean(-1, True, dtype=torch.bfloat16) + EPS)
        )(all_reduce(x @ w.t())),
        XW,
        None,
    ),
    "a weight of whole numbers": (
        lambda x, w, v: torchs(all_reduce(x @ w.t()), (4 * v).float().int()),
        [*XW, V],
        "_to_copy is torch.int32",
    ),
    "the sum is used, too": (
        lambda x, w, r, v: (lambda s: (s.relu(), rms(s + r, v)))(all_reduce(x @ w.t())),
        [*XW, R, V],
        "relu uses the sum without all that is added to it",
    ),
    "the sum is used before a bias is added": (
        lambda x, w, b, v: (lambda s: (s.relu(), rms(s + b, v)))(all_reduce(x @ w.t())),
        [*XW, V, V],
        "relu uses the sum without all that is added to it",
    ),
    "a backward pass takes the root": (
        lambda x, w, v: (lambda s, root: (s * root * v, root))(
            *(lambda s: (s, torch.rsqrt(s.pow(2).mean(-1, True) + EPS)))(all_reduce(x @ w.t()))
        ),
        [*XW, V],
        "output uses rsqrt, a part of the norm",
    ),
    "many rows": (
        lambda x, w, r, v: rms(all_reduce(x @ w.t()) + r, v),
        [(260, K), (N, K), (260, N), V],
        "it has 260 rows",
    ),
    "each rank adds a bias": (
        lambda x, w, b, v: rms(all_reduce(aten.addmm(b, x, w.t())), v),
        [(130, K), (N, K), V, V],
        "each rank adds a bias before the sum",
    ),
    "a weight that the total decides": (
        lambda x, w, v: (lambda s: rms(s, v) * s.sum(0))(all_reduce(x @ w.t())),
        [(1, K), (N, K), V],
        "",
    ),
    "a weight from the sum": (
        lambda x, w: (lambda s: rms(s, s.sum(0)))(all_reduce(x @ w.t())),
        XW,
        "sum_1 is computed from the collective's result",
    ),
    "the sum as a weight of one row": (
        lambda x, w: (lambda s: torchs(s) * s)(all_reduce(x @ w.t())),
        [(1, K), (N, K)],
        "wait_tensor is computed from the collective's result",
    ),
    "a weight from the total": (
        lambda x, w, r: (lambda s: rms(s, s.sum(0)))(all_reduce(x @ w.t()) + r),
        [*XW, R],
        "sum_1 is computed from the collective's result",
    ),
    "rows moved": (
        lambda x, w, v: rms(all_reduce((x @ w.t()).view(2, 3, N).transpose(0, 1).contiguous()), v),
        [*XW, V],
        "transpose moves the product's rows",
    ),
    "memory changed": (
        lambda x, w, r, v: (lambda s, c: (c.add_(1), rms(s + r, v)))(
            all_reduce(x @ w.t()), r.clone()
        ),
        [*XW, R, V],
        "add_ changes memory in between",
    ),
}


def _all_left() -> dict[str, tuple[list[str], str, float]]:
    outcomes = {}
    for name, (program, shapes, _) in LEFT.items():
        arguments = tensors(*shapes)
        module = traced(program, arguments)
        names, findings, error = fused(module, arguments)
        (finding,) = findings
        outcomes[name] = names, finding.reason, error
    return outcomes


def test_norms_that_are_not_part_of_the_operator(ranks: Any) -> None:
    """The product and its all-reduce are fused without the norm, and the reason says why."""
    for outcomes in ranks(2).run(_all_left):
        for name, (names, reason, error) in outcomes.items():
            expected = LEFT[name][2]
            assert (NORMED in names) == (expected == ""), (name, reason)
            assert error < 1e-6, name
            assert not expected or f"the norm that follows is not part of it: {expected}" in reason


def _one_number() -> tuple[list[str], float]:
    arguments = tensors(*XW, (1,), V)
    program = traced(lambda x, w, c, v: rms(all_reduce(x @ w.t()) + c, v), arguments)
    names, _, error = fused(program, arguments)
    return names, error


def test_one_number_is_no_bias(ranks: Any) -> None:
    """A vector of one element is added to all columns, which no operator does."""
    for names, error in ranks(2).run(_one_number):
        assert names == ["gemm_all_reduce"]
        assert error < 1e-6


def _with_fused_rms_norm(module: GraphModule) -> GraphModule:
    """The same with RMSNorm for LayerNorm, as the call that a GPU has for it."""
    (old,) = module.graph.find_nodes(op="call_function", target=aten.native_layer_norm.default)
    x, shape, weight, _, eps = old.args
    new = Writer(old, old).call(aten._fused_rms_norm.default, x, shape, weight, eps)
    old.replace_all_uses_with(new)
    for item in list(new.users):
        item.args = (new, min(item.args[1], 1))
    module.graph.erase_node(old)
    module.recompile()
    return module


def _layer_norm(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, v: torch.Tensor) -> Any:
    """The norm, and the reciprocal root."""
    norm = aten.native_layer_norm(all_reduce(x @ w.t()) + r, [N], v, None, EPS)
    return norm[0], norm[2]


def _one_call() -> list[tuple[list[str], str, float]]:
    outcomes = []
    for program in (lambda *arguments: _layer_norm(*arguments)[0], _layer_norm):
        arguments = tensors(*XW, R, V)
        module = _with_fused_rms_norm(traced(_of_four(program), arguments))
        names, findings, error = fused(module, arguments)
        outcomes.append((names, findings[0].reason, error))
    return outcomes


def _of_four(program: Program) -> Program:
    """The program with its arguments by name, as tracing wants it."""
    return lambda x, w, r, v: program(x, w, r, v)


def test_the_norm_as_one_call(ranks: Any) -> None:
    """Without and with the reciprocal root, which a backward pass takes."""
    for (names, reason, error), (left, why, same) in ranks(2).run(_one_call):
        assert names == [NORMED]
        assert reason.startswith("with the residual and RMSNorm that follow: the cpu backend")
        assert re.search(r"`interlace explain` predicts a GPU's\): \d+x\d+x\d+ -n 2$", reason)
        assert left == ["gemm_all_reduce"]
        assert "a part of the norm" in why
        assert max(error, same) < 1e-6


class _Layer(nn.Module):
    """Half of a layer, and the projection that its norm is for."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.Parameter(each) for each in tensors((N, K), (K, N)))
        self.norm = nn.RMSNorm(N, EPS)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + all_reduce(x @ self.down.t())
        return self.norm(total) @ self.up.t(), total


def _compiled(tokens: int) -> tuple[list[str | None], list[str | None], float]:
    """What is fused without gradients and with them; and the largest error of results."""
    torch.manual_seed(5)
    model = _Layer()
    x, residual = tensors((tokens, K), (tokens, N))
    compiled = torch.compile(model, backend=eager_backend, fullgraph=True)
    expected, errors = model(x, residual), []
    with torch.no_grad(), recording() as inference:
        errors += [_error(*pair) for pair in zip(compiled(x, residual), expected, strict=True)]
    with recording() as training:
        found = compiled(x, residual)
        errors += [_error(*pair) for pair in zip(found, expected, strict=True)]
        gradients = []
        for results in (found, expected):
            model.zero_grad()
            (results[0].square().sum() + results[1].sum()).backward()
            gradients.append([each.grad.clone() for each in model.parameters()])  # type: ignore[union-attr]
    errors += [_error(*pair) for pair in zip(*gradients, strict=True)]
    return [each.operator for each in inference], [each.operator for each in training], max(errors)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_only_graphs_without_gradients(ranks: Any) -> None:
    """A backward pass needs the reciprocal root, which the operator does not return."""
    for inference, training, error in ranks(2).run(_compiled, FEW):
        assert inference == [NORMED]
        assert training[0] == "gemm_all_reduce"
        assert NORMED not in training
        assert error < 1e-5


def _rows_that_change() -> list[tuple[list[str | None], float]]:
    """Compiled for any number of rows, a few at first and many at first."""
    outcomes = []
    torch.manual_seed(5)
    model = _Layer()
    for counts in ((FEW, 300), (300, 2)):
        torch.compiler.reset()
        compiled = torch.compile(_decode, backend=eager_backend, fullgraph=True)
        errors = []
        with torch.no_grad(), recording() as findings:
            for count in counts:
                # One token of each sequence, as in a step of decoding.
                x, residual = tensors((count, K), (count, 1, N))
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(residual, 0)
                expected = _decode(model, x, residual)
                found = compiled(model, x, residual)
                errors += [_error(*pair) for pair in zip(found, expected, strict=True)]
        outcomes.append(([each.operator for each in findings], max(errors)))
    return outcomes


def _decode(model: _Layer, x: torch.Tensor, residual: torch.Tensor) -> Any:
    total = residual + all_reduce(x @ model.down.t()).unsqueeze(1)
    return model.norm(total), total


def test_dynamic_rows(ranks: Any) -> None:
    """One graph serves any number of rows, also few ones, whatever it was traced with."""
    for (few, few_error), (many, many_error) in ranks(2).run(_rows_that_change):
        assert few == many == [NORMED]
        assert max(few_error, many_error) < 1e-5


def _rows_by_data() -> tuple[list[str], float]:
    """Findings' reasons and the error of a graph whose rows are chosen by their values."""

    def program(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, v: torch.Tensor) -> Any:
        chosen = (x[:, 0] != 0).nonzero().squeeze(-1)
        total = r[chosen] + all_reduce(x[chosen] @ w.t())
        return torchs(total) * r[chosen] + rms(total, v)

    arguments = tensors(*XW, R, V)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        torch.no_grad(),
        recording() as findings,
    ):
        found = torch.compile(program, backend=eager_backend, fullgraph=True)(*arguments)
    return [each.reason for each in findings], _error(found, program(*arguments))


def test_rows_whose_number_depends_on_data(ranks: Any) -> None:
    """Nothing is known of their number, not even that it is more than one."""
    for reasons, error in ranks(2).run(_rows_by_data):
        assert reasons == ["sizes change from call to call (dynamic shapes)"]
        assert error < 1e-5


def _many_rows() -> tuple[list[str | None], str]:
    torch.compiler.reset()
    compiled = torch.compile(_decode, backend=eager_backend, fullgraph=True)
    x, residual = tensors((300, K), (300, 1, N))
    with torch.no_grad(), recording() as findings:
        compiled(_Layer(), x, residual)
    return [each.operator for each in findings], findings[0].reason


def test_many_rows_whose_number_is_fixed(ranks: Any) -> None:
    """Then nothing is left to hide, and the norm stays Inductor's."""
    for operators, reason in ranks(2).run(_many_rows):
        assert operators == ["gemm_all_reduce"]
        assert "the norm that follows is not part of it: it has 300 rows" in reason


@pytest.mark.inductor
def test_inductor(ranks: Any) -> None:
    """Inductor's decompositions of the norm, and its order of the calls."""
    for operators, error in ranks(2).run(_by_inductor, timeout_s=COMPILING_S):
        assert operators == [NORMED]
        assert error < 1e-5


def _by_inductor() -> tuple[list[str | None], float]:
    from torch._inductor import config

    torch.manual_seed(5)
    model = _Layer()
    x, residual = tensors((FEW, K), (FEW, N))
    with torch.no_grad(), recording() as findings, config.patch(force_disable_caches=True):
        compiled = torch.compile(model, backend=interlace.compile.backend, fullgraph=True)
        found, expected = compiled(x, residual), model(x, residual)
    errors = [_error(*pair) for pair in zip(found, expected, strict=True)]
    return [each.operator for each in findings], max(errors)
