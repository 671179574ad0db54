"""SGLang's own ``RowParallelLinear``, in its own groups, with the hook as its own plug-in loader
puts it there; it needs SGLang, and a torchvision that fits PyTorch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from interlace.integrations import sglang

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
linear = pytest.importorskip("sglang.srt.layers.linear", exc_type=ImportError)

K, N = 32, 16


@contextmanager
def _sglang() -> Iterator[None]:
    """SGLang's state of a worker: its arguments, its groups, and the plug-ins that it loads."""
    from sglang.srt import plugins
    from sglang.srt.distributed import parallel_state
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    ranks, rank = dist.get_world_size(), dist.get_rank()
    plugins.load_plugins()
    HookRegistry.apply_hooks()
    get_context().set_server_args(ServerArgs(model_path="none", tp_size=ranks, device="cpu"))
    parallel_state.set_custom_all_reduce(False)
    create = parallel_state.init_model_parallel_group

    def create_without_nccl(*args: Any, **options: Any) -> Any:
        return create(*args, **options | {"use_pynccl": False})

    with mock.patch.object(parallel_state, "init_model_parallel_group", create_without_nccl):
        parallel_state.init_distributed_environment(ranks, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
    sglang.calls.clear()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _run(tokens: list[int]) -> tuple[int, list[str], float]:
    torch.manual_seed(7 + dist.get_rank())
    errors = []
    with _sglang(), torch.no_grad():
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
