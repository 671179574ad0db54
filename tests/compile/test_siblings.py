"""Products of a few rows with the same input become one kernel, unless the pass is told not to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import interlace
from interlace.compile import fuse, recording
from interlace.gemm import invariance
from tests.compile.programs import K, all_reduce, aten, operators, tensors, traced
from tests.pool import COMPILING_S

Q, V = 24, 16
Program = Callable[..., Any]
X, WEIGHTS = (4, K), [(Q, K), (V, K), (V, K)]

# name: the program, shapes of its arguments, the operators wanted
MERGED: dict[str, tuple[Program, list[tuple[int, ...]], list[str]]] = {
    "queries, keys and values": (
        lambda x, q, k, v: (x @ q.t(), x @ k.t(), x @ v.t()),
        [X, *WEIGHTS],
        ["linears"],
    ),
    # Each product has a view of its own, and what takes its result comes before the next one.
    "gate and up of sequences": (
        lambda x, g, u: (
            (x.view(-1, K) @ g.t()).view(2, 2, -1).relu() * (x.view(-1, K) @ u.t()).view(2, 2, -1)
        ),
        [(2, 2, K), (Q, K), (Q, K)],
        ["linears"],
    ),
    "with biases": (
        lambda x, q, k, b, c: (aten.addmm(b, x, q.t()), aten.addmm(c, x, k.t())),
        [X, *WEIGHTS[:2], (Q,), (V,)],
        ["linears"],
    ),
    "a weight that is computed later": (
        lambda x, q, k: (x @ q.t(), x @ (k * 2).t()),
        [X, *WEIGHTS[:2]],
        ["linears"],
    ),
    "five of them": (
        lambda x, q, k, v: (x @ q.t(), x @ k.t(), x @ v.t(), x @ (q + 1).t(), x @ (k + 1).t()),
        [X, *WEIGHTS],
        ["linears", "linears"],
    ),
    "one, whose sum is reduced": (
        lambda x, q, k, v: (x @ q.t(), all_reduce(x @ k.t()), x @ v.t()),
        [X, *WEIGHTS],
        ["linears", "gemm_all_reduce"],
    ),
    # What the operator cannot compute, or not faster.
    "one product": (lambda x, q: x @ q.t(), [X, WEIGHTS[0]], []),
    "two inputs": (lambda x, q, k: (x @ q.t(), x.relu() @ k.t()), [X, *WEIGHTS[:2]], []),
    "the same rows in another order": (
        lambda x, q, k: (x @ q.t(), x.view(2, 2, K).transpose(0, 1).reshape(4, K) @ k.t()),
        [X, *WEIGHTS[:2]],
        [],
    ),
    "many rows": (lambda x, q, k: (x @ q.t(), x @ k.t()), [(65, K), *WEIGHTS[:2]], []),
    "weights along n": (lambda x, q, k: (x @ q, x @ k), [X, (K, Q), (K, V)], []),
    "a bias for one of them": (
        lambda x, q, k, b: (aten.addmm(b, x, q.t()), x @ k.t()),
        [X, *WEIGHTS[:2], (Q,)],
        [],
    ),
    "a weight of the first product": (
        lambda x, q: (lambda y: (y, x @ y.view(Q, K).t()))(x @ q.t()),
        [(K, K), (Q, K)],
        [],
    ),
    "a weight of the second product": (
        lambda x, q, k: (lambda y: (x @ q.t(), y, x @ y.t()))(x @ k.t()),
        [(K, K), (Q, K), (K, K)],
        ["linears"],
    ),
    "a weight of the second product, by other calls": (
        lambda x, q, k: (lambda v, y: (v, y, x @ (y.relu() + v[:, :K]).t(), x @ (2 * q).t()))(
            x @ q.t(), x @ k.t()
        ),
        [(K, K), (Q, K), (K, K)],
        ["linears", "linears"],
    ),
    "two inputs, each with a weight of the other's product": (
        lambda x, y, k: (lambda a: (lambda b: (a, b, y @ a.t(), x @ (b + 1).t()))(y @ (2 * k).t()))(
            x @ k.t()
        ),
        [(K, K), (K, K), (K, K)],
        ["linears"],
    ),
    "memory changed between two pairs": (
        lambda x, q, k: (lambda c: (x @ q.t(), x @ k.t(), c.add_(1), x @ c.t(), x @ (c + 1).t()))(
            k.clone()
        ),
        [X, *WEIGHTS[:2]],
        ["linears", "linears"],
    ),
    "an input that is changed, and its copy": (
        lambda x, q, k: (lambda h: (lambda c: (h.add_(1), c @ q.t(), h @ k.t()))(h.clone()))(x * 2),
        [X, *WEIGHTS[:2]],
        [],
    ),
    "a sum over ranks as a weight": (
        lambda x, q, k: (x @ q.t(), x @ all_reduce(k).t()),
        [X, *WEIGHTS[:2]],
        [],
    ),
    "memory changed": (
        lambda x, q, k: (lambda c: (x @ q.t(), c.add_(1), x @ c.t()))(k.clone()),
        [X, *WEIGHTS[:2]],
        [],
    ),
}


def _merged() -> dict[str, tuple[list[str], float]]:
    outcomes = {}
    for name, (program, shapes, _) in MERGED.items():
        arguments = tensors(*shapes, dtype=torch.bfloat16)
        module = traced(program, arguments)
        before = module(*arguments)
        fuse(module.graph)
        module.recompile()
        after = module(*arguments)
        pairs = [(a, b) for a, b in zip(after, before, strict=True) if isinstance(a, torch.Tensor)]
        assert all((a.shape, a.stride()) == (b.shape, b.stride()) for a, b in pairs)
        error = max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)
        outcomes[name] = operators(module), error
    return outcomes


@pytest.mark.quick
def test_products_with_one_input(ranks: Any) -> None:
    for outcomes in ranks(2).run(_merged):
        assert {name: names for name, (names, _) in outcomes.items()} == {
            name: wanted for name, (*_, wanted) in MERGED.items()
        }
        eps = torch.finfo(torch.bfloat16).eps
        assert {name: error for name, (_, error) in outcomes.items() if not error < 2 * eps} == {}


def _asked() -> tuple[list[str], list[str], list[str], list[str]]:
    """Operators without the option, batch-invariant and of float32; and what the report says."""
    program, shapes, _ = MERGED["queries, keys and values"]
    arguments = tensors(*shapes, dtype=torch.bfloat16)
    module, wide = traced(program, arguments), traced(program, tensors(*shapes))
    fuse(module.graph, merge_products=False)
    without = operators(module)
    with interlace.batch_invariant():
        fuse(module.graph)
    invariant = operators(module)
    fuse(wide.graph)
    with torch.no_grad():
        report = interlace.compile.explain(program, *arguments)
    assert (report.fused, report.left, len(report.merged)) == ((), (), 1)
    return without, invariant, operators(wide), str(report).splitlines()


def test_where_products_stay_apart(ranks: Any) -> None:
    for without, invariant, wide, report in ranks(1).run(_asked):
        assert without == invariant == wide == []
        assert report == [
            "0 collectives: 0 fused, 0 left alone; 1 groups of products with one input merged",
            f"forward: products of [4, {K}] (mm, mm_1, mm_2) fused by linears: 3 products of one "
            "input in one kernel",
        ]


def _invariant() -> dict[str, tuple[list[str], float]]:
    """Operators and errors of batch-invariant programs, on a device where tiles change no bits."""
    outcomes = {}
    with pytest.MonkeyPatch.context() as patch, interlace.batch_invariant():
        patch.setattr(invariance, "has_one_arithmetic", lambda *_: True)
        for name in ("queries, keys and values", "one product", "many rows", "weights along n"):
            program, shapes, _ = MERGED[name]
            arguments = tensors(*shapes, dtype=torch.bfloat16)
            module = traced(program, arguments)
            before = module(*arguments)
            (*_, finding) = fuse(module.graph) or [None]
            module.recompile()
            after = module(*arguments)
            pairs = zip(tree_leaves(after), tree_leaves(before), strict=True)
            error = max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)
            outcomes[name] = operators(module), error
            assert finding is None or finding.reason == "calls must be batch-invariant"
    return outcomes


def test_every_product_where_calls_must_be_batch_invariant(ranks: Any) -> None:
    (outcomes,) = ranks(1).run(_invariant)
    assert {name: names for name, (names, _) in outcomes.items()} == {
        "queries, keys and values": ["linears"],
        "one product": ["linears"],
        "many rows": ["linears"],
        "weights along n": [],
    }
    assert max(error for _, error in outcomes.values()) < 2 * torch.finfo(torch.bfloat16).eps


def _by_inductor() -> list[list[str | None]]:
    program, shapes, _ = MERGED["gate and up of sequences"]
    arguments = tensors(*shapes, dtype=torch.bfloat16)
    names = []
    for more in ({}, {"interlace.merge_products": False}):
        torch.compiler.reset()
        options = {"force_disable_caches": True} | more
        with torch.no_grad(), recording() as findings:
            compiled = torch.compile(program, backend=interlace.compile.backend, options=options)
            found, expected = compiled(*arguments), program(*arguments)
        names.append([each.operator for each in findings])
        error = float((found - expected).float().norm() / expected.float().norm())
        assert error < 2 * torch.finfo(torch.bfloat16).eps
    return names


@pytest.mark.inductor
def test_option_of_the_backend(ranks: Any) -> None:
    assert ranks(1).run(_by_inductor, timeout_s=COMPILING_S) == [[["linears"], []]]
