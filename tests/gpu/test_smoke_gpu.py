"""One call of every implementation of every operator, forward and backward. Run with ``-m "gpu and smoke"``.

Every operator has ranks of its own, and all work at once: most of the time goes to compiling kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.ops  # registers torch.ops.interlace
from interlace.ops.all_gather_gemm.config import IMPLS as GATHERING_IMPLS
from interlace.ops.all_to_all_bmm.config import IMPLS as BATCH_IMPLS
from interlace.ops.gemv_all_reduce.config import PROTOCOLS, GemvAllReduceConfig
from interlace.products.choice import IMPLS as PRODUCT_IMPLS
from interlace.products.choice import takes_bias
from tests.gpu import test_embedding_all_to_all_gpu as embedding
from tests.gpu import test_mixture_of_experts_gpu as experts
from tests.ops.mixture_of_experts.calls import Call as ExpertsCall
from tests.ops.mixture_of_experts.calls import check_all as check_experts
from tests.pool import Pool
from tests.products.calls import IMPLS, Call, check_gradients, differentiate, run
from tests.products.calls import check_all as check_products

pytestmark = [pytest.mark.gpu, pytest.mark.smoke, pytest.mark.alone]

INNER = 64


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers that are different on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator).bfloat16().to(interlace.group_of().device)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


def _differentiate(calls: list[Call]) -> list[dict[str, torch.Tensor]]:
    return [differentiate(call) for call in calls]


def _check_product(pool: Pool, operator: str) -> None:
    impls = GATHERING_IMPLS if operator == "all_gather_gemm" else PRODUCT_IMPLS
    size = pool.world_size
    calls = [
        Call(operator, 32 * size, 128, INNER, "bfloat16", takes_bias(operator, impl), impl=impl) for impl in impls if impl != "auto"
    ]
    check_products(calls, pool.run(run, calls))
    outcomes = pool.run(_differentiate, calls)
    for i, call in enumerate(calls):
        check_gradients(call, [rank[i] for rank in outcomes], factor=math.sqrt(INNER + 128 * size))


def _gemv(impl: str, config: GemvAllReduceConfig | None) -> list[float]:
    """Errors of y and of the gradients of x and w, of a loss that every rank computes alike."""
    x, w = _random(3, INNER), _random(96, INNER, seed=1)
    target = torch.randn(3, 96, generator=torch.Generator().manual_seed(5)).bfloat16().to(x.device)
    wanted = x.double() @ w.double().T
    dist.all_reduce(wanted)
    exact = [wanted, target.double() @ w.double(), target.double().T @ x.double()]
    leaves = [x.requires_grad_(), w.requires_grad_()]
    y = interlace.gemv_all_reduce(*leaves, impl=impl, config=config)
    found = [y, *torch.autograd.grad(y, leaves, target)]
    interlace.synchronize()
    return [_error(*pair) for pair in zip(found, exact, strict=True)]


def _check_gemv(pool: Pool) -> None:
    configs = [GemvAllReduceConfig(protocol, 16, 64, 4) for protocol in PROTOCOLS]
    for impl, config in [*(("fused", config) for config in configs), ("unfused", None)]:
        for errors in pool.run(_gemv, impl, config):
            assert max(errors) < 0.01, (impl, config, errors)


def _check_embedding(pool: Pool) -> None:
    call = embedding.Call(3, 64, rows=100, batch=40)
    for impl, config in [*(("fused", config) for config in embedding.CONFIGS), ("unfused", None)]:
        embedding.check_forward(pool.run(embedding.matches, [call], impl, config))
        embedding.check_gradients(pool.run(embedding.trains, [call], impl, config))


def _check_experts(pool: Pool) -> None:
    large = {"tokens": 40, "hidden": 64, "ffn": 64, "dtype": "bfloat16"}
    calls = [ExpertsCall(pool.world_size, **large, config=config) for config in experts.CONFIGS]
    calls.append(ExpertsCall(pool.world_size, **large, impl="unfused", config=None))
    check_experts(calls, pool.run(experts.matches, calls))


def _sums() -> list[float]:
    """Errors of the operators that only the pass for ``torch.compile`` calls; they have no gradients."""
    ops, ranks = torch.ops.interlace, dist.get_world_size()
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    x, w = _random(2, 16 * ranks, INNER), _random(2, INNER, 128, seed=1)
    sent = torch.bmm(x.double(), w.double()).unflatten(1, (ranks, 16)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    outcomes = [(ops.bmm_all_to_all(x, w, name, impl).view(sent.shape), received) for impl in ("fused", "split")]
    outcomes.append((ops.bmm_sum_all_to_all([x, x], [w, w], name).view(sent.shape), 2 * received))
    total = 2 * x[0].double() @ w[0].double()
    dist.all_reduce(total)
    sums = ops.gemm_sum_reduce_scatter([x[0], x[0]], [w[0].T, w[0].T], name)
    outcomes.append((sums, total.chunk(ranks)[dist.get_rank()]))
    rows = x.flatten(0, 1)
    gathered = torch.empty_like(rows)
    dist.all_to_all_single(gathered, rows)
    batch = gathered.view(ranks, 2, 16, INNER).transpose(0, 1).flatten(1, 2)
    for impl in BATCH_IMPLS:
        outcomes.append((ops.all_to_all_bmm(rows, w, name, impl)[0], torch.bmm(batch.double(), w.double())))
    interlace.synchronize()
    return [_error(*pair) for pair in outcomes]


def _check_sums(pool: Pool) -> None:
    for errors in pool.run(_sums):
        assert max(errors) < 0.01, errors


CHECKS: dict[str, Callable[[Pool], None]] = {
    "gemv_all_reduce": _check_gemv,
    "embedding_all_to_all": _check_embedding,
    "mixture_of_experts": _check_experts,
    "sums and batches": _check_sums,
    **{operator: functools.partial(_check_product, operator=operator) for operator in IMPLS},
}


def check_all(world_size: int, backend: str) -> None:
    """Run every check on ranks of its own, all at the same time, and raise the first failure."""
    with ExitStack() as stack:
        pools = [stack.enter_context(closing(Pool(world_size, backend))) for _ in CHECKS]
        with ThreadPoolExecutor(len(CHECKS)) as executor:
            futures = [executor.submit(check, pool) for check, pool in zip(CHECKS.values(), pools, strict=True)]
        for future in futures:
            future.result()


def test_every_implementation_of_every_operator(world_size: int) -> None:
    check_all(world_size, "cuda")
