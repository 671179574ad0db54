"""On GPUs: layers under autocast, second derivatives, and copies of modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import interlace
from interlace.nn import EmbeddingTable, ShardedEmbeddingBags
from tests.nn.test_autocast import linear
from tests.operators.test_derivatives import SUMMED, second_derivatives

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["column", "row", "column, sequence", "row, sequence"])
def test_linear_layers_under_autocast(ranks: Any, kind: str, inputs: torch.dtype) -> None:
    assert ranks(2).run(linear, kind, inputs, "fused", "cuda") == [[], []]


@pytest.mark.parametrize("operator", [*SUMMED, "all_gather_gemm", "gemm_all_to_all"])
def test_second_derivatives(ranks: Any, operator: str) -> None:
    for errors in ranks(2).run(second_derivatives, operator, "fused", "cuda"):
        assert max(errors) < 200 * torch.finfo(torch.float32).eps, errors


def _copied() -> bool:
    bags = ShardedEmbeddingBags([EmbeddingTable(name, 64, 32, bag_length=1) for name in ("a", "b")])
    copied = copy.deepcopy(bags)
    indices = torch.arange(16, device="cuda")
    y = copied(indices)
    y.sum().backward()
    interlace.synchronize()
    return torch.equal(y, bags(indices)) and copied.group is bags.group


def test_a_copy_of_sharded_embeddings(ranks: Any) -> None:
    assert ranks(2).run(_copied) == [True, True]
