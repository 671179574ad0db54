"""Results that a program changes in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import interlace
from interlace.errors import ArgumentError
from interlace.registry import operators

INNER = 48
PRODUCTS = "gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "gemm_all_to_all"


def _changed(result: torch.Tensor) -> bool:
    """Whether what autograd records can be written into a result of what it does not record."""
    try:
        with torch.enable_grad():
            result.mul_(torch.ones((), requires_grad=True))
    except RuntimeError:
        return False
    return True


def _of_products(name: str) -> list[tuple[str, int, int]]:
    """The implementations whose results cannot be changed, with rows and columns."""
    left = []
    for implementation in operators()[name].implementations:
        for rows, columns in ((2, 30), (2, 32), (16, 30), (16, 32)):
            x, w = torch.randn(rows, INNER), torch.randn(columns, INNER)
            try:
                with torch.no_grad():
                    y = getattr(interlace, name)(x, w, impl=implementation.name)
            except ArgumentError:  # what the CPU backend does not run
                continue
            if not _changed(y):
                left.append((implementation.name, rows, columns))
    return left


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_recorded_changes_results_of_what_is_not(ranks: Any, name: str) -> None:
    """Views that are made where nothing is recorded cannot be changed so."""
    assert ranks(2).run(_of_products, name) == [[], []]


def _of_others() -> list[str]:
    left = []
    w, ones = torch.randn(32, INNER), torch.ones(32)
    experts, weights = torch.randint(0, 4, (4, 2)), torch.rand(4, 2)
    w_in, w_out = torch.randn(2, 8, 2, 8), torch.randn(2, 8, 8)
    with torch.no_grad():
        for rows in (1, 4):
            x, residual = torch.randn(rows, INNER), torch.zeros(rows, 32)
            for impl in ("fused", "pushed", "gemm"):
                normed = interlace.gemm_all_reduce(
                    x, w, norm_weight=ones, residual=residual, impl=impl
                )
                left += [f"{impl}, norm" for each in normed[:2] if not _changed(each)]
        for impl in ("fused", "decode", "unfused"):
            y = interlace.mixture_of_experts(
                torch.randn(4, 8), experts, weights, w_in, w_out, impl=impl
            )
            left += [] if _changed(y) else [f"{impl}, experts"]
        bags = torch.tensor([0, 1]), torch.tensor([0, 1, 2])
        y = interlace.embedding_all_to_all([torch.randn(5, 4)], *bags, name="in place")
        left += [] if _changed(y) else ["tables"]
    return left


def test_so_do_results_of_norms_experts_and_tables(ranks: Any) -> None:
    assert ranks(2).run(_of_others) == [[], []]
