"""The MLP of vLLM's Llama, tensor-parallel on two ranks, and the norm behind it: its product,
all-reduce, residual and norm run as Interlace's operators. vLLM loads the plug-in by itself, and
``INTERLACE_VLLM=1`` switches it on.

    python examples/integrations/vllm_llama_mlp.py          # two ranks, without GPUs

With a model: ``INTERLACE_VLLM=1 vllm serve MODEL --tensor-parallel-size 2``. This program compiles
one layer, so it needs neither weights nor a server, but only vLLM's package. It prints what was
fused, and checks the result against vLLM's own.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist

import interlace
import interlace.compile

TOKENS, HIDDEN, INTERMEDIATE = 130, 16, 32


@contextmanager
def worker_of_vllm():
    """What vLLM's engine does before it loads a model: its settings, groups and plug-ins."""
    from vllm import plugins
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.ir.op import enable_torch_wrap
    from vllm.platforms import current_platform

    rank, ranks = dist.get_rank(), dist.get_world_size()
    with ExitStack() as stack:
        # Without a GPU vLLM knows no platform; its collectives are operators on those that it has.
        stack.enter_context(
            mock.patch.object(
                type(current_platform), "use_custom_op_collectives", return_value=True
            )
        )
        stack.enter_context(enable_torch_wrap(True))
        configuration = VllmConfig(device_config=DeviceConfig("cpu"))
        stack.enter_context(set_current_vllm_config(configuration))
        parallel_state.init_distributed_environment(ranks, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(ranks)
        stack.enter_context(mock.patch.dict(os.environ, INTERLACE_VLLM="1"))
        plugins.load_general_plugins()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


@torch.no_grad()
def worker() -> tuple[list[str], float]:
    with worker_of_vllm():
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.models.llama import LlamaMLP

        torch.manual_seed(dist.get_rank())
        mlp, norm = LlamaMLP(HIDDEN, INTERMEDIATE, "silu", prefix="mlp"), RMSNorm(HIDDEN)
        for parameter in mlp.parameters():
            parameter.normal_()
        torch.manual_seed(0)
        x, residual = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)

        def layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return torch.cat(norm(mlp(x), residual.clone()))

        expected = layer(x, residual)
        with interlace.compile.recording() as findings:
            # Inductor runs the same pass; this backend needs no C++ compiler.
            y = torch.compile(layer, backend=interlace.compile.eager_backend)(x, residual)
    fused = [finding.operator or "nothing" for finding in findings]
    return fused, float((y - expected).norm() / expected.norm())


def main() -> None:
    fused, error = interlace.launch(worker, 2, backend="cpu")[0]
    print(f"fused: {', '.join(fused)}; relative difference {error:.1e}")
    assert fused == ["gemm_all_reduce"]
    assert error < 1e-5


if __name__ == "__main__":
    main()
