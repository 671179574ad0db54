"""SGLang's own ``RowParallelLinear``, in its own groups, with the hook as its own plug-in loader
puts it there; it needs SGLang, and a torchvision that fits PyTorch.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples.integrations.sglang_linear import worker_of_sglang

from interlace.integrations import sglang

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
linear = pytest.importorskip("sglang.srt.layers.linear", exc_type=ImportError)

K, N = 32, 16


def _run(tokens: list[int]) -> tuple[int, list[str], float]:
    torch.manual_seed(7 + dist.get_rank())
    errors = []
    with worker_of_sglang(), torch.no_grad():
        sglang.calls.clear()
        layer = linear.RowParallelLinear(K, N, bias=False, params_dtype=torch.float32)
        layer.weight.normal_()
        for count in tokens:
            x = torch.randn(count, K // dist.get_world_size())
            expected = x @ layer.weight.T
            dist.all_reduce(expected)
            found, _ = layer(x)
            errors.append(float((found - expected).norm() / expected.norm()))
        layer(x, skip_all_reduce=True)
    left = [reason for _, reason in sglang.calls.left]
    return sglang.calls.taken["RowParallelLinear"], left, max(errors)


def test_row_parallel_linear(ranks: Any) -> None:
    tokens = [6, 130]
    for taken, left, error in ranks(2).run(_run, tokens):
        assert taken == len(tokens)
        assert ["does not want the sum" in reason for reason in left] == [True]
        assert error < 1e-5
