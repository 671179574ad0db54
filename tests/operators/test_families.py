"""Operators that agree once on calls of all sizes: no call of another size exchanges anything on
the host, and ranks that differ in it still find that out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from tests.asked import asked
from tests.errors import error_of

_HIDDEN = 8


def _experts(size: int, group: dist.ProcessGroup, impl: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, _HIDDEN, generator=generator).requires_grad_()
    w_in = torch.randn(2, 16, 2, _HIDDEN, generator=generator)
    w_out = torch.randn(2, _HIDDEN, 16, generator=generator)
    weights, chosen = torch.rand(size, 4, generator=generator).topk(2)
    y = interlace.mixture_of_experts(x, chosen, weights, w_in, w_out, group=group, impl=impl)
    y.sum().backward()
    return y.detach()


def _tables(size: int, group: dist.ProcessGroup, impl: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    table = torch.randn(10, _HIDDEN, generator=generator).requires_grad_()
    indices = torch.randint(0, 10, (size,), generator=generator)
    y = interlace.embedding_all_to_all(
        [table], indices, torch.arange(size + 1), name="a table", group=group, impl=impl
    )
    y.sum().backward()
    return y.detach()


def _products(size: int, group: dist.ProcessGroup, impl: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    x = [torch.randn(size, _HIDDEN, generator=generator) for _ in range(2)]
    w = [torch.randn(16, _HIDDEN, generator=generator) for _ in range(2)]
    y: torch.Tensor = torch.ops.interlace.gemm_sum_reduce_scatter(x, w, group.group_name)
    return y


def _vocabulary(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, _HIDDEN, generator=generator).requires_grad_()
    return x, torch.randn(16, _HIDDEN, generator=generator)


def _loss(size: int, group: dist.ProcessGroup, impl: str) -> torch.Tensor:
    x, w = _vocabulary(size)
    target = torch.arange(size) % 32
    losses = interlace.linear_cross_entropy(
        x, w, target, reduction="none", group=group, impl=impl, vocabulary=32
    )
    losses.sum().backward()
    assert x.grad is not None
    return torch.cat([losses.detach(), x.grad.flatten()])


def _columns(size: int, group: dist.ProcessGroup, impl: str) -> torch.Tensor:
    x, w = _vocabulary(size)
    return interlace.linear_top_k(x.detach(), w, 3, group=group, impl=impl).values


def _heads(size: int, group: dist.ProcessGroup, impl: str) -> torch.Tensor:
    """To the columns of heads, and back to rows; both backward passes are the other operator."""
    x, w = _vocabulary(size)
    y = interlace.gemm_all_to_all_columns(x, w, group=group, impl=impl)
    z = interlace.all_to_all_gemm(y, w.T.contiguous(), group=group, impl=impl)
    z.sum().backward()
    assert x.grad is not None
    return torch.cat([z.detach(), x.grad])


def _without_columns(size: int, group: dist.ProcessGroup, impl: str) -> torch.Tensor:
    x, w = torch.ones(size, _HIDDEN), torch.ones(0, _HIDDEN)
    return interlace.all_gather_gemm(x, w, group=group, impl=impl)


_CALLS: dict[str, Callable[[int, dist.ProcessGroup, str], torch.Tensor]] = {
    "experts": _experts, "tables": _tables, "products": _products, "loss": _loss,
    "columns": _columns, "heads": _heads, "without columns": _without_columns,
}  # fmt: skip


def _exchanged(kind: str, impl: str) -> tuple[list[int], bool]:
    """How many exchanges each of some calls begins, the first of which has most rows; and whether
    results are those of another group, which has seen no other call.
    """
    group, call, counts, are_equal = dist.new_group(), _CALLS[kind], [], []
    interlace.group_of(group)
    with asked() as labels:
        for size in (12, 6, 4, 10, 6):
            labels.clear()
            y = call(size, group, impl)
            counts.append(len(labels))
            are_equal.append(torch.equal(y, call(size, dist.new_group(), impl)))
    return counts, all(are_equal)


@pytest.mark.parametrize(
    ("kind", "impl"),
    [
        ("experts", "fused"), ("experts", "unfused"), ("tables", "fused"), ("tables", "pooled"),
        ("products", ""), ("loss", "fused"), ("loss", "unfused"), ("columns", "fused"),
        ("columns", "unfused"), ("heads", "fused"), ("heads", "unfused"),
    ],
)  # fmt: skip
def test_calls_of_other_sizes_exchange_nothing(ranks: Any, kind: str, impl: str) -> None:
    for (first, *others), are_equal in ranks(2).run(_exchanged, kind, impl):
        assert first
        assert others == [0] * 4
        assert are_equal


def _different_sizes(kind: str, impl: str) -> tuple[str, dict[str, Any]]:
    process_group = dist.new_group()
    group, call = interlace.group_of(process_group), _CALLS[kind]
    call(12, process_group, impl)
    group.deadline_s = 3.0
    name, _, fields = error_of(lambda: call(6 + 2 * dist.get_rank(), process_group, impl))
    return name, fields


@pytest.mark.parametrize(
    ("kind", "impl"),
    [
        ("experts", "fused"), ("experts", "unfused"), ("tables", "fused"), ("tables", "pooled"),
        ("tables", "unfused"), ("products", ""), ("loss", "fused"), ("loss", "unfused"),
        ("columns", "fused"), ("columns", "unfused"), ("heads", "fused"), ("heads", "unfused"),
        ("without columns", "fused"),
    ],
)  # fmt: skip
def test_different_sizes_are_found(ranks: Any, kind: str, impl: str) -> None:
    """By the marks of signals, and those of a comparison ahead of a stock collective."""
    outcomes = ranks(2).run(_different_sizes, kind, impl)
    assert {name for name, _ in outcomes} == {"PeerTimeoutError"}
    assert any(fields["different_call"] for _, fields in outcomes)
