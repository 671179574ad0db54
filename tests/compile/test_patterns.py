"""Each pair that the pass knows becomes one operator, and results stay; each other one is left as
it is, and it says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace.compile.choice as choice
from interlace.compile import eager_backend, fuse, recording
from tests.compile.programs import (
    FEW,
    K,
    M,
    N,
    all_gather,
    all_reduce,
    all_to_all,
    aten,
    c10d,
    fuse_everything,
    fused,
    gather_along,
    group,
    operators,
    reduce_scatter,
    scatter_along,
    tensors,
    traced,
    wait,
    with_linear,
)

# name: the program, shapes of its arguments, the operators wanted
FUSED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[str]]] = {
    "many tokens": (lambda x, w: all_reduce(x @ w.t()), [(M, K), (N, K)], ["gemm_all_reduce"]),
    "few tokens": (lambda x, w: all_reduce(x @ w.t()), [(FEW, K), (N, K)], ["gemm_all_reduce"]),
    "few tokens, weight along n": (
        lambda x, w: all_reduce(x @ w),
        [(FEW, K), (K, N)],
        ["gemm_all_reduce"],
    ),
    "views": (
        lambda x, w: all_reduce(
            (x.view(M, K) @ w.t()).view(2, M // 2, 3, N // 3).transpose(0, 1).contiguous()
        ).relu(),
        [(2, M // 2, K), (N, K)],
        ["gemm_all_reduce"],
    ),
    # Every rank has another bias, and has added it before the sum.
    "biases": (
        lambda x, w, b: all_reduce(aten.addmm(b, x, w.t())),
        [(M, K), (N, K), (N,)],
        ["gemm_all_reduce"],
    ),
    "scattered": (
        lambda x, w, b: reduce_scatter(aten.addmm(b, x, w.t())),
        [(FEW, K), (N, K), (N,)],
        ["gemm_reduce_scatter"],
    ),
    "scattered views": (
        lambda x, w: reduce_scatter((x @ w.t()).view(2, FEW, N)),
        [(2 * FEW, K), (N, K)],
        ["gemm_reduce_scatter"],
    ),
    "scattered along 1": (
        lambda x, w: scatter_along((x @ w.t()).view(3, 4, N), 1),
        [(12, K), (N, K)],
        ["gemm_reduce_scatter"],
    ),
    "transposed, then scattered": (
        lambda x, w: reduce_scatter((x @ w.t()).view(3, 4, N).transpose(0, 1).contiguous()),
        [(12, K), (N, K)],
        ["gemm_reduce_scatter"],
    ),
    "a sum scattered": (
        lambda x, v, w, u: reduce_scatter(x @ w.t() + v @ u),
        [(FEW, K), (FEW, 3), (N, K), (3, N)],
        ["gemm_sum_reduce_scatter"],
    ),
    "a sum of three scattered along 1": (
        lambda x, v, w, u: scatter_along(
            ((x @ w.t()).view(3, 4, N) + (v @ u).view(3, 4, N)) + (v @ (2 * u)).view(3, 4, N), 1
        ),
        [(12, K), (12, 3), (N, K), (3, N)],
        ["gemm_sum_reduce_scatter"],
    ),
    "a sum scattered side by side": (
        lambda x, v, w, u: scatter_along(((x @ w.t()).view(3, 4, N) + (v @ u).view(3, 4, N)), 1),
        [(12, 4), (12, 4), (N, 4), (4, N)],
        ["gemm_reduce_scatter"],
    ),
    "a sum of weights along n scattered side by side": (
        lambda x, v, w, u: reduce_scatter(x @ w + v @ u),
        [(FEW, 3), (FEW, 2), (3, N), (2, N)],
        ["gemm_reduce_scatter"],
    ),
    "a sum all-reduced": (
        lambda x, v, w, u: all_reduce(x @ w.t() + v @ u).relu(),
        [(M, K), (M, 4), (N, K), (4, N)],
        ["gemm_all_reduce"],
    ),
    "all-reduces added": (
        lambda x, v, w, u: (
            all_reduce((x @ w.t()).view(2, -1, N)) + all_reduce((v @ u).view(2, -1, N))
        ),
        [(M, K), (M, 4), (N, K), (4, N)],
        ["gemm_all_reduce"],
    ),
    "all-reduces added, of which a graph keeps one": (
        lambda x, v, w, u: (lambda sent, total: (all_reduce(x @ w.t()) + total, sent))(
            *(lambda sent: (sent, wait(sent)))(c10d.all_reduce(v @ u, "sum", group()))
        ),
        [(M, K), (M, 4), (N, K), (4, N)],
        ["gemm_all_reduce", "gemm_all_reduce"],
    ),
    "gathered rows, and some of their copy": (
        lambda x, w: (
            lambda g: (lambda c, half: (torch.cat([c[:FEW], half]) @ w.t(), c, half))(
                g.clone(), g[FEW:]
            )
        )(all_gather(x)),
        [(FEW, K), (N, K)],
        ["all_gather_gemm"],
    ),
    "a sum and its copy": (
        lambda x, w: (lambda y: (y, aten.copy(y.new_empty(M, N), y)))(all_reduce(x @ w.t())),
        [(M, K), (N, K)],
        ["gemm_all_reduce"],
    ),
    "two copies of a sum": (
        lambda x, w: (lambda y: [aten.copy(y.new_empty(M, N), y) for _ in range(2)])(
            all_reduce(x @ w.t())
        ),
        [(M, K), (N, K)],
        ["gemm_all_reduce"],
    ),
    "three all-reduces added to something": (
        lambda x, v, w, u: (
            x[:, :1] + (all_reduce(v @ u) + (all_reduce(x @ w.t()) + all_reduce(x.relu() @ w.t())))
        ),
        [(M, 4), (M, 4), (N, 4), (4, N)],
        ["gemm_all_reduce"],
    ),
    "an all-reduce in place, as Dynamo traces it": (
        lambda x, w: (lambda y: aten.copy(y, all_reduce(y)).relu())(x @ w.t()),
        [(M, K), (N, K)],
        ["gemm_all_reduce"],
    ),
    "an all-reduce in place of a view": (
        lambda x, w: (lambda y: aten.copy(y, all_reduce(y)) + 1)((x @ w.t()).view(2, -1, N)),
        [(M, K), (N, K)],
        ["gemm_all_reduce"],
    ),
    "a reduce-scatter into new memory, as Dynamo traces it": (
        lambda x, w: (lambda y: aten.copy(y.new_empty(FEW // 2, N), reduce_scatter(y)).relu())(
            x @ w.t()
        ),
        [(FEW, K), (N, K)],
        ["gemm_reduce_scatter"],
    ),
    "all-reduces added, of which one is used": (
        lambda x, w, u: (lambda total: (total + all_reduce(x @ u), total.exp()))(
            all_reduce(x @ w.t())
        ),
        [(M, 4), (N, 4), (4, N)],
        ["gemm_all_reduce"] * 2,
    ),
    "all-reduces added and scaled": (
        lambda x, w, u: torch.add(all_reduce(x @ w.t()), all_reduce(x @ u), alpha=2),
        [(M, 4), (N, 4), (4, N)],
        ["gemm_all_reduce"] * 2,
    ),
    "large all-reduces added": (
        lambda x, w, u: all_reduce(x @ w.t()) + all_reduce(x @ u),
        [(M, 2 * K), (N, 2 * K), (2 * K, N)],
        ["gemm_all_reduce"] * 2,
    ),
    "an all-reduce added to itself": (
        lambda x, w: (lambda total: total + total)(all_reduce(x @ w.t())),
        [(M, 4), (N, 4)],
        ["gemm_all_reduce"],
    ),
    "a batch of one": (
        lambda x, w: reduce_scatter(torch.bmm(x, w).squeeze(0)),
        [(1, FEW, K), (1, K, N)],
        ["gemm_reduce_scatter"],
    ),
    "waited for later": (
        lambda x, w: (lambda sent: (sent, wait(sent)))(
            c10d.reduce_scatter_tensor(x @ w.t(), "sum", 2, group())
        ),
        [(FEW, K), (N, K)],
        ["gemm_reduce_scatter"],
    ),
    "sent": (lambda x, w: all_to_all(x @ w.t()), [(FEW, K), (N, K)], ["gemm_all_to_all"]),
    "sent with biases": (
        lambda x, w, b: all_to_all(aten.addmm(b, x, w.t()).view(2, 3, N)),
        [(FEW, K), (N, K), (N,)],
        ["gemm_all_to_all"],
    ),
    # A batch of one, as Inductor spells it.
    "gathered for a weight cut out later": (
        lambda x, w: all_gather(x).view(2, -1, K).flatten(0, 1) @ w.mT.squeeze(0),
        [(FEW, K), (1, N, K)],
        ["all_gather_gemm"],
    ),
    "gathered": (lambda x, w: all_gather(x) @ w.t(), [(FEW, K), (N, K)], ["all_gather_gemm"]),
    "gathered along 1, with bias": (
        lambda x, w, b: aten.addmm(b, gather_along(x, 1).view(-1, K), w.t()).view(3, -1, N),
        [(3, 2, K), (N, K), (N,)],
        ["all_gather_gemm"],
    ),
    "gathered for two products and more": (
        lambda x, v, w: (lambda all_x: (all_x @ v.t(), all_x @ w.t(), all_x.exp()))(
            gather_along(x, 1).view(-1, K)
        ),
        [(3, 2, K), (4, K), (N, K)],
        ["all_gather_gemm"],
    ),
    # One sequence, gathered along it: DTensor's views of what it waited for.
    "gathered along 1 for two products": (
        lambda x, v, w: (lambda all_x: (all_x @ v.t(), all_x @ w.t()))(
            all_gather(x.transpose(0, 1)).view(1, -1, K).view(-1, K)
        ),
        [(1, 3, K), (N, K), (N, K)],
        ["all_gather_gemm"],
    ),
    "two pairs": (
        lambda x, v, w: reduce_scatter((all_gather(x) @ v.t()).relu() @ w.t()),
        [(FEW, K), (N, K), (K, N)],
        ["all_gather_gemm", "gemm_reduce_scatter"],
    ),
}


def _all_fused() -> dict[str, Any]:
    outcomes = {}
    for name, (program, shapes, replacements) in FUSED.items():
        arguments = tensors(*shapes)
        names, findings, error = fused(traced(program, arguments), arguments)
        assert {finding.operator for finding in findings} == {*replacements}, (name, findings)
        outcomes[name] = names, error
    arguments = tensors((2, FEW, K), (N, K))
    flat = with_linear(
        traced(lambda x, w: reduce_scatter((x.view(-1, K) @ w.t()).view(2, FEW, N)), arguments)
    )
    outcomes["linear"] = fused(flat, arguments)[::2]
    return outcomes


def _operators_by_patches() -> dict[str, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        fuse_everything(patch)
        graphs = {
            name: traced(program, tensors(*shapes)) for name, (program, shapes, _) in FUSED.items()
        }
        for module in graphs.values():
            fuse(module.graph)
        return {name: operators(module) for name, module in graphs.items()}


def test_pairs_become_operators_with_the_same_results(ranks: Any) -> None:
    wanted = {name: case[2] for name, case in FUSED.items()}
    for outcomes in ranks(2).run(_all_fused):
        names = {name: names for name, (names, _) in outcomes.items()}
        assert names == wanted | {"linear": ["gemm_reduce_scatter"]}
        assert {name: error for name, (_, error) in outcomes.items() if error > 1e-6} == {}
    # The tests on GPUs patch the choice: this keeps their patches working.
    assert ranks(2).run(_operators_by_patches) == [wanted] * 2


def _of_dtype(dtype: torch.dtype) -> list[float]:
    errors = []
    for program in (lambda x, w: reduce_scatter(x @ w.t()), lambda x, w: all_gather(x) @ w.t()):
        names, _, error = fused(
            traced(program, arguments := tensors((FEW, K), (N, K), dtype=dtype)), arguments
        )
        errors.append(error if len(names) == 1 else float("inf"))
    return errors


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(ranks: Any, dtype: torch.dtype) -> None:
    """Both round each rank's product to the dtype, and the sum once more."""
    for errors in ranks(2).run(_of_dtype, dtype):
        assert max(errors) < 2 * torch.finfo(dtype).eps


def _shared_memory() -> list[tuple[bool, float]]:
    """Whether what a program returns beside its copy is the same memory after the pass; and the
    error.
    """

    def returning_a_copy(received: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copy = received.clone()
        return copy @ w.t(), received, copy

    programs = (
        lambda x, w: returning_a_copy(all_gather(x), w),
        lambda x, w: returning_a_copy(all_to_all(x), w),
    )
    outcomes = []
    for program in programs:
        arguments = tensors((FEW, K), (N, K))
        module = traced(program, arguments)
        _, _, error = fused(module, arguments)
        _, source, copy = module(*arguments)
        outcomes.append((source.data_ptr() == copy.data_ptr(), error))
    return outcomes


def test_copies_do_not_become_views(ranks: Any) -> None:
    for outcomes in ranks(2).run(_shared_memory):
        assert [shared for shared, _ in outcomes] == [False, False]
        assert max(error for _, error in outcomes) < 1e-6


def _gather_flags() -> list[bool]:
    """Whether the gathered value is asked for: where nothing else uses it, and where something
    does.
    """
    flags = []
    for also in (False, True):
        program = (
            (lambda x, w: (lambda a: (a @ w.t(), a.exp()))(all_gather(x)))
            if also
            else FUSED["gathered"][0]
        )
        module = traced(program, tensors((FEW, K), (N, K)))
        fuse(module.graph)
        (node,) = module.graph.find_nodes(
            op="call_function", target=torch.ops.interlace.all_gather_gemm.default
        )
        flags.append(node.args[7])
    return flags


def test_the_gathered_value_is_returned_only_where_it_is_used(ranks: Any) -> None:
    assert ranks(2).run(_gather_flags) == [[False, True]] * 2


def _choosers() -> list[tuple[Any, ...]]:
    """The values of impl that the pass gives to operators: by default, and without autotuning."""
    found = []
    for options in ({}, {"autotune": False}):
        module = traced(FUSED["gathered"][0], tensors((FEW, K), (N, K)))
        fuse(module.graph, **options)
        found.append(
            tuple(
                {"auto", "measured"}.intersection(map(str, node.args)).pop()
                for node in module.graph.nodes
                if getattr(node.target, "namespace", "") == "interlace"
            )
        )
    return found


def test_operators_measure_at_their_first_calls(ranks: Any) -> None:
    assert ranks(2).run(_choosers) == [[("measured",), ("auto",)]] * 2


def _merged() -> list[str]:
    arguments = tensors((M, K), (M, 4), (N, K), (4, N))
    return [
        str(finding) for finding in fuse(traced(FUSED["all-reduces added"][0], arguments).graph)
    ]


def test_a_merged_all_reduce_says_where_it_went(ranks: Any) -> None:
    for first, second in ranks(2).run(_merged):
        assert first.endswith(
            "(all_reduce) fused by gemm_all_reduce: added to all_reduce_1 before it is reduced"
        )
        assert (
            "(all_reduce_1) fused by gemm_all_reduce: a sum of 2 products, side by side: the cpu "
            "backend" in second
        )


def _waits_alone() -> list[object]:
    arguments = tensors((M, N), (M, N))
    programs = [
        lambda x, y: wait(x) + wait(y),
        lambda x, y: wait(x.split(M // 2)[0]) + wait(y.split(M // 2)[1]),
    ]
    return [finding for each in programs for finding in fuse(traced(each, arguments).graph)]


def test_sums_of_what_other_graphs_have_started(ranks: Any) -> None:
    """A forward pass may save what it has started, and the backward pass waits for it."""
    assert ranks(2).run(_waits_alone) == [[], []]


def _copies() -> dict[tuple[str, int], int]:
    """How often a batch and several are copied after the pass, where rows are cut along the second
    dimension.
    """
    programs: dict[str, Callable[..., Any]] = {
        "scattered": lambda x, w: scatter_along(x @ w, 1),
        "gathered": lambda x, w: (lambda a: (a @ w, a.exp()))(gather_along(x, 1)),
    }
    counts = {}
    for name, program in programs.items():
        for batch in (1, 3):
            arguments = tensors((batch, 4, K), (K, N))
            module = traced(program, arguments)
            assert fused(module, arguments)[2] < 1e-6
            copies = (aten.cat.default, aten.clone.default)
            counts[name, batch] = sum(
                node.op == "call_function" and node.target in copies for node in module.graph.nodes
            )
    return counts


def test_rows_that_stay_in_order_are_not_copied(ranks: Any) -> None:
    """With one sequence, gathering along it needs no concatenation; with several, x or the product
    is put together as before.
    """
    for counts in ranks(2).run(_copies):
        assert counts == {
            ("scattered", 1): 0,
            ("scattered", 3): 1,
            ("gathered", 1): 0,
            ("gathered", 3): 2,
        }


def _rows_that_change() -> Any:
    """Compiled for any number of rows; findings, and errors with two numbers."""

    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # PyTorch turns the last product into a batch of one.
        batch = torch.einsum("...k,nk->...n", x, w)
        return all_reduce(x @ w.t()), reduce_scatter(x @ w.t()), all_reduce(batch)

    compiled = torch.compile(program, backend=eager_backend, fullgraph=True)
    findings, errors = [], []
    for count in (M, M + 4):
        x, w = tensors((count, K), (N, K))
        torch._dynamo.mark_dynamic(x, 0)
        with recording() as seen:
            results = compiled(x, w)
        findings += seen
        errors += [
            float((a - b).norm() / b.norm()) for a, b in zip(results, program(x, w), strict=True)
        ]
    return [(finding.operator, finding.shape, finding.reason) for finding in findings], max(errors)


def test_dynamic_rows(ranks: Any) -> None:
    """An all-reduce does not care how many rows there are; what cuts rows is left alone."""
    for (reduced, scattered, batch), error in ranks(2).run(_rows_that_change):
        assert reduced[:2] == batch[:2] == ("gemm_all_reduce", (scattered[1][0], N))
        assert scattered[0] is None
        assert "dynamic shapes" in scattered[2]
        assert error < 1e-6


def _overlapped(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    sent = c10d.all_reduce(x @ w.t(), "sum", group())
    product = x @ v.t()
    return wait(sent), product


def _changed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w.t()
    x.add_(1)
    return reduce_scatter(y)


W2 = [(FEW, K), (N, K), (N, K)]
LEFT: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], str]] = {
    "used twice": (
        lambda x, w: (lambda y: (all_reduce(y), y.exp()))(x @ w.t()),
        W2[:2],
        "exp uses the product, too",
    ),
    "returned as well": (
        lambda x, w: (lambda y: (reduce_scatter(y), y))(x @ w.t()),
        W2[:2],
        "output uses the product, too",
    ),
    "average": (
        lambda x, w: all_reduce(x @ w.t(), "avg"),
        W2[:2],
        "it reduces by 'avg'; operators add",
    ),
    "maximum": (
        lambda x, w: reduce_scatter(x @ w.t(), "max"),
        W2[:2],
        "it reduces by 'max'; operators add",
    ),
    "a part": (
        lambda x, w: all_reduce((x @ w.t())[:3]),
        W2[:2],
        "slice_1 takes parts of the product",
    ),
    "a part of its columns": (
        lambda x, w: reduce_scatter((x @ w.t())[:, :4]),
        W2[:2],
        "slice_1 cuts or reorders the columns of mm",
    ),
    "some rows": (
        lambda x, w: reduce_scatter((x @ w.t())[:4]),
        W2[:2],
        "slice_1 has only some rows of mm",
    ),
    "columns scattered": (
        lambda x, w: scatter_along(x @ w.t(), 1),
        W2[:2],
        "cuts or reorders the columns of mm",
    ),
    "converted": (
        lambda x, w: all_reduce((x @ w.t()).double()),
        W2[:2],
        "_to_copy casts the product to torch.float64; operators return float16",
    ),
    "a sum of products": (
        lambda x, w, v: all_reduce(x @ w.t() + x @ v.t()),
        W2,
        "too large to be put side by side",
    ),
    "a scaled sum": (
        lambda x, w, v: reduce_scatter(torch.add(x @ w.t(), x @ v.t(), alpha=2)),
        W2,
        "add scales or repeats what it adds",
    ),
    "a sum, and a part of it": (
        lambda x, w, v: (lambda y: (reduce_scatter(y + x @ v.t()), y))(x @ w.t()),
        W2,
        "output uses a part of the sum, too",
    ),
    "a sum with a bias": (
        lambda x, w, v, b: reduce_scatter(aten.addmm(b, x, w.t()) + x @ v.t()),
        [*W2, (N,)],
        "addmm adds a bias to a part of the sum",
    ),
    "a sum of a product and more": (
        lambda x, w, y: reduce_scatter(x @ w.t() + y),
        [*W2[:2], (FEW, N)],
        "is add, not a product",
    ),
    "not a product": (
        lambda x: all_reduce(x.exp()),
        [(FEW, K)],
        "what goes into it is exp, not a product",
    ),
    "an argument": (lambda x: all_reduce(x), [(FEW, K)], "what goes into it is x_1, not a product"),
    "scaled": (
        lambda x, w, b: all_reduce(aten.addmm(b, x, w.t(), beta=2)),
        [*W2[:2], (N,)],
        "addmm scales what it adds",
    ),
    "scaled by alpha": (
        lambda x, w, b: reduce_scatter(aten.addmm(b, x, w.t(), alpha=2)),
        [*W2[:2], (N,)],
        "addmm scales what it adds",
    ),
    "a matrix added": (
        lambda x, w, c: all_reduce(aten.addmm(c, x, w.t())),
        [*W2[:2], (FEW, N)],
        "something else than a vector",
    ),
    "a bias, few tokens": (
        lambda x, w, b: all_reduce(aten.addmm(b, x, w.t())),
        [*W2[:2], (N,)],
        "a bias is added before the sum",
    ),
    "a batch": (
        lambda x, w: reduce_scatter(torch.bmm(x, w)),
        [(2, 4, K), (2, K, N)],
        "bmm is a batch of products",
    ),
    "a batch sent": (
        lambda x, w: all_to_all(
            torch.bmm(x, w).unflatten(1, (2, -1)).transpose(0, 1).contiguous().flatten(0, 2)
        ),
        [(2, 4, K), (2, K, N)],
        "bmm is a batch of products",
    ),
    "a sum of batches sent": (
        lambda x, w: all_to_all(torch.bmm(x, w) + torch.bmm(x, 2 * w)),
        [(2, 4, K), (2, K, N)],
        "bmm is a batch of products",
    ),
    "a sum sent": (
        lambda x, v, w, u: all_to_all(x @ w.t() + v @ u),
        [(FEW, K), (FEW, 3), (N, K), (3, N)],
        "it is a sum of products, which no operator sends by an all-to-all",
    ),
    "a batch received": (
        lambda x, w: torch.bmm(all_to_all(x).view(2, 3, -1, K).transpose(0, 1).flatten(1, 2), w),
        [(12, K), (3, K, N)],
        "what goes into it is x_1, not a product",
    ),
    "received": (
        lambda x, w: all_to_all(x) @ w.t(),
        W2[:2],
        "what goes into it is x_1, not a product",
    ),
    "a gradient of weights": (
        lambda x, g: all_reduce(g.t() @ x),
        [(FEW, K), (FEW, N)],
        "rows of t are not contiguous",
    ),
    "hidden already": (_overlapped, W2, "mm_1 runs between the collective and its wait"),
    "memory changed": (_changed, W2[:2], "add_ changes memory in between"),
    "in place": (
        lambda x, w: wait(c10d.all_reduce_(x @ w.t(), "sum", group())),
        W2[:2],
        "no operator has this collective in place",
    ),
    "another collective": (
        lambda x, w: wait(c10d.broadcast(x @ w.t(), 0, group())),
        W2[:2],
        "no operator has this collective",
    ),
    "product, then gather": (
        lambda x, w: all_gather(x @ w.t()),
        W2[:2],
        "no product takes what it brings",
    ),
    "gathered weight": (
        lambda x, w: x @ all_gather(w).t(),
        W2[:2],
        "it brings the weight of mm, or a part of it",
    ),
    "gathered along k": (
        lambda x, w: gather_along(x, 1) @ w.t(),
        [(FEW, K), (N, 2 * K)],
        "cuts or reorders the columns of wait_tensor",
    ),
    "multiplied by itself": (
        lambda x: (lambda a: a @ a.t())(all_gather(x)),
        [(FEW, K)],
        "mm multiplies with wait_tensor",
    ),
    "a late weight": (
        lambda x, w: (lambda a: a @ a.sum(0).expand(N, K).contiguous().mul(w).t())(all_gather(x)),
        W2[:2],
        "mm multiplies with mul, which comes after the collective's first use",
    ),
    "uneven": (
        lambda x, w: all_to_all(x @ w.t(), [FEW - 1, 1][:: 1 - 2 * dist.get_rank()]),
        W2[:2],
        "its splits are not even",
    ),
    "never used": (lambda x, w: (all_reduce(x @ w.t()), x)[1], W2[:2], "nothing uses its result"),
    "a group of one": (
        lambda x, w: wait(c10d.all_reduce(x @ w.t(), "sum", _solo)),
        W2[:2],
        "its group has one rank, which has nothing to send",
    ),
    "no group": (
        lambda x, w: wait(c10d.all_reduce(x @ w.t(), "sum", "none such")),
        W2[:2],
        "its group 'none such' is not known",
    ),
    "odd weight": (
        lambda x, w: all_reduce(x @ w.t()),
        [(M, 7), (N, 7)],
        "do not begin at multiples of 16 bytes",
    ),
    "empty": (lambda x, w: all_reduce(x @ w.t()), [(0, K), (N, K)], "mm is empty"),
}
_solo = ""


def _left(name: str) -> tuple[str, str, str]:
    program, shapes, _ = LEFT[name]
    module = traced(program, tensors(*shapes))
    before = str(module.graph)
    (finding,) = fuse(module.graph)
    assert finding.operator is None, finding
    return finding.reason, before, str(module.graph)


def _all_left() -> dict[str, tuple[str, str, str]]:
    global _solo
    _solo = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()].group_name
    return {name: _left(name) for name in LEFT}


def test_others_are_left_alone_and_say_why(ranks: Any) -> None:
    for reasons in ranks(2).run(_all_left):
        for name, (reason, before, after) in reasons.items():
            assert LEFT[name][2] in reason, (name, reason)
            assert before == after, name


def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons where groups, devices or tables are others."""
    reasons = []

    def consider() -> None:
        module = traced(FUSED["scattered views"][0], tensors((2 * FEW, K), (N, K)))
        (finding,) = fuse(module.graph)
        reasons.append(finding.reason)
        assert operators(module) == []

    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        patch.setattr(choice, "known_nodes", lambda group: None)
        consider()
    with monkeypatch.context() as patch:
        # Two torchrun agents of one machine.
        patch.setattr(choice, "known_nodes", lambda group: 2)
        consider()
    with monkeypatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        consider()
    with monkeypatch.context() as patch:
        patch.setattr(choice, "MAX_RANKS", 1)
        consider()
    with monkeypatch.context() as patch:
        from interlace.gemm.choice import Choice
        from interlace.operators.gemm_reduce_scatter import GemmReduceScatter

        patch.setattr(
            GemmReduceScatter,
            "choose",
            lambda *_, **__: Choice("unfused", None, "measured: the pair takes half the time"),
        )
        consider()
    return reasons


def _reasons_elsewhere() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        return _elsewhere(patch)


def test_groups_and_tables_that_forbid_it(ranks: Any) -> None:
    between = (
        "gemm_reduce_scatter is not faster between 2 nodes: no network between the 2 nodes was "
        "measured, which INTERLACE_MEASURE_MACHINE=1 or `interlace tune machine` on them does"
    )
    for reasons in ranks(2).run(_reasons_elsewhere):
        assert reasons == [
            between,
            between,
            "on the CPU operators need Triton's interpreter; TRITON_INTERPRET is not set",
            "its group has 2 ranks; operators take at most 1",
            "gemm_reduce_scatter is not faster: measured: the pair takes half the time",
        ]
