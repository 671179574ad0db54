"""Other operators between two hosts: the backward pass of embeddings, and GEMM + All-to-All.

    python benchmarks/between_nodes_others.py --json FILE

Two GPUs of one machine are two hosts for NCCL, as in ``between_nodes.py``. Sizes are such that the
computation takes about as long as the exchange; results are checked before anything is timed.

    backward   row-wise Adagrad; fused: the exchange beside the sort of lookups, then the update;
               unfused: all_to_all_single, the sort, the update
    gemm       chunked: slices leave as cuBLAS completes them; unfused: F.linear, all_to_all_single
"""

from __future__ import annotations

import faulthandler
from typing import Any

import torch
import torch.distributed as dist
from between_nodes import captured, require_equal, run, say, slowest, timed

import interlace

TABLES, WIDTH, ROWS, BATCH = 8, 128, 500_000, 16384
LOOKUPS = (4, 20, 64)
M, N, K = 8192, 2048, 16384

_STACKS_S = 85.0


def main() -> None:
    """Measure both."""
    sizes = {"tables": TABLES, "width": WIDTH, "rows": ROWS, "batch": BATCH, "gemm": [M, N, K]}
    run(measure, sizes)


def measure() -> dict[str, Any]:
    """On a rank: time both operators, by slices and unfused."""
    faulthandler.dump_traceback_later(_STACKS_S)
    results = {"gemm": time_gemm(), "backward": {}}
    for lookups in LOOKUPS if torch.cuda.is_available() else (2,):
        results["backward"][lookups] = time_backward(lookups)
    faulthandler.cancel_dump_traceback_later()
    return results


@torch.no_grad()
def time_gemm() -> dict[str, Any]:
    """Time GEMM + All-to-All, its product alone and its exchange alone, at a K that balances."""
    device = interlace.group_of().device
    on_gpu = device.type == "cuda"
    m, n, k = (M, N, K) if on_gpu else (64, 32, 64)

    def operands(inner: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        x, w = (
            torch.randn(rows, inner, device=device, generator=generator, dtype=torch.bfloat16)
            for rows in (m, n)
        )
        return x, w

    x, w = operands(k)
    product = x @ w.T
    received = torch.empty_like(product)
    exchange_us = timed(lambda: dist.all_to_all_single(received, product))
    product_us = timed(lambda: torch.mm(x, w.T, out=product))
    if on_gpu:
        # All ranks take rank 0's number.
        inner = torch.tensor([round(k * exchange_us / product_us / 1024) * 1024])
        dist.broadcast(inner, 0)
        k = min(1 << 16, max(1024, int(inner)))
        x, w = operands(k)
    times = {"product": timed(lambda: x @ w.T), "exchange": exchange_us}

    def call(impl: str) -> torch.Tensor:
        return interlace.gemm_all_to_all(x, w, impl=impl)

    expected = call("unfused")
    for _ in range(2):
        # The library may take other tiles for fewer rows, and so round otherwise.
        wrong = (call("chunked") - expected).abs().max() / expected.abs().max()
        if slowest(float(wrong)) > 0.02:
            raise AssertionError(f"gemm_all_to_all is wrong by {float(wrong):.3g}")
    for impl in ("unfused", "chunked"):
        times[impl] = timed(lambda impl=impl: call(impl))
        if on_gpu:
            replay, result = captured(lambda impl=impl: call(impl))
            replay()
            torch.cuda.synchronize()
            wrong = (result - expected).abs().max() / expected.abs().max()
            if slowest(float(wrong)) > 0.02:
                raise AssertionError(f"{impl} in a graph is wrong by {float(wrong):.3g}")
            times[f"{impl}, graph"] = timed(replay)
    ratio = times["chunked"] / times["unfused"]
    said = ", ".join(f"{name} {us:.0f}" for name, us in times.items())
    say(f"gemm {m} x {n} x {k}, us: {said}; chunked / unfused {ratio:.3f}")
    return {"sizes": [m, n, k], "us": times, "chunked / unfused": ratio}


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
