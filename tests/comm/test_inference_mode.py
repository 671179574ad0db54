"""A program that evaluates first, in inference mode, and trains afterwards: what is kept from call
to call is ordinary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import interlace


def _evaluate_then_train() -> list[str]:
    process_group = dist.new_group()
    group = interlace.group_of()
    interlace.set_deadline(90.0, process_group)
    generator = torch.Generator().manual_seed(group.rank)
    x, w = torch.randn(64, 16, generator=generator), torch.randn(64, 16, generator=generator)
    weight = w.clone().requires_grad_()
    bag = torch.nn.Parameter(torch.ones(8, 16))
    lookups = torch.arange(8), torch.arange(0, 9, 2)
    shape = {"shape": (64, 64), "dtype": torch.float32, "group": process_group}
    with torch.inference_mode():
        for impl in ("fused", "chunked"):
            interlace.gemm_reduce_scatter(x, w, group=process_group, impl=impl)
        interlace.gemm_all_reduce(x, w, group=process_group, impl="remote_stores")
        for impl in ("fused", "chunked", "pushed"):
            interlace.all_gather_gemm(x, w, group=process_group, impl=impl)
        interlace.gemm_all_to_all(x, w, group=process_group)
        interlace.embedding_all_to_all([bag], *lookups, group=process_group)
        interlace.gemv_all_reduce(x[:1], w, group=process_group)
        symmetric = interlace.empty_symmetric((4,), dtype=torch.float32, group=process_group)
        rotating = interlace.mapped.empty_rotating(
            (2 * 64, 1024), dtype=torch.float32, group=process_group
        )
        fused = interlace.fuse(torch.mm, "all_to_all", **shape)
        counted = interlace.mapped.TriggeredTransfers(**shape, tiles=0)
        table = interlace.group_of(process_group).cache.tables.on_device([[1, 2, 3]])
    inference = [
        name
        for name, tensor in {
            "symmetric": symmetric.local,
            "peers": symmetric.peers,
            "natural": rotating.natural,
            "rotated": rotating.rotated,
            "counters": counted.counters,
            "table": table,
            "received": fused.output._received[0],
        }.items()
        if tensor.is_inference()
    ]
    interlace.set_deadline(100.0, process_group)
    for impl in ("fused", "chunked"):
        interlace.gemm_reduce_scatter(x, weight, group=process_group, impl=impl).sum().backward()
    y = interlace.gemm_all_reduce(x, weight, group=process_group, impl="remote_stores")
    y.sum().backward()
    for impl in ("fused", "chunked", "pushed"):
        interlace.all_gather_gemm(x, weight, group=process_group, impl=impl).sum().backward()
    interlace.gemm_all_to_all(x, weight, group=process_group).sum().backward()
    interlace.embedding_all_to_all([bag], *lookups, group=process_group).sum().backward()
    interlace.gemv_all_reduce(x[:1], w, group=process_group)
    fused(x, w.T)
    counted.begin()
    counted.exchange()
    symmetric.local.add_(1)
    rotating.rotated.add_(1)
    dist.barrier()
    return inference


def test_inference_first_training_later(ranks):
    assert ranks(2).run(_evaluate_then_train) == [[]] * 2
