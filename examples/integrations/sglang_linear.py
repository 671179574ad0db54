"""SGLang's row-parallel linear layer on two ranks: its product and all-reduce run as one operator
of Interlace. SGLang loads the plug-in by itself, and ``INTERLACE_SGLANG=1`` switches it on.

    python examples/integrations/sglang_linear.py          # two ranks, without GPUs

With a model: ``INTERLACE_SGLANG=1 python -m sglang.launch_server --model-path MODEL --tp 2``. This
program runs one layer, so it needs neither weights nor a server, but only SGLang's package. It
prints how many calls Interlace took, and checks the results.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

import interlace

TOKENS, K, N = (6, 130), 32, 16


@contextmanager
def worker_of_sglang():
    """What SGLang's server does before it loads a model: its plug-ins, arguments and groups."""
    from sglang.srt import plugins
    from sglang.srt.distributed import parallel_state
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    rank, ranks = dist.get_rank(), dist.get_world_size()
    with mock.patch.dict(os.environ, INTERLACE_SGLANG="1"):
        plugins.load_plugins()
    HookRegistry.apply_hooks()
    get_context().set_server_args(ServerArgs(model_path="none", tp_size=ranks, device="cpu"))
    parallel_state.set_custom_all_reduce(False)
    make_group = parallel_state.init_model_parallel_group

    def make_group_without_nccl(*args, **options):
        return make_group(*args, **options | {"use_pynccl": False})

    with mock.patch.object(parallel_state, "init_model_parallel_group", make_group_without_nccl):
        parallel_state.init_distributed_environment(ranks, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


@torch.no_grad()
def worker() -> tuple[int, float]:
    from interlace.integrations import sglang

    with worker_of_sglang():
        from sglang.srt.layers.linear import RowParallelLinear

        torch.manual_seed(dist.get_rank())
        layer = RowParallelLinear(K, N, bias=False, params_dtype=torch.float32)
        layer.weight.normal_()
        errors = []
        for tokens in TOKENS:
            x = torch.randn(tokens, K // dist.get_world_size())
            expected = x @ layer.weight.T
            dist.all_reduce(expected)
            y, _ = layer(x)
            errors.append(float((y - expected).norm() / expected.norm()))
    return sglang.calls.taken["RowParallelLinear"], max(errors)


def main() -> None:
    taken, error = interlace.launch(worker, 2, backend="cpu")[0]
    print(f"calls by Interlace: {taken} of {len(TOKENS)}; relative difference {error:.1e}")
    assert taken == len(TOKENS)
    assert error < 1e-5


if __name__ == "__main__":
    main()
