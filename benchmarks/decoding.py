"""What ends each half of a decoder's layer: product, sum over ranks, residual, RMSNorm.

    python benchmarks/decoding.py [--ranks 2] [--budget SECONDS] [--seed N] [--peers FILE] --json F

It needs as many GPUs as ranks. First come the calls of a layer of Llama 3 70B and 8B at several
degrees of tensor parallelism and some odd ones; then, while the budget lasts, calls that are drawn
with the seed: row-parallel layers of the models of ``interlace bench sweep``, 1 to 256 tokens. Each
call is checked against float64, and then timed in CUDA graphs with cold weights, the slowest rank,
in these ways: every implementation of ours; ``gemv_all_reduce`` alone; the product by cuBLAS alone;
and the programs that ``--peers`` names, a Python file with ``prepare()`` and ``peers(group, tokens,
columns, dtype)``, which returns functions of a partial sum, a residual, a weight and eps that
compute the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist

import interlace
from interlace.bench.timing import measure
from interlace.comm.groups.machine_rates import sets_past_cache
from interlace.costs.models import models
from interlace.registry import operator_named

OPERATOR = "gemm_all_reduce_norm"
EPS = 1e-6
TOLERANCE = 6e-3
"""Relative error that roundings to bfloat16 explain."""

Shape = tuple[int, int, int]
"""Tokens, columns of the sum, and this rank's share of K."""

SHAPES: tuple[Shape, ...] = (
    *itertools.product((1, 4, 16, 64), (8192,), (2048, 3584, 7168, 14336)),
    *itertools.product((1, 16, 64), (4096,), (2048, 7168)),
    *((2, 8192, 2048), (8, 8192, 14336), (32, 8192, 14336), (1, 5120, 3456), (3, 2880, 1440)),
    *((128, 8192, 3584), (256, 8192, 3584), (256, 8192, 14336)),
)


def drawn(seed: int) -> Iterator[Shape]:
    """Yield calls of row-parallel layers as models have them, with 1 to 256 tokens."""
    source = random.Random(seed)
    known = models()
    while True:
        model, shards = source.choice(known), source.choice((2, 4, 8))
        inner = source.choice((model.heads * model.head_dim, model.intermediate)) // shards
        tokens = math.floor(2 ** source.uniform(0, 8.01))
        yield min(tokens, 256), model.hidden, max(inner // 8 * 8, 8)


class Case:
    """One call's tensors, with so many weights that none is in the cache at its turn."""

    def __init__(self, shape: Shape) -> None:
        tokens, columns, inner = shape
        self.shape, self.dtype = shape, torch.bfloat16
        self.device = torch.device("cuda", torch.cuda.current_device())
        own = torch.Generator(self.device).manual_seed(1 + dist.get_rank())
        shared = torch.Generator(self.device).manual_seed(1)

        def drawn_tensor(generator: torch.Generator, *size: int) -> torch.Tensor:
            values = torch.randn(size, generator=generator, device=self.device)
            return values.to(self.dtype)

        self.sets = max(2, sets_past_cache(2 * columns * inner, self.device))
        self.weights = [drawn_tensor(own, columns, inner) for _ in range(self.sets)]
        self.x = drawn_tensor(own, tokens, inner)
        self.residual = drawn_tensor(shared, tokens, columns)
        self.norm_weight = drawn_tensor(shared, columns)
        self.product = torch.empty(tokens, columns, dtype=self.dtype, device=self.device)

    def multiply(self, i: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by cuBLAS."""
        weight = self.weights[i % self.sets]
        return torch.mm(self.x, weight.T, out=self.product if out is None else out)

    def normed(self, i: int, impl: str) -> interlace.Normed:
        """Run ours."""
        return interlace.gemm_all_reduce(
            self.x,
            self.weights[i % self.sets],
            residual=self.residual,
            norm_weight=self.norm_weight,
            eps=EPS,
            impl=impl,
        )

    def check(self, y: torch.Tensor, residual: torch.Tensor) -> float:
        """Return the larger relative error of both results of the first weight.

        Raises:
            AssertionError: It is more than roundings explain, or ranks have different bits.
        """
        total = self.x.double() @ self.weights[0].double().T
        dist.all_reduce(total)
        total += self.residual.double()
        h = total.to(self.dtype).double()
        mean_square = h.square().mean(-1, keepdim=True)
        expected = h * (mean_square + EPS).rsqrt() * self.norm_weight.double()
        errors = [
            float((result.double() - right).norm() / right.norm())
            for result, right in ((y, expected), (residual, total))
        ]
        first = y.clone()
        dist.broadcast(first, 0)
        assert max(errors) < TOLERANCE, (self.shape, errors)
        assert torch.equal(first, y), (self.shape, "ranks differ")
        return max(errors)

    def bench(self, peers: dict[str, Callable[..., Any]]) -> dict[str, Any]:
        """Check and time all ways."""
        tokens, columns, inner = self.shape
        declaration: Any = operator_named(OPERATOR)
        choice = declaration.choose(
            rows=tokens,
            columns=columns,
            inner=inner,
            dtype=self.dtype,
            world_size=dist.get_world_size(),
            device=self.device,
        )
        ways: dict[str, tuple[str, str, Callable[[int], Any]]] = {
            "gemv_all_reduce alone": (
                "communication",
                "",
                lambda i: interlace.gemv_all_reduce(self.x, self.weights[i % self.sets]),
            ),
            "cuBLAS alone": ("compute", "", self.multiply),
        }
        errors = []
        for each in declaration.implementations:
            if each.name == "fused" and tokens > 64:
                continue
            result = self.normed(0, each.name)
            errors.append(self.check(result.y, result.residual))
            role = "pair" if each.name == "unfused" else "ours"
            ways[each.name] = role, each.name, functools.partial(self.normed, impl=each.name)
        for name, peer in peers.items():
            ways[f"cuBLAS + {name}"] = "pair", "", self._beside(peer)
        times = {}
        for name, (role, impl, call) in ways.items():
            timing = measure(call, period=self.sets, samples=9, graph_us=700.0)
            times[name] = {"role": role, "impl": impl, **dataclasses.asdict(timing)}
        weight_bytes = 2 * columns * inner
        return {
            "operator": OPERATOR,
            "shape": f"{tokens} x {columns} x {inner}",
            "rows": tokens,
            "columns": columns,
            "inner": inner,
            "dtype": "bfloat16",
            "world_size": dist.get_world_size(),
            "config": str(choice.config),
            "auto": choice.impl,
            "relative_error": max(errors),
            "weights_us": round(weight_bytes / 4.2e6, 2),
            "times": times,
        }

    def _beside(self, peer: Any) -> Callable[[int], Any]:
        # A peer that has memory of its own for the product is spared a copy, and one that writes
        # into the residual a second one, as in the programs that it is from.
        out = self.product if peer.product is None else peer.product
        residual = self.residual.clone()
        peer.in_place = True

        def call(i: int) -> Any:
            return peer(self.multiply(i, out), residual, self.norm_weight, EPS)

        return call


def worker(budget: float, seed: int, peers_file: str) -> list[dict[str, Any]]:
    """Run the benchmark on a rank."""
    make_peers: Callable[..., dict[str, Callable[..., Any]]] = lambda *_: {}  # noqa: E731
    if peers_file:
        spec = importlib.util.spec_from_file_location("peers", peers_file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.prepare()
        make_peers = module.peers
    results = []
    start = time.monotonic()
    with torch.no_grad():
        for number, shape in enumerate(itertools.chain(SHAPES, drawn(seed))):
            late = torch.tensor(float(time.monotonic() - start > budget), device="cuda")
            dist.broadcast(late, 0)
            if late.item():
                break
            is_listed = number < len(SHAPES)
            peers = make_peers(dist.group.WORLD, *shape[:2], torch.bfloat16) if is_listed else {}
            result = Case(shape).bench(peers)
            results.append(result)
            if dist.get_rank() == 0:
                medians = {name: each["median_us"] for name, each in result["times"].items()}
                print(result["shape"], result["auto"], medians, flush=True)
    return results


def main() -> None:
    """Run the benchmark and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1, help="of the drawn calls")
    parser.add_argument("--peers", default="", help="a Python file with other programs")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    results, *_ = interlace.launch(
        worker, options.ranks, options.budget, options.seed, options.peers, backend="cuda"
    )
    documents.write(options.json, results)


if __name__ == "__main__":
    main()
