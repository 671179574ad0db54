"""Random programs of products, collectives, copies, views and writes compute with the pass what
they compute without it, and their results share memory where they did, and only there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from interlace.compile import fuse
from tests.compile.programs import (
    all_gather,
    all_reduce,
    all_to_all,
    c10d,
    group,
    operators,
    reduce_scatter,
    tensors,
    wait,
)

ROWS, WIDTH = 8, 16
Values = list[torch.Tensor]


def _copied(values: Values, draw: random.Random) -> torch.Tensor:
    """A copy of a value in memory that the program makes."""
    source = draw.choice(values[-2:])
    kept = torch.empty_like(source)
    kept.copy_(source)
    return kept


def _in_place(values: Values, draw: random.Random) -> torch.Tensor:
    """As ``dist.all_reduce`` is traced; values that share the memory change as well."""
    value = draw.choice(values[1:] or [values[0].clone()])
    value.copy_(all_reduce(value))
    return value


def _written(values: Values, draw: random.Random) -> torch.Tensor:
    value = draw.choice(values[1:] or [values[0].clone()])
    return value.mul_(0.5)


def _twice(values: Values, draw: random.Random) -> torch.Tensor:
    """The sum of products whose collective is waited for twice."""
    start = c10d.all_reduce(draw.choice(values), "sum", group())
    values.append(wait(start))
    return wait(start)


def _normed(values: Values, weights: Values, draw: random.Random) -> torch.Tensor:
    """An RMSNorm of a residual and a sum over ranks, both of which others may use."""
    total = draw.choice(values) + all_reduce(draw.choice(values) @ draw.choice(weights).t())
    wide = total.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    values.append(total)
    return (wide * root).to(total.dtype) * draw.choice(weights)[0]


def _step(values: Values, weights: Values, draw: random.Random) -> torch.Tensor:
    product = draw.choice(values) @ draw.choice([*weights, draw.choice(weights) * 2]).t()
    steps: list[Callable[[], torch.Tensor]] = [
        lambda: product,
        lambda: all_reduce(product),
        lambda: all_reduce(draw.choice(values)),
        lambda: all_gather(reduce_scatter(product)),
        lambda: all_gather(draw.choice(values)[: ROWS // 2].clone()) @ draw.choice(weights).t(),
        lambda: all_to_all(product),
        lambda: all_reduce(product) + all_reduce(draw.choice(values) @ weights[0].t()),
        # A weight that is computed from values: of a product that comes before, maybe.
        lambda: draw.choice(values) @ torch.cat([draw.choice(values)] * 2)[:WIDTH].t(),
        lambda: _copied(values, draw),
        lambda: _copied(values, draw),
        lambda: _in_place(values, draw),
        lambda: _written(values, draw),
        lambda: _twice(values, draw),
        lambda: _normed(values, weights, draw),
        lambda: draw.choice(values).clone(),
        lambda: draw.choice(values).view(2, -1, WIDTH).view(ROWS, WIDTH),
        lambda: (draw.choice(values) + draw.choice(values)).relu(),
    ]
    return draw.choice(steps)()


def _program(seed: int, x: torch.Tensor, *weights: torch.Tensor) -> Values:
    draw = random.Random(seed)
    values = [x.clone()]
    for _ in range(9):
        values.append(_step(values, list(weights), draw))
    return draw.sample(values[1:], k=5)


def _after_writes(results: Values) -> Values:
    """Results once each of them was written to in turn: what shares memory changes twice."""
    for number, result in enumerate(results):
        result.mul_(1 + number / 8)
    return results


def _checked(seeds: range) -> dict[int, tuple[list[str], float]]:
    """The operators in each program's graph, and how far results are off at most."""
    outcomes = {}
    for seed in seeds:
        dtype = torch.bfloat16 if seed % 2 else torch.float32
        x, *weights = tensors((ROWS, WIDTH), *[(WIDTH, WIDTH)] * 3, dtype=dtype)
        arguments = [x, *(weight / 8 for weight in weights)]

        def program(*arguments: torch.Tensor, seed: int = seed) -> Values:
            return _program(seed, *arguments)

        functional = torch.func.functionalize(program, remove="mutations")
        module: GraphModule = make_fx(functional, tracing_mode="fake")(*arguments)
        module.graph.eliminate_dead_code()
        expected = _after_writes(module(*arguments))
        fuse(module.graph)
        module.recompile()
        found = _after_writes(module(*arguments))
        errors = [
            float((a.double() - b.double()).norm() / (b.double().norm() + 1e-9))
            for a, b in zip(found, expected, strict=True)
        ]
        outcomes[seed] = operators(module), max(errors)
    return outcomes


def test_random_graphs(ranks: Any) -> None:
    for outcomes in ranks(2).run(_checked, range(10, 24)):
        wrong = {
            seed: error
            for seed, (_, error) in outcomes.items()
            if not error < (0.1 if seed % 2 else 1e-4)
        }
        assert wrong == {}
        # The programs are worth something: most operators of the pass are among them.
        fused = {name for names, _ in outcomes.values() for name in names}
        assert len(fused) >= 6, fused
