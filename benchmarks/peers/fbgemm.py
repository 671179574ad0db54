"""FBGEMM's fused tables, which TorchRec runs, with NCCL's all-to-all and the copy into place."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.case import Call, Case, device
from benchmarks.peers.tables import EPSILON, RATE, exchange, exchange_back

NAME, DISTRIBUTION = "FBGEMM", "fbgemm-gpu"
INSTALL = "pip install --no-deps fbgemm-gpu==1.6.0"


def _fused_tables(inputs: Any) -> Any:
    """Return FBGEMM's module with a copy of the tables, and row-wise Adagrad."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        ComputeDevice,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    dtype = {
        torch.float32: SparseType.FP32, torch.float16: SparseType.FP16,
        torch.bfloat16: SparseType.BF16,
    }[inputs.dtype]  # fmt: skip
    place = EmbeddingLocation.DEVICE, ComputeDevice.CUDA
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, *place) for rows, width in zip(inputs.sizes, inputs.widths, strict=True)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=RATE, eps=EPSILON,
        weights_precision=dtype, output_dtype=dtype, pooling_mode=PoolingMode.SUM,
        # Interlace rounds to nearest.
        stochastic_rounding=False, device=device(),
    )  # fmt: skip
    for copy, weight in zip(module.split_embedding_weights(), inputs.weights, strict=True):
        copy.data.copy_(weight)
    return module


class _Exchange(torch.autograd.Function):
    """The all-to-all of pooled rows, and that of their gradients."""

    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor) -> torch.Tensor:
        ctx.columns = pooled.shape[1]
        return exchange(pooled)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return exchange_back(grads[0], ctx.columns)


def forward(case: Case) -> dict[str, Call]:
    """Return the tables with the exchange; the tables alone are timed as ``alone``."""
    inputs = case.inputs
    module = _fused_tables(inputs)

    def alone(i: int) -> torch.Tensor:
        pooled: torch.Tensor = module(inputs.indices, inputs.offsets)
        return pooled

    # FBGEMM is quicker than PyTorch's own tables, so these would not be the least time.
    case.ways["alone"] = alone
    return {"FBGEMM + NCCL": lambda i: exchange(alone(i))}


def both(case: Case) -> dict[str, Call]:
    """Return both passes with the exchanges; the update is in the backward pass."""
    inputs = case.inputs
    module = _fused_tables(inputs)
    tables = [weight.detach() for weight in module.split_embedding_weights()]

    def run(i: int) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            y = _Exchange.apply(module(inputs.indices, inputs.offsets))
            y.backward(inputs.grad)
        return y.detach(), *tables

    return {"FBGEMM + NCCL": run}


WAYS = {"tables, forward": forward, "tables, forward + backward": both}
