"""``torch.ops.symm_mem.fused_*`` by Interlace on GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from interlace.integrations import symm_mem

pytestmark = pytest.mark.gpu


def _errors(operator, arguments, reference):
    """How many calls Interlace took, and the relative errors of the results.

    ``reference`` holds the results in float32.
    """
    symm_mem.install()
    try:
        results = getattr(torch.ops.symm_mem, operator)(*arguments)
        taken = symm_mem.calls.taken.total()
    finally:
        symm_mem.uninstall()
    found = [results] if isinstance(results, torch.Tensor) else [results[0], *results[1]]
    pairs = zip(found, reference, strict=True)
    return taken, [float((y.float() - z).norm() / z.norm()) for y, z in pairs]


def _operators(dim):
    """``[8, 512, 256]`` on each rank, along either dimension, in bfloat16."""
    name, ranks = dist.group.WORLD.group_name, dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    x, w = (torch.randn(size, device="cuda").bfloat16() for size in ((8, 512, 256), (384, 256)))
    total = x.float() @ w.float().T
    dist.all_reduce(total)
    part = total.chunk(ranks, dim)[dist.get_rank()]
    scatter = _errors("fused_matmul_reduce_scatter", (x, w.T, "sum", dim, name), [part])
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x)
    rows = torch.cat(parts, dim).float()
    weights = [w.T, w[:128].T]
    products = [rows @ weight.float() for weight in weights]
    gather = _errors("fused_all_gather_matmul", (x, weights, dim, name), [rows, *products])
    return scatter, gather


@pytest.mark.parametrize("dim", [0, 1])
def test_operators(ranks, world_size, dim):
    for outcomes in ranks(world_size).run(_operators, dim):
        for taken, errors in outcomes:
            assert taken == 1
            assert max(errors) < 1e-2
