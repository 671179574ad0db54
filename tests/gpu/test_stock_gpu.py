"""Stock pairs as implementations: PyTorch's own operators by ``impl=``. Run with ``-m gpu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.gemm.operator import GemmOperator
from interlace.registry import operators

pytestmark = pytest.mark.gpu

STOCK = [
    (name, implementation.name)
    for name, declaration in operators().items()
    for implementation in declaration.implementations
    if isinstance(declaration, GemmOperator) and implementation.is_stock
]
SHAPES = [(4096, 512, 384), (64, 1024, 512)]  # all-reduces in two shots, and in one


def _differences(operator: str, impl: str, dtype: torch.dtype) -> list[float]:
    """Relative differences from ``impl="unfused"``, of calls and of a captured graph, whose x and w
    are contiguous or not.
    """
    call = getattr(interlace, operator)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    differences = []
    for rows, columns, inner in SHAPES:
        x, w = (
            torch.randn(shape, generator=generator, device="cuda").to(dtype)
            for shape in ((rows, inner), (columns, inner))
        )
        if rows == 64:
            x, w = torch.nn.functional.pad(x, (0, 64))[:, :inner], w.T.contiguous().T
        expected = call(x, w, impl="unfused").double()
        results = [call(x, w, impl=impl) for _ in range(3)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(x, w, impl=impl)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = call(x, w, impl=impl)
        graph.replay()
        for y in (*results, captured):
            differences.append(float((y.double() - expected).norm() / expected.norm()))
    interlace.synchronize()
    return differences


@pytest.mark.usefixtures("own_gpus")  # as PyTorch's symmetric memory wants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("operator", "impl"), STOCK)
def test_they_compute_what_the_unfused_pair_does(
    ranks: Callable[[int], Any], world_size: int, operator: str, impl: str, dtype: torch.dtype
) -> None:
    for differences in ranks(world_size).run(_differences, operator, impl, dtype):
        assert max(differences) < 4 * torch.finfo(dtype).eps
