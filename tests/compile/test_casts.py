"""Casts between a product and a collective, as ``torch.autocast`` puts them there: those after a
gather or an exchange move before it, and ranks' products are added in the dtype of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from interlace.compile import choice, eager_backend, fuse, recording, sent
from tests.compile import models
from tests.compile.models import WIDTH, parallel_block
from tests.compile.programs import (
    FEW,
    K,
    N,
    all_gather,
    all_reduce,
    all_to_all,
    aten,
    c10d,
    gather_along,
    group,
    operators,
    reduce_scatter,
    scatter_along,
    tensors,
    traced,
    wait,
)

# As many rows and columns of a sum as make its operands small beside it.
ROWS, COLUMNS = 24, 24
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Program = Callable[..., Any]

# name: the program, which returns the product and then what was moved; the shape and dtype of each
# argument; the operator wanted.
MOVED: dict[str, tuple[Program, list[tuple[tuple[int, ...], torch.dtype]], str]] = {
    "gathered": (
        lambda x, w: (lambda a: (a @ w.t(), a))(all_gather(x).bfloat16()),
        [((FEW, K), F32), ((N, K), BF16)],
        "all_gather_gemm",
    ),
    "gathered as float16, with a bias": (
        lambda x, w, b: (lambda a: (aten.addmm(b, a, w.t()), a))(all_gather(x).half()),
        [((FEW, K), BF16), ((N, K), F16), ((N,), F16)],
        "all_gather_gemm",
    ),
    # Autocast casts weights where they are used.
    "gathered along 1 for weights that are cast later": (
        lambda x, w, v: (lambda a: (a @ w.bfloat16().t(), a @ v.bfloat16().t(), a))(
            gather_along(x, 1).bfloat16().view(-1, K)
        ),
        [((3, 2, K), F32), ((N, K), F32), ((4, K), F32)],
        "all_gather_gemm",
    ),
    "gathered and cut, then cast in parts": (
        lambda x, w: (lambda a: (a @ w.t(), a))(
            torch.cat([part.bfloat16() for part in all_gather(x).chunk(2)], 0)
        ),
        [((FEW, K), F32), ((N, K), BF16)],
        "all_gather_gemm",
    ),
    "sent": (
        lambda x, w: (all_to_all((x @ w.t()).float()),),
        [((FEW, K), BF16), ((N, K), BF16)],
        "gemm_all_to_all",
    ),
}


def _arguments(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
    return [
        tensor.to(dtype)
        for tensor, (_, dtype) in zip(tensors(*(shape for shape, _ in shapes)), shapes, strict=True)
    ]


def _moved() -> dict[str, tuple[list[str], list[Any], bool, float]]:
    """Of each program: its operators, the dtypes in which they take rows, whether moved rows keep
    their bits, and how far the first result is off.
    """
    outcomes = {}
    for name, (program, shapes, _) in MOVED.items():
        arguments = _arguments(shapes)
        module = traced(program, arguments)
        expected = module(*arguments)
        fuse(module.graph)
        module.recompile()
        actual = module(*arguments)
        assert all(
            (a.dtype, a.shape, a.stride()) == (e.dtype, e.shape, e.stride())
            for a, e in zip(actual, expected, strict=True)
        ), name
        sent = [
            node.args[0].meta["val"].dtype
            for node in module.graph.nodes
            if getattr(node.target, "namespace", "") == "interlace"
        ]
        error = float((actual[0] - expected[0]).double().norm() / expected[0].double().norm())
        same = torch.equal(actual[-1], expected[-1]) if len(actual) > 1 else True
        outcomes[name] = operators(module), sent, same, error
    return outcomes


@pytest.mark.quick
def test_casts_move_to_where_fewer_bytes_are_sent(ranks: Any) -> None:
    """What moves has the same bits, and half as many where float32 was sent."""
    for outcomes in ranks(2).run(_moved):
        for name, (names, dtypes, same, error) in outcomes.items():
            assert names == [MOVED[name][2]], name
            assert dtypes == [MOVED[name][1][-1][1] if "cast later" not in name else BF16], name
            assert same, name
            assert error < torch.finfo(BF16).eps, name


def _twice() -> list[Any]:
    """Of a program that casts twice what it gathers: the operators, whether both casts are the same
    memory, and whether they have the same bits as before.
    """
    arguments = _arguments([((FEW, K), F32), ((N, K), BF16)])
    module = traced(
        lambda x, w: (lambda a, b: (a @ w.t(), a, b))(
            *(lambda g: (g.bfloat16(), g.bfloat16()))(all_gather(x))
        ),
        arguments,
    )
    _, *expected = module(*arguments)
    fuse(module.graph)
    module.recompile()
    _, first, second = module(*arguments)
    same = [torch.equal(a, b) for a, b in zip((first, second), expected, strict=True)]
    return [operators(module), first.data_ptr() == second.data_ptr(), same]


def test_two_casts_of_a_gather_stay_apart(ranks: Any) -> None:
    assert ranks(2).run(_twice) == [[["all_gather_gemm"], False, [True, True]]] * 2


# name: the program, the shapes of its arguments, the operators wanted. All arguments are bfloat16.
ADDED: dict[str, tuple[Program, list[tuple[int, ...]], list[str]]] = {
    "reduced": (
        lambda x, w: all_reduce((x @ w.t()).float()),
        [(ROWS, K), (COLUMNS, K)],
        ["gemm_all_reduce"],
    ),
    "few rows reduced, with views": (
        lambda x, w: all_reduce((x @ w.t()).view(2, -1, N).float()).view(-1, N).relu(),
        [(FEW, K), (N, K)],
        ["gemm_all_reduce"],
    ),
    "reduced with biases": (
        lambda x, w, b: all_reduce(aten.addmm(b, x, w.t()).float()),
        [(FEW, K), (N, K), (N,)],
        ["gemm_all_reduce"],
    ),
    "scattered": (
        lambda x, w: reduce_scatter((x @ w.t()).float()),
        [(FEW, K), (N, K)],
        ["gemm_reduce_scatter"],
    ),
    "scattered along 1, with biases": (
        lambda x, w, b: scatter_along(aten.addmm(b, x, w.t()).view(3, 4, N).float(), 1),
        [(12, K), (N, K), (N,)],
        ["gemm_reduce_scatter"],
    ),
    "a sum scattered": (
        lambda x, v, w, u: scatter_along(
            (x @ w.t()).view(4, -1, COLUMNS).float() + (v @ u.t()).view(4, -1, COLUMNS).float(), 1
        ),
        [(ROWS, 8), (ROWS, 8), (COLUMNS, 8), (COLUMNS, 8)],
        ["gemm_reduce_scatter"],
    ),
    "a sum reduced": (
        lambda x, v, w, u: all_reduce((x @ w.t() + v @ u.t()).float()),
        [(ROWS, K), (ROWS, 8), (COLUMNS, K), (COLUMNS, 8)],
        ["gemm_all_reduce"],
    ),
    "all-reduces added": (
        lambda x, v, w, u: all_reduce((x @ w.t()).float()) + all_reduce((v @ u.t()).float()),
        [(ROWS, K), (ROWS, 8), (COLUMNS, K), (COLUMNS, 8)],
        ["gemm_all_reduce"],
    ),
}


def _added(dtype: torch.dtype) -> dict[str, tuple[list[str], bool, float, float]]:
    """Of each program: its operators, whether a cast is left, and how far results are off those of
    float64, before and after the pass.
    """
    outcomes = {}
    for name, (program, shapes, _) in ADDED.items():
        arguments = _arguments([(shape, dtype) for shape in shapes])
        module = traced(program, arguments)
        before = module(*arguments)
        fuse(module.graph)
        module.recompile()
        after = module(*arguments)
        assert (after.dtype, after.stride()) == (before.dtype, before.stride()), name
        exact = _in_float64(program, arguments)
        errors = [float((y - exact).norm() / exact.norm()) for y in (before, after)]
        casts = any("_to_copy" in node.name for node in module.graph.nodes)
        outcomes[name] = operators(module), casts, *errors
    return outcomes


def _in_float64(program: Program, arguments: list[torch.Tensor]) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor)
        result: torch.Tensor = program(*(argument.double() for argument in arguments))
    return result


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_products_are_added_in_the_dtype_of_the_sum(ranks: Any, dtype: torch.dtype) -> None:
    """No precision is lost: the operator does not even round the products that it adds."""
    for outcomes in ranks(2).run(_added, dtype):
        for name, (names, casts, before, after) in outcomes.items():
            assert names == ADDED[name][2], name
            assert not casts, name
            assert after < 1e-6 < before, name


def _reduced_for_a_norm() -> tuple[list[str], str]:
    arguments = _arguments([((FEW, K), BF16), ((N, K), BF16)])
    module = traced(
        lambda x, w: aten.native_layer_norm(all_reduce((x @ w.t()).float()), [N], None, None, 1e-5)[
            0
        ],
        arguments,
    )
    (finding,) = fuse(module.graph)
    return operators(module), finding.reason


def test_a_norm_of_a_float32_sum_is_not_part_of_it(ranks: Any) -> None:
    for names, reason in ranks(2).run(_reduced_for_a_norm):
        assert names == ["gemm_all_reduce"]
        assert reason.endswith(
            "it returns torch.float32, to which the product is cast; the norm that follows is not "
            "part of it: _to_copy casts the product to torch.float32 before the sum"
        )


W = [((FEW, K), F32), ((N, K), BF16)]
HALF = [((FEW, K), BF16), ((N, K), BF16)]
LEFT: dict[str, tuple[Program, list[tuple[tuple[int, ...], torch.dtype]], str]] = {
    "gathered, and used before the cast": (
        lambda x, w: (lambda a: (a.bfloat16() @ w.t(), a.exp()))(all_gather(x)),
        W,
        "exp uses what it brings before _to_copy casts it to torch.bfloat16",
    ),
    "gathered, and returned before the cast": (
        lambda x, w: (lambda a: (a.bfloat16() @ w.t(), a.view(-1)))(all_gather(x)),
        W,
        "output uses what it brings before _to_copy casts it to torch.bfloat16",
    ),
    "gathered, and saved before the wait": (
        lambda x, w: (lambda a: (wait(a).bfloat16() @ w.t(), a))(
            c10d.all_gather_into_tensor(x, 2, group())
        ),
        W,
        "output uses what it brings before _to_copy casts it to torch.bfloat16",
    ),
    "gathered, and cast to something else": (
        lambda x, w: (lambda a: (a.bfloat16() @ w.t(), a.half()))(all_gather(x)),
        W,
        "_to_copy_1 uses what it brings before _to_copy casts it to torch.bfloat16",
    ),
    "gathered, and mixed with other rows": (
        lambda x, w: (lambda a: (a.bfloat16() @ w.t(), torch.cat([a, x]).bfloat16()))(
            all_gather(x)
        ),
        W,
        "cat mixes what it brings with x_1 before the cast",
    ),
    "gathered and widened": (
        lambda x, w: all_gather(x).float() @ w.t(),
        [((FEW, K), BF16), ((N, K), F32)],
        "from torch.bfloat16 to torch.float32, which would be more bytes to send",
    ),
    "gathered and cast twice": (
        lambda x, w: all_gather(x).half().bfloat16() @ w.t(),
        W,
        "_to_copy casts what it brings to torch.float16 in between",
    ),
    "received": (
        lambda x, w: all_to_all(x).bfloat16() @ w.t(),
        W,
        "what goes into it is x_1, not a product",
    ),
    "added in float64": (
        lambda x, w: reduce_scatter((x @ w.t()).double()),
        HALF,
        "_to_copy casts the product to torch.float64; operators return",
    ),
    "cast twice, then added": (
        lambda x, w: reduce_scatter((x @ w.t()).half().float()),
        HALF,
        "it is computed in torch.bfloat16 and sent in torch.float32",
    ),
    "cast there and back, then added": (
        lambda x, w: all_reduce((x @ w.t()).half().bfloat16()),
        HALF,
        "it is computed in torch.bfloat16 and sent in torch.bfloat16",
    ),
    "a large sum": (
        lambda x, w: reduce_scatter((x @ w.t()).float() + (x @ (2 * w).t()).float()),
        HALF,
        "too large to be put side by side, and is cast to torch.float32, which products in parts "
        "are not",
    ),
    "a sum sent": (
        lambda x, w: all_to_all((x @ w.t()).float() + (x @ (2 * w).t()).float()),
        HALF,
        "it is a sum of products, which no operator sends by an all-to-all",
    ),
    "narrowed, then sent": (
        lambda x, w: all_to_all((x @ w.t()).bfloat16()),
        [((FEW, K), F32), ((N, K), F32)],
        "the product is cast to torch.bfloat16 before it is sent, and would take more bytes as "
        "torch.float32",
    ),
}


def _left() -> dict[str, tuple[str | None, str, bool]]:
    outcomes = {}
    for name, (program, shapes, _) in LEFT.items():
        module = traced(program, _arguments(shapes))
        before = str(module.graph)
        (finding,) = fuse(module.graph, merge_products=False)
        outcomes[name] = finding.operator, finding.reason, before == str(module.graph)
    return outcomes


def test_others_are_left_alone_and_name_the_cast(ranks: Any) -> None:
    for outcomes in ranks(2).run(_left):
        for name, (operator, reason, unchanged) in outcomes.items():
            assert operator is None, (name, reason)
            assert LEFT[name][2] in reason, (name, reason)
            assert unchanged, name


def _between_nodes() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "known_nodes", lambda group: 2)
        module = traced(ADDED["scattered"][0], _arguments(HALF))
        (finding,) = fuse(module.graph)
    assert operators(module) == []
    return finding.reason


def test_products_are_not_cast_between_nodes(ranks: Any) -> None:
    for reason in ranks(2).run(_between_nodes):
        assert reason == (
            "the product is cast to torch.float32 before the sum, which gemm_reduce_scatter does "
            "within a node"
        )


def _rows_that_change() -> tuple[list[str | None], float]:
    """The operators for any number of rows, and the largest error with two numbers."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return all_reduce((x @ w.t()).view(2, -1, COLUMNS).float()).relu()

    compiled = torch.compile(program, backend=eager_backend, fullgraph=True)
    errors = []
    with recording() as findings:
        for count in (FEW, FEW + 4):
            x, w = _arguments([((count, K), BF16), ((COLUMNS, K), BF16)])
            torch._dynamo.mark_dynamic(x, 0)
            exact = _in_float64(program, [x, w])
            errors.append(float((compiled(x, w) - exact).norm() / exact.norm()))
    return [finding.operator for finding in findings], max(errors)


def test_dynamic_rows(ranks: Any) -> None:
    for names, error in ranks(2).run(_rows_that_change):
        assert names == ["gemm_all_reduce"]
        assert error < 1e-6


def _step(call: Any, block: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """A result under autocast, and all gradients."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype=BF16):
        y = call(x)
    y.float().square().sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in block.parameters())]
    return [y.detach(), *(getattr(grad, "_local_tensor", grad) for grad in gradients)]


def _block(sequence_parallel: bool, trains: bool) -> tuple[list[Any], list[float]]:
    """Findings of a block under autocast; and relative errors against eager execution."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sent, "_FEW_TOKENS", 8)  # 128 take the interpreter a while
        patch.setattr(models, "HIDDEN", 32)  # rows of a shard of w2 in bfloat16 fill 16 bytes
        block = parallel_block(sequence_parallel, bias=False)
        torch.manual_seed(11 + (dist.get_rank() if sequence_parallel else 0))
        x = torch.randn(2, 12, WIDTH)
        # Another size of a model that this process has compiled before would be a dynamic one.
        torch.compiler.reset()
        compiled = torch.compile(block, backend=eager_backend, fullgraph=True)
        with recording() as findings:
            if trains:
                pairs = zip(_step(compiled, block, x), _step(block, block, x), strict=True)
            else:
                with torch.no_grad(), torch.autocast(x.device.type, dtype=BF16):
                    pairs = zip([compiled(x)], [block(x)], strict=True)
            errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
        torch.compiler.reset()
    seen = [(f.graph, f.collective, f.operator) for f in findings if f.collective != "products"]
    return seen, errors


def test_a_sequence_parallel_block_under_autocast(ranks: Any) -> None:
    for findings, errors in ranks(2).run(_block, True, True):
        gather = ("all_gather_into_tensor", "all_gather_gemm")
        scatter = ("reduce_scatter_tensor", "gemm_reduce_scatter")
        assert findings == [
            *[("forward", *pair) for pair in (gather, scatter) * 2],
            # The operands of the first sum are large compared with it, those of the second are not.
            *[("backward", *pair) for pair in (gather, (scatter[0], None), gather, scatter)],
        ]
        assert max(errors) < 2 * torch.finfo(BF16).eps, errors


def test_a_tensor_parallel_block_under_autocast(ranks: Any) -> None:
    """The all-reduces of queries', keys' and values' gradients become one of float32."""
    for findings, errors in ranks(2).run(_block, False, True):
        assert [finding[::2] for finding in findings] == [
            *[("forward", "gemm_all_reduce")] * 2,
            *[("backward", "gemm_all_reduce")] * 5,
        ]
        assert max(errors) < 2 * torch.finfo(BF16).eps, errors


def test_a_block_under_autocast_without_gradients(ranks: Any) -> None:
    for findings, errors in ranks(2).run(_block, True, False):
        assert [operator for _, _, operator in findings] == [
            "all_gather_gemm",
            "gemm_reduce_scatter",
        ] * 2
        assert max(errors) < 2 * torch.finfo(BF16).eps, errors
