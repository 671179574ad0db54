"""Other operators between two hosts: those around a product, and the backward pass of embeddings.

    python benchmarks/between_nodes_others.py --json FILE [--ranks 4]

Two GPUs of one machine are two hosts for NCCL, as in ``between_nodes.py``; four are two hosts of
two. Sizes are such that the
computation takes about as long as the exchange; results are checked before anything is timed, eager
and as CUDA graphs.

    gemm_all_to_all, gemm_reduce_scatter, all_gather_gemm, gemm_all_reduce
               chunked: slices leave, or are multiplied, as they are complete; with the number of
               slices that a call takes, and with 2, 4 and 8; unfused: F.linear and the collective
    product, exchange
               each of the two alone
    backward   row-wise Adagrad; fused: the exchange beside the sort of lookups, then the update;
               unfused: all_to_all_single, the sort, the update
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from between_nodes import captured, require_equal, run, say, slowest, timed

import interlace
from interlace.gemm import reference
from interlace.gemm.implementations import network

TABLES, WIDTH, ROWS, BATCH = 8, 128, 500_000, 16384
LOOKUPS = (4, 20, 64)
SLICES = (2, 4, 8)
TOLERANCE = 0.02
"""Of the largest element: with fewer rows the library may take other tiles, and round otherwise."""

_LONGEST = 1 << 17  # of the dimension that balances product and exchange
_STACKS_S = 240.0


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator around a product, and sizes of one rank's operands.

    Attributes:
        operator: Name of the operator.
        rows, columns, inner: ``x [rows, inner]`` and ``w [columns, inner]``, at first.
        exchange: The collective alone, of the product or, with ``gathers``, of x.
        gathers: Whether the collective comes first; then ``columns`` balance the two, else
            ``inner``.
    """

    operator: str
    rows: int
    columns: int
    inner: int
    exchange: Callable[[torch.Tensor], object]
    gathers: bool = False

    def resized(self, factor: float) -> Case:
        """Return the case whose product takes ``factor`` times as long, its exchange as ever."""
        name = "columns" if self.gathers else "inner"
        size = round(getattr(self, name) * factor / 1024) * 1024
        return dataclasses.replace(self, **{name: min(_LONGEST, max(1024, size))})

    def operands(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's operands."""
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        x, w = (
            torch.randn(rows, self.inner, device=device, generator=generator, dtype=torch.bfloat16)
            for rows in (self.rows, self.columns)
        )
        return x, w


def _even(rows: torch.Tensor) -> list[int]:
    return [len(rows) // dist.get_world_size()] * dist.get_world_size()


CASES = (
    Case(
        "gemm_all_to_all", 8192, 2048, 16384,
        lambda rows: reference.exchange_rows(rows, _even(rows), _even(rows), dist.group.WORLD),
    ),
    Case(
        "gemm_reduce_scatter", 8192, 2048, 16384,
        lambda rows: reference.sum_rows(rows, _even(rows), dist.group.WORLD),
    ),
    Case(
        "all_gather_gemm", 4096, 16384, 2048,
        lambda rows: reference.gather_rows(
            rows, [len(rows)] * dist.get_world_size(), dist.group.WORLD
        ),
        gathers=True,
    ),
    Case("gemm_all_reduce", 4096, 2048, 16384, dist.all_reduce),
)  # fmt: skip


def main() -> None:
    """Measure all of them."""
    sizes = {"tables": TABLES, "width": WIDTH, "rows": ROWS, "batch": BATCH}
    run(measure, sizes)


def measure() -> dict[str, Any]:
    """On a rank: time each operator, by slices and unfused."""
    faulthandler.dump_traceback_later(_STACKS_S)
    results: dict[str, Any] = {case.operator: time_product(case) for case in CASES}
    results["backward"] = {}
    for lookups in LOOKUPS if torch.cuda.is_available() else (2,):
        results["backward"][lookups] = time_backward(lookups)
    faulthandler.cancel_dump_traceback_later()
    return results


@torch.no_grad()
def time_product(case: Case) -> dict[str, Any]:
    """Time an operator around a product, its product and its exchange, at sizes that balance."""
    device = interlace.group_of().device
    on_gpu = device.type == "cuda"
    if not on_gpu:
        case = dataclasses.replace(case, rows=64, columns=32, inner=64)
    x, w = case.operands(device)
    rows = x if not case.gathers else torch.cat([x] * dist.get_world_size())
    exchanged = x if case.gathers else torch.zeros_like(rows @ w.T)
    exchange_us = timed(lambda: case.exchange(exchanged))
    product_us = timed(lambda: rows @ w.T)
    if on_gpu:
        # All ranks take rank 0's number.
        factor = torch.tensor([exchange_us / product_us])
        dist.broadcast(factor, 0)
        case = case.resized(float(factor))
        x, w = case.operands(device)
        rows = x if not case.gathers else torch.cat([x] * dist.get_world_size())
    times = {"product": timed(lambda: rows @ w.T), "exchange": exchange_us}
    operator = getattr(interlace, case.operator)
    expected = operator(x, w, impl="unfused")
    # Twice: the second call finds what the first one has left.
    for slices in (None, None, *SLICES):
        with cut_into(slices):
            require_close(operator(x, w, impl="chunked"), expected, f"{case.operator}, {slices}")
    times["unfused"] = timed(lambda: operator(x, w, impl="unfused"))
    for slices in (None, *SLICES):
        name = "chunked" if slices is None else f"chunked, {slices} slices"
        with cut_into(slices):
            times[name] = timed(lambda: operator(x, w, impl="chunked"))
    for impl in ("unfused", "chunked") if on_gpu else ():
        replay, result = captured(lambda impl=impl: operator(x, w, impl=impl))
        for _ in range(2):
            replay()
            torch.cuda.synchronize()
            require_close(result, expected, f"{case.operator}, {impl} in a graph")
        times[f"{impl}, graph"] = timed(replay)
    ratio = times["chunked"] / times["unfused"]
    said = ", ".join(f"{name} {us:.0f}" for name, us in times.items())
    sizes = [case.rows, case.columns, case.inner]
    say(f"{case.operator} {sizes}, us: {said}; chunked / unfused {ratio:.3f}")
    return {"sizes": sizes, "us": times, "chunked / unfused": ratio}


def cut_into(slices: int | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which calls have so many slices; None: as many as they take."""
    if slices is None:
        return contextlib.nullcontext()
    return mock.patch.multiple(network, SLICE_BYTES=1, _MOST_SLICES=slices)


def require_close(result: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """End unless a result is close to the pair's on every rank."""
    wrong = slowest(float((result - expected).abs().max() / expected.abs().max()))
    if not wrong < TOLERANCE:
        raise AssertionError(f"{name} is wrong by {wrong:.3g}")


def time_backward(lookups: int) -> dict[str, Any]:
    """Time the backward pass with row-wise Adagrad."""
    group = interlace.group_of()
    on_gpu, device = group.backend == "cuda", group.device
    count, rows, batch = (TABLES, ROWS, BATCH) if on_gpu else (2, 50, 32)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    bags = count * batch
    indices = torch.randint(
        rows, (bags * lookups,), generator=generator, device=device, dtype=torch.int32
    )
    offsets = torch.arange(bags + 1, dtype=torch.int32, device=device) * lookups
    start = [torch.randn(rows, WIDTH, device=device, generator=generator) for _ in range(count)]

    def step(impl: str) -> tuple[Any, list[torch.Tensor]]:
        """Return a function that runs the backward pass, and the tables that it updates."""
        tables = [table.clone().requires_grad_() for table in start]
        states = [torch.zeros(rows, device=device) for _ in tables]
        update = interlace.optim.RowWiseAdagrad(0.1, 1e-6, states)
        y = interlace.embedding_all_to_all(
            tables, indices, offsets, name=f"backward {lookups} {impl}", impl=impl,
            gradient=update, check_indices=False,
        )  # fmt: skip
        grad = torch.full_like(y, 0.5)
        return lambda: y.backward(grad, retain_graph=True), tables

    times, updated = {}, {}
    for impl in ("unfused", "fused"):
        backward, tables = step(impl)
        backward()
        updated[impl] = [table.detach().clone() for table in tables]
        times[impl] = timed(backward, samples=3)
    for table, expected in zip(updated["fused"], updated["unfused"], strict=True):
        require_equal(table, expected, f"the update of {lookups} lookups")
    ratio = times["fused"] / times["unfused"]
    say(f"backward, {lookups} lookups, us: {times}; fused / unfused {ratio:.3f}")
    return {"us": times, "fused / unfused": ratio}


if __name__ == "__main__":
    main()
