"""The all-gather by which a reduce-scatter's gradients are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import interlace


class _Splits(TorchDispatchMode):
    """Notes the lists of rows that all-gathers are given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.interlace.all_gather_gemm.default:
            self.given.append(args[5])
        return function(*args, **(kwargs or {}))


def _backward(rows: int) -> tuple[list[Any], float]:
    """The lists of a backward pass, and how far x's gradient is from the product of all ranks'
    gradients.
    """
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, w, grad = torch.randn(rows, 12), torch.randn(8, 12), torch.randn(rows, 8)
    y = interlace.gemm_reduce_scatter(x.requires_grad_(), w.requires_grad_())
    with _Splits() as splits:
        y.backward(grad.tensor_split(ranks)[rank])
    assert x.grad is not None
    return splits.given, (x.grad - grad @ w).abs().max().item()


@pytest.mark.parametrize(("rows", "splits"), [(6, None), (7, [4, 3]), (1, [1, 0])])
def test_equal_rows_are_gathered_without_a_list(
    ranks: Any, rows: int, splits: list[int] | None
) -> None:
    """A call that has a list is not found when it comes again."""
    for given, error in ranks(2).run(_backward, rows):
        assert given == [splits]
        assert error < 1e-5
