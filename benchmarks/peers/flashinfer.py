"""FlashInfer's all-reduce, fused with residual and RMSNorm, behind cuBLAS's product."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.case import Call, Case
from benchmarks.peers.products import ALL_REDUCE_SIZES, EPS, NORM_SIZES

NAME, DISTRIBUTION = "FlashInfer", "flashinfer-python"
INSTALL = "pip install flashinfer-python==0.6.14  # compiles with nvcc at its first call"


@functools.cache
def _workspace() -> Any:
    """Return memory for the largest call. Collective."""
    from flashinfer import comm

    sizes = (*ALL_REDUCE_SIZES, *NORM_SIZES)
    return comm.create_allreduce_fusion_workspace(
        backend="trtllm", world_size=dist.get_world_size(), rank=dist.get_rank(),
        max_token_num=max(size[0] for size in sizes), hidden_dim=max(size[1] for size in sizes),
        dtype=torch.bfloat16, group=dist.group.WORLD,
    )  # fmt: skip


def gemm_all_reduce(case: Case) -> dict[str, Call]:
    """Return the product, then the all-reduce in one or two shots, as FlashInfer chooses.

    As engines do, it lets the kernel start before the product has ended.
    """
    inputs, workspace, output = case.inputs, _workspace(), torch.empty_like(case.inputs.y)
    from flashinfer import comm

    def run(i: int) -> torch.Tensor:
        comm.allreduce_fusion(
            inputs.product(i), workspace, comm.AllReduceFusionPattern.kAllReduce, output=output,
            launch_with_pdl=True,
        )  # fmt: skip
        return output

    return {"cuBLAS + FlashInfer": run}


def gemm_all_reduce_norm(case: Case) -> dict[str, Call]:
    """Return the product, then the sum, the residual's addition and RMSNorm in one kernel."""
    inputs, workspace = case.inputs, _workspace()
    from flashinfer import comm

    residual, normed = torch.empty_like(inputs.y), torch.empty_like(inputs.y)

    def run(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        comm.allreduce_fusion(
            inputs.product(i), workspace, comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=inputs.residual, residual_out=residual, norm_out=normed,
            rms_gamma=inputs.norm_weight, rms_eps=EPS, launch_with_pdl=True,
        )  # fmt: skip
        return normed, residual

    return {"cuBLAS + FlashInfer": run}


WAYS = {
    "GEMM + all-reduce": gemm_all_reduce,
    "GEMM + all-reduce + residual + norm": gemm_all_reduce_norm,
}
