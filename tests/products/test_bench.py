"""The benchmark's steps, on small shapes and the CPU backend: they run, they are right, and the tuner keeps the fastest."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from interlace.bench import report


def _measure(step, *, period, samples=15, group=None):
    """Runs the step for every set of operands instead of timing it."""
    from interlace.bench.timing import Timing

    for i in range(period):
        step(i)
    return Timing(10.0, 9.0, 11.0, 1.0, samples)


def _bench(operator):
    from interlace.bench import products

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "measure", _measure)
        patch.setattr(products, "_async_tensor_parallel", lambda case: {})  # CUDA's
        shape = products.Shape(operator, 8, 16, 24, torch.float32)
        group = dist.new_group()
        start = products.Case(shape, group).choice.config
        tried = [dataclasses.replace(start, block_m=32), start]
        patch.setattr(products, "candidates", lambda *_: tried)
        return products.bench(shape, None, group), str(products.tune(shape, group)), str(tried[0])


@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "all_gather_gemm"])
def test_every_way_of_an_operator(ranks, operator):
    for result, tuned, first in ranks(2).run(_bench, operator):
        summary = report.summarise(result)
        assert (summary.fused_us, summary.unfused, summary.compute[0]) == (10.0, ("cuBLAS + NCCL", 10.0), "cuBLAS alone")
        assert result["flops"] == 2 * 8 * 16 * 24
        assert tuned == first, "ties keep what was tried first"
        assert report.title(operator, result) == f"{operator}: 8 x 16 x 24, float32, 2 ranks"


@pytest.mark.parametrize("text", ["8192x8192", "0x8x8", "axbxc"])
def test_shapes_that_are_none(text):
    from interlace.cli.bench_products import parse_product
    from interlace.errors import ArgumentError

    with pytest.raises(ArgumentError, match="--shape must be MxNxK"):
        parse_product(text)
