"""What kernels around a product are told of sizes that they compile the same for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.gemm import launch
from interlace.gemm.config import GemmConfig
from interlace.gemm.operands import Operands


@pytest.mark.parametrize(
    ("columns", "inner", "factor"),
    [(4096, 2048, 16), (48, 16, 16), (1000, 2048, 8), (4096, 1004, 4), (33, 2048, 1)],
)
def test_sizes_are_known_to_be_multiples(columns: int, inner: int, factor: int) -> None:
    """Of 16 too: Triton says nothing of arguments that it does not specialise. Tiles that travel by
    stores were stored two bytes at a time.
    """
    x, w = torch.empty(8, inner).bfloat16(), torch.empty(columns, inner).bfloat16()
    group: Any = SimpleNamespace(world_size=2)
    constants = launch.constants(
        Operands(x, w, None, None, None, x.dtype),
        GemmConfig(),
        group,
        descriptors=False,
        tile_stores=False,
    )
    assert constants["TILING"].factor == factor
