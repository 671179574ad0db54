"""The benchmark's steps, on small shapes and the CPU backend: they run, they are right, and the
tuner keeps the fastest.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from interlace.bench import report
from interlace.errors import ArgumentError
from interlace.gemm.operands import FLOAT8
from interlace.registry import operator_named
from tests.untimed import untimed


def _bench(operator):
    from interlace.bench import products

    with untimed() as patch:
        shape = products.ProductShape(operator, 8, 16, 24, torch.float32)
        group = dist.new_group()
        start = products.TimedProduct(shape, group).choice.config
        tried = [dataclasses.replace(start, block_m=32), start]
        patch.setattr(type(operator_named(operator)), "candidates", lambda *_: tried)
        return products.bench(shape, None, group), str(products.tune(shape, group)), str(tried[0])


@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "all_gather_gemm"])
def test_every_way_of_an_operator(ranks, operator):
    for result, best, first in ranks(2).run(_bench, operator):
        summary = report.summarise(result)
        assert (summary.fused_us, summary.unfused, summary.compute[0]) == (
            10.0,
            ("cuBLAS + NCCL", 10.0),
            "cuBLAS alone",
        )
        assert result["flops"] == 2 * 8 * 16 * 24
        assert result["times"]["fused"]["role"] == "ours"
        assert result["times"]["cuBLAS + NCCL"]["impl"] == "unfused"
        assert best == first, "ties keep what was tried first"
        assert {"fused", "chunked", "cuBLAS + NCCL"} <= result["host_us"].keys()
        assert all(us > 0 for us in result["host_us"].values())
        assert report.title(operator, result) == f"{operator}: 8 x 16 x 24, float32, 2 ranks"


def _bench_uneven(operator):
    from interlace.bench import products

    with untimed():
        return sorted(products.bench(products.ProductShape(operator, 9, 16, 24))["times"])


def test_rows_that_ranks_share_unevenly(ranks):
    """No library scatters them in one call, so nothing is said of communication alone."""
    for ways in ranks(2).run(_bench_uneven, "gemm_reduce_scatter"):
        assert "NCCL alone" not in ways
        assert {"fused", "cuBLAS + NCCL", "cuBLAS alone"} <= set(ways)
    for message in ranks(2).run(_refused, "all_gather_gemm"):
        assert message == (
            "all_gather_gemm: rows must be a multiple of 2 ranks, which share them out evenly; "
            "got 9."
        )


def _refused(operator):
    from interlace.bench import products

    with pytest.raises(ArgumentError) as raised:
        products.TimedProduct(products.ProductShape(operator, 9, 16, 24))
    return str(raised.value)


def _bench_scaled():
    from interlace.bench import products

    shape = products.ProductShape("gemm_reduce_scatter", 8, 16, 256, FLOAT8, has_block_scales=True)
    with untimed():
        return products.bench(shape)


def test_float8_with_scales_of_blocks(ranks):
    for result in ranks(2).run(_bench_scaled):
        assert result["has_block_scales"]
        assert {"fused", "chunked", "pushed", "cuBLAS + NCCL"} <= set(result["times"])


def _bench_few_rows():
    from benchmarks import gemv_all_reduce

    def symmetric(size, dtype, group):
        """PyTorch's symmetric memory is of GPUs."""
        shared = torch.zeros(size, dtype=dtype)
        return shared, {"torch one-shot": lambda i: dist.all_reduce(shared, group=group)}

    with untimed() as patch:
        patch.setattr(gemv_all_reduce, "symmetric_all_reduces", symmetric)
        return gemv_all_reduce.measure((1, 16, 24), dtype="float32", tunes=False)[0]


def test_few_rows(ranks):
    for result in ranks(2).run(_bench_few_rows):
        assert result["times"].keys() == {
            "gemv", "cuBLAS + NCCL", "NCCL alone", "cuBLAS + torch one-shot",
            "torch one-shot alone", "cuBLAS mm alone", "cuBLAS mv alone", "our GEMV alone",
            "our exchange alone",
        }  # fmt: skip
        assert result["relative_error"] < 1e-6
        summary = report.summarise(result)
        assert summary.unfused[0] == "cuBLAS + NCCL"
        assert result["shape"] == "1 x 16 x 24"


def _compare(operator):
    from benchmarks import transports

    with untimed():
        return transports.measure((operator, 16, 128, 24), dtype="float32")[0]


@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "gemm_all_to_all"])
def test_every_transport(ranks, operator):
    from benchmarks import transports

    for result in ranks(2).run(_compare, operator):
        carried = {name for name in result["ways"] if not name.endswith(("alone", "independent"))}
        assert carried == {
            "fused, tile stores", "fused, SM stores", "cuBLAS, mapped output, natural",
            "cuBLAS, mapped output, rotated", "cuBLAS in parts, copy engines",
            "cuBLAS + NCCL",
        }  # fmt: skip
        assert transports.table(operator, result).row_count == len(result["ways"])


def test_kernels_of_a_trace():
    """Two calls: a product and a copy each, and one odd kernel."""
    from benchmarks.kernels import Kernel, kernels

    kernel = {"cat": "kernel", "args": {"grid": [132, 1, 1]}}
    copy = {"cat": "gpu_memcpy", "name": "Memcpy PtoP", "args": {}}
    events = [
        {**kernel, "name": "product", "ts": 100.0, "dur": 10.0},
        {**copy, "ts": 111.0, "dur": 4.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0},
        {**kernel, "name": "product", "ts": 120.0, "dur": 12.0},
        # This copy starts beside the product, and the sum when both have ended.
        {**copy, "ts": 129.0, "dur": 5.0},
        {**kernel, "name": "sum", "ts": 136.5, "dur": 2.0, "args": {"grid": [4, 2, 1]}},
    ]
    found = kernels(events, 2)
    assert found == [
        Kernel("product", 132, 11.0, 1.0, 5.0),
        Kernel("Memcpy PtoP", 0, 4.5, 1.0, -1.0),
        Kernel("sum", 8, 2.0, 0.5, 2.5),
    ]


@pytest.mark.parametrize("text", ["8192x8192", "0x8x8", "axbxc"])
def test_shapes_that_are_none(text):
    from interlace.cli.bench import parse_sizes
    from interlace.errors import ArgumentError

    with pytest.raises(ArgumentError, match="a shape must be MxNxK"):
        parse_sizes(text, "MxNxK, the sizes of one rank's product", "8x8x8")


def test_the_error_of_a_rank_without_rows() -> None:
    """A reduce-scatter of one row leaves none to the second rank, which is no error."""
    from interlace.bench.benchmark import relative_error

    assert relative_error(torch.empty(0, 4), torch.empty(0, 4)) == 0.0
    assert relative_error(torch.tensor([3.0]), torch.tensor([2.0])) == 0.5
