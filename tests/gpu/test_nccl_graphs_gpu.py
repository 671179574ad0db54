"""Results of operators that NCCL sends on within one CUDA graph. Run with ``-m gpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace

pytestmark = pytest.mark.gpu

# Messages of NCCL from 4 KiB to 8 MiB, which it sends by all of its protocols.
ROWS = (4, 64, 512, 4096)


def _sent_on(impl: str) -> list[bool]:
    """Whether a graph gives what calls give, for each number of rows and of replays."""
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    w = torch.randn(1024, 256, generator=generator, device="cuda").bfloat16()
    ranks, same = dist.get_world_size(), []

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        y = interlace.gemm_all_to_all(x, w, impl=impl)
        returned = torch.empty_like(y)
        dist.all_to_all_single(returned, y)
        return returned.clone()

    inputs = [
        torch.randn(rows * ranks, 256, generator=generator, device="cuda").bfloat16()
        for rows in ROWS
    ]
    expected = [there_and_back(x) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [there_and_back(x) for x in inputs]
    for _ in range(3):
        for result in results:
            result.zero_()
        graph.replay()
        same += [torch.equal(*pair) for pair in zip(results, expected, strict=True)]
    torch.cuda.synchronize()
    graph.reset()  # NCCL keeps a communicator for as long as a graph has its kernels
    interlace.group_of().release()
    return same


@pytest.mark.parametrize("impl", ["fused", "pushed", "chunked"])
def test_a_result_that_nccl_sends_on(ranks: Any, world_size: int, impl: str) -> None:
    """NCCL would wait for ever if it registered our memory and not torch's."""
    for same in ranks(world_size).run(_sent_on, impl):
        assert all(same)
