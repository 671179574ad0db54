"""Time calls as programs make them: what they cost the host, and last, eager and in a graph.

    python benchmarks/host_time.py --json FILE [--ranks 2] [--only all_gather_gemm]

Each operator around a product stands beside the pair as a program would write it: ``F.linear`` and
the collective of ``torch.distributed``, without gradients, and with those of x and w, for which the
pair has a function of autograd around the collective. Embedding tables and experts stand alone,
with and without their backward pass, as their stock pairs are other packages. "New rows" are first
calls of products that differ in their rows alone, as prompts of a server do.

Host time is what it takes to enqueue a call right after ranks have met, in a row of ten; "eager" is
how long such a row lasts on the GPU, per call, with the host's time in it where that is longer; and
"graph" is the same row in a CUDA graph. Microseconds: of each sample the slowest rank's, of samples
the median, 10th and 90th percentile. Results are compared with the pair's before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist
import torch.nn.functional as F
from program_times import Sample, in_graph, in_turn, sample, spreads

import interlace
import interlace.optim

SIZES = (
    (1, 8192, 4096),
    (16, 8192, 4096),
    (256, 8192, 7168),
    (1024, 8192, 7168),
    (4096, 8192, 2048),
)
TABLES = ((8, 64, 512), (32, 64, 512), (128, 64, 512), (32, 128, 2048))
EXPERTS = ((64, 2048, 1024, 4, 512), (8, 1024, 1024, 2, 64))
NEW_ROWS = (("few", 1, 512), ("many", 512, 4096))
NUMBERS_OF_ROWS = 48
WEIGHTS = 4
CALLS, SETTLING = 10, 64

Call = Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """Describe calls that are timed beside one another.

    Attributes:
        name: The operator, and whether its backward pass is in it.
        sizes: What the sizes are, and how large.
        ways: The calls by name: ``auto``, and ``pair`` where there is one.
        is_captured: Whether the calls are timed in a graph, too.
    """

    name: str
    sizes: str
    ways: dict[str, Call]
    is_captured: bool = True


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16() * 0.02


class _Collective(torch.autograd.Function):
    """A collective and the one that is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Any, gradient: Any) -> torch.Tensor:
        ctx.gradient = gradient
        y: torch.Tensor = collective(x)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.gradient(grads[0]), None, None


def _all_reduced(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def _scattered(x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(len(x) // dist.get_world_size(), x.shape[1])
    dist.reduce_scatter_tensor(y, x)
    return y


def _gathered(x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(len(x) * dist.get_world_size(), x.shape[1])
    dist.all_gather_into_tensor(y, x)
    return y


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    return y


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


_GRADIENTS = {
    "gemm_all_reduce": (_all_reduced, _unchanged),
    "gemm_reduce_scatter": (_scattered, _gathered),
    "all_gather_gemm": (_gathered, _scattered),
    "gemm_all_to_all": (_exchanged, _exchanged),
}
"""The collective of each operator, and that of its gradient."""


def trained_products() -> Iterator[Case]:
    """Yield forward and backward passes of the operators around a product."""
    ranks = dist.get_world_size()
    for rows, columns, inner in SIZES:
        weights = [_random(columns, inner).requires_grad_() for _ in range(WEIGHTS)]
        for name, collectives in _GRADIENTS.items():
            if name != "gemm_all_reduce" and rows % ranks:
                continue
            x = _random(rows // ranks if name == "all_gather_gemm" else rows, inner)
            x.requires_grad_()
            operator, gathers = getattr(interlace, name), name == "all_gather_gemm"

            def pair(
                x: torch.Tensor,
                w: torch.Tensor,
                gathers: bool = gathers,
                collectives: Any = collectives,
            ) -> torch.Tensor:
                rows = _Collective.apply(x, *collectives) if gathers else x  # type: ignore[no-untyped-call]
                y = F.linear(rows, w)
                return y if gathers else _Collective.apply(y, *collectives)  # type: ignore[no-any-return,no-untyped-call]

            with torch.no_grad():
                grad = _random(*operator(x, weights[0]).shape)

            def both(
                i: int, run: Any, x: torch.Tensor, weights: Any, grad: torch.Tensor
            ) -> tuple[torch.Tensor, ...]:
                w = weights[i % WEIGHTS]
                with torch.enable_grad():
                    run(x, w).backward(grad)
                gradients = x.grad, w.grad
                x.grad = w.grad = None
                return gradients

            ways = {
                way: functools.partial(both, run=run, x=x, weights=weights, grad=grad)
                for way, run in {"pair": pair, "auto": operator}.items()
            }
            sizes = f"{rows} x {columns} x {inner}"
            yield Case(f"{name}, backward", sizes, ways, is_captured=False)


def products() -> Iterator[Case]:
    """Yield the operators around a product, without gradients."""
    ranks = dist.get_world_size()
    for rows, columns, inner in SIZES:
        weights = [_random(columns, inner) for _ in range(WEIGHTS)]
        x, own = _random(rows, inner), max(rows // ranks, 1)
        mine, part = x[:own].contiguous(), x.new_empty(own, columns)
        gathered = x.new_empty(own * ranks, inner)

        def all_reduce(i: int, x: torch.Tensor = x, weights: Any = weights) -> torch.Tensor:
            y = F.linear(x, weights[i % WEIGHTS])
            dist.all_reduce(y)
            return y

        def reduce_scatter(
            i: int, x: torch.Tensor = x, weights: Any = weights, y: torch.Tensor = part
        ) -> torch.Tensor:
            dist.reduce_scatter_tensor(y, F.linear(x, weights[i % WEIGHTS]))
            return y

        def all_gather(
            i: int, x: torch.Tensor = mine, weights: Any = weights, rows: torch.Tensor = gathered
        ) -> torch.Tensor:
            dist.all_gather_into_tensor(rows, x)
            return F.linear(rows, weights[i % WEIGHTS])

        def all_to_all(i: int, x: torch.Tensor = x, weights: Any = weights) -> torch.Tensor:
            y = F.linear(x, weights[i % WEIGHTS])
            z = torch.empty_like(y)
            dist.all_to_all_single(z, y)
            return z

        pairs = {"gemm_all_reduce": (x, all_reduce)}
        if rows % ranks == 0:
            pairs |= {
                "gemm_reduce_scatter": (x, reduce_scatter),
                "all_gather_gemm": (mine, all_gather),
                "gemm_all_to_all": (x, all_to_all),
            }
        for name, (operand, pair) in pairs.items():
            operator = getattr(interlace, name)

            def auto(
                i: int, run: Any = operator, x: torch.Tensor = operand, weights: Any = weights
            ) -> torch.Tensor:
                y: torch.Tensor = run(x, weights[i % WEIGHTS])
                return y

            yield Case(name, f"{rows} x {columns} x {inner}", {"pair": pair, "auto": auto})


def new_rows() -> Iterator[dict[str, Any]]:
    """Yield the times of first calls, of numbers of rows in no order. Calls of other numbers have
    compiled the kernels and taken the memory before.
    """
    ranks, (columns, inner) = dist.get_world_size(), (8192, 4096)
    w, chance = _random(columns, inner), random.Random(1)

    def pair(x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w)
        dist.all_reduce(y)
        return y

    ways: dict[str, Any] = {"pair": pair, "auto": lambda x: interlace.gemm_all_reduce(x, w)}
    for label, least, most in NEW_ROWS:
        numbers = [rows * ranks for rows in range(least, most // ranks + 1)]
        numbers = chance.sample(numbers, 2 * NUMBERS_OF_ROWS)
        for rows in [most, *numbers[NUMBERS_OF_ROWS:]]:
            for way in ways.values():
                way(_random(rows, inner))
        samples: dict[str, list[Sample]] = {name: [] for name in ways}
        for rows in numbers[:NUMBERS_OF_ROWS]:
            x = _random(rows, inner)
            for name, way in ways.items():
                samples[name].append(sample(functools.partial(_of_rows, way, x)))
        yield {
            "call": "gemm_all_reduce, new rows",
            "sizes": f"{label} rows, {columns} x {inner}",
            **{name: spreads(of_way) for name, of_way in samples.items()},
        }


def _of_rows(way: Any, x: torch.Tensor, i: int) -> Any:
    return way(x)


def tables() -> Iterator[Case]:
    """Yield sets of embedding tables of one lookup per bag, with row-wise Adagrad."""
    ranks, rows = dist.get_world_size(), 20000
    for count, width, batch in TABLES:
        weights = [torch.randn(rows, width, device="cuda").requires_grad_() for _ in range(count)]
        states = [torch.zeros(rows, device="cuda") for _ in range(count)]
        update = interlace.optim.RowWiseAdagrad(learning_rate=0.01, epsilon=1e-8, states=states)
        indices = torch.randint(0, rows, (count * batch,), device="cuda")
        offsets = torch.arange(count * batch + 1, device="cuda")
        grad = torch.randn(batch // ranks, ranks * count * width, device="cuda") * 0.01

        def forward(i: int, arguments: Any = (weights, indices, offsets, update)) -> torch.Tensor:
            weights, indices, offsets, update = arguments
            return interlace.embedding_all_to_all(
                weights, indices, offsets, gradient=update, name=f"{len(weights)} {len(indices)}"
            )

        def both(i: int, run: Call = forward, grad: torch.Tensor = grad) -> None:
            with torch.enable_grad():
                run(i).backward(grad)

        sizes = f"{count} tables {width} wide, batch {batch}"
        yield Case("embedding_all_to_all", sizes, {"auto": forward})
        yield Case("embedding_all_to_all, backward", sizes, {"auto": both}, is_captured=False)


def experts() -> Iterator[Case]:
    """Yield layers of experts with a gate."""
    ranks = dist.get_world_size()
    for count, hidden, inner, top_k, tokens in EXPERTS:
        leaves = [
            each.requires_grad_()
            for each in (
                _random(tokens, hidden),
                _random(count // ranks, inner, 2, hidden),
                _random(count // ranks, hidden, inner),
            )
        ]
        scores = torch.softmax(torch.randn(tokens, count, device="cuda"), -1)
        weights, chosen = scores.topk(top_k)
        grad = _random(tokens, hidden)

        def forward(i: int, arguments: Any = (leaves, chosen, weights)) -> torch.Tensor:
            (x, w_in, w_out), chosen, weights = arguments
            return interlace.mixture_of_experts(x, chosen, weights, w_in, w_out)

        def both(i: int, run: Call = forward, leaves: Any = leaves, grad: Any = grad) -> None:
            with torch.enable_grad():
                run(i).backward(grad)
            for leaf in leaves:
                leaf.grad = None

        sizes = f"{count} experts, {hidden} x {inner}, top {top_k}, {tokens} tokens"
        yield Case("mixture_of_experts", sizes, {"auto": forward})
        yield Case("mixture_of_experts, backward", sizes, {"auto": both}, is_captured=False)


def _check(case: Case) -> None:
    if "pair" not in case.ways:
        return
    for i in range(WEIGHTS):
        found, wanted = (case.ways[name](i) for name in ("auto", "pair"))
        if isinstance(found, torch.Tensor):
            found, wanted = (found,), (wanted,)
        for one, other in zip(found, wanted, strict=True):
            most = other.float().abs().max().item()
            torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0.03 * most)


def time_case(case: Case) -> dict[str, Any]:
    """Return a case's times."""
    _check(case)
    times = in_turn(case.ways, calls=CALLS, settling=SETTLING)
    if case.is_captured:
        for name, call in case.ways.items():
            times[name]["graph"] = in_graph(call, period=WEIGHTS)
    return {"call": case.name, "sizes": case.sizes, **times}


def worker(only: str) -> list[dict[str, Any]]:
    """Time all cases on this rank."""
    torch.manual_seed(dist.get_rank())
    results = []
    with torch.no_grad():
        for cases in (products, trained_products, tables, experts):
            for case in cases():
                if only not in case.name:
                    continue
                results.append(time_case(case))
                if dist.get_rank() == 0:
                    print(results[-1], flush=True)
        if only in "gemm_all_reduce, new rows":
            for found in new_rows():
                results.append(found)
                if dist.get_rank() == 0:
                    print(found, flush=True)
    return results


def main() -> None:
    """Run the benchmark and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="a part of the operator's name")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    results, *_ = interlace.launch(worker, options.ranks, options.only, backend="cuda")
    documents.write(options.json, results)


if __name__ == "__main__":
    main()
