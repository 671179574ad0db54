"""Measurements at the first call of a kind. Run with ``-m gpu``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.gemm import autotune
from interlace.tuning.measured import MeasuredTimes

pytestmark = pytest.mark.gpu

ROWS, COLUMNS, INNER = 4096, 4096, 2048


def _measured(folder: str) -> tuple[dict[str, float], dict[str, float], float, float, int]:
    """What was measured, and what was remembered; seconds that it took, the error, and files."""
    group = interlace.group_of()
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    x, w = (
        torch.randn(*shape, generator=generator, device="cuda").bfloat16()
        for shape in ((ROWS, INNER), (COLUMNS, INNER))
    )
    expected = interlace.gemm_reduce_scatter(x, w, impl="unfused").double()
    with pytest.MonkeyPatch.context() as patch:
        memory = MeasuredTimes(Path(folder))
        patch.setattr(autotune, "_memory", lambda: memory)
        for impl in ("fused", "chunked", "async_tp"):
            interlace.gemm_reduce_scatter(x, w, impl=impl)  # compiles
        torch.cuda.synchronize()
        with interlace.autotune():
            start = time.monotonic()
            interlace.gemm_reduce_scatter(x, w)
            torch.cuda.synchronize()
            seconds = time.monotonic() - start
        measured = list(group.cache.measured.values())[-1].multiples
        files = len(list(Path(folder).glob("*.json")))
        y = interlace.gemm_reduce_scatter(x, w).double()
        # A program that runs later remembers, and ranks agree on what rank 0 remembers.
        group.release()
        patch.setattr(autotune, "measure", lambda *_: pytest.fail("it is remembered"))
        with interlace.autotune():
            interlace.gemm_reduce_scatter(x, w)
        again = list(group.cache.measured.values())[-1].multiples
    interlace.synchronize()
    error = float((y - expected).norm() / expected.norm())
    return dict(measured), dict(again), seconds, error, files


def test_ranks_measure_and_remember(ranks: Any, own_gpus: None, tmp_path: Path) -> None:
    found = ranks(2).run(_measured, str(tmp_path))
    for measured, again, seconds, error, files in found:
        assert measured == again == found[0][0]
        assert error < 1e-2
        assert seconds < 5, "100 ms of the GPU's time, beside making outputs and graphs"
        assert files == 1


def _with_little_memory(folder: str) -> tuple[float, dict[str, float], int, bool]:
    """A call for which rank 1 has memory, but none for a measurement: the largest error, what was
    measured, how many files were kept, and whether the group is broken.
    """
    group = interlace.group_of()
    x, w = (torch.ones(length, INNER, device="cuda").bfloat16() for length in (ROWS, COLUMNS - 1))
    interlace.all_gather_gemm(x, w, impl="unfused")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = []
    if dist.get_rank() == 1:
        needed = 2 * 2 * ROWS * dist.get_world_size() * (INNER + COLUMNS) + (128 << 20)
        free, _ = torch.cuda.mem_get_info()
        held.append(torch.empty(free - needed, dtype=torch.uint8, device="cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune, "_memory", lambda: MeasuredTimes(Path(folder)))
        before = len(group.cache.measured)
        with interlace.autotune():
            y = interlace.all_gather_gemm(x, w)
    interlace.synchronize()
    multiples: dict[str, float] = {}
    for kind in list(group.cache.measured.values())[before:]:
        multiples |= kind.multiples
    held.clear()
    error = float((y - INNER).abs().max())
    return error, multiples, len(list(Path(folder).glob("*.json"))), group.broken


def test_nothing_is_measured_where_one_rank_has_no_memory(
    ranks: Any, own_gpus: None, tmp_path: Path
) -> None:
    """Its peers' kernels, NCCL's among them, would wait for it."""
    assert ranks(2).run(_with_little_memory, str(tmp_path)) == [(0.0, {}, 0, False)] * 2


def _captured() -> int:
    x, w = (torch.ones(256, 512, device="cuda").bfloat16() for _ in range(2))
    interlace.gemm_all_reduce(x, w)
    before = len(interlace.group_of().cache.measured)
    graph = torch.cuda.CUDAGraph()
    with interlace.autotune(), torch.cuda.graph(graph):
        y = interlace.gemm_all_reduce(x, w)
    graph.replay()
    interlace.synchronize()
    assert float(y.max()) == 512.0 * dist.get_world_size()
    return len(interlace.group_of().cache.measured) - before


def test_captured_calls_are_not_measured(ranks: Any, world_size: int) -> None:
    assert ranks(world_size).run(_captured) == [0] * world_size


def _draw() -> list[dict[str, Any]]:
    from benchmarks.sweep import measure
    from interlace.bench.draws import Draw

    # Of how many implementations are near the best each profile has its own opinion.
    return [
        measure(Draw(("gemm", "reduce_scatter"), "a model", "down", 2, rows, COLUMNS, INNER),
                dtype="bfloat16")[0]
        for rows in (256, 1024, ROWS)
    ]  # fmt: skip


def test_a_drawn_call_tells_what_its_first_call_measures(
    ranks: Any, own_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLACE_CACHE_DIR", str(tmp_path))
    for results in ranks(2).run(_draw):
        measured = [result for result in results if result["measured_us"]]
        assert measured, "several implementations are near the best"
        for result in measured:
            assert len(result["measured_us"]) >= 2
            assert result["measured"] == next(iter(result["measured_us"]))
            assert result["measured_us"].keys() <= result["times"].keys()
