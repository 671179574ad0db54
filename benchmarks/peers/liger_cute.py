"""LigerCute's experts: persistent kernels that exchange rows through NVSHMEM."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.case import Call, Case
from benchmarks.peers.driver import library
from benchmarks.peers.experts import EXPERT_SIZES

NAME, DISTRIBUTION = "LigerCute", "liger-cute-kernels"
INSTALL = (
    "pip install --target FOLDER --no-deps liger-cute-kernels==0.8.5 nvidia-nvshmem-cu12==3.6.5 "
    "nvidia-cuda-runtime-cu12 apache-tvm-ffi"
)


def environment(folders: list[str]) -> dict[str, str]:
    """Return LD_PRELOAD with CUDA 12's runtime and NVSHMEM, for which LigerCute is built, where
    PyTorch has brought others.
    """
    names = ("nvidia/cuda_runtime/lib/libcudart.so.12", "nvidia/nvshmem/lib/libnvshmem_host.so.3")
    found = [file for name in names if (file := library(name, folders))]
    if not found:
        return {}
    # NVSHMEM looks for its plug-ins there.
    places = [str(Path(file).parent) for file in found] + [os.environ.get("LD_LIBRARY_PATH", "")]
    return {"LD_PRELOAD": ":".join(found), "LD_LIBRARY_PATH": ":".join(filter(None, places))}


@functools.cache
def _team() -> int:
    """Set up memory for the largest layer, and return the team of all ranks. Collective."""
    from liger_cute_kernels import MoEConfig, configure, tvm_ffi

    tokens, hidden, _, experts, top_k = (max(each) for each in zip(*EXPERT_SIZES, strict=True))
    sizes = MoEConfig(
        max_tokens=tokens, hidden_size=hidden, num_experts=experts, top_k=top_k, num_hosts=1,
        gpus_per_host=dist.get_world_size(),
    )  # fmt: skip
    device = torch.device("cuda", torch.cuda.current_device())
    configure(bootstrap_group=dist.group.WORLD, device=device, moe=sizes)
    team: int = tvm_ffi.team_world()
    return team


def _layer(case: Case) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return the module of kernels, the routing, and the weights with the layer's sizes."""
    team, inputs = _team(), case.inputs
    from liger_cute_kernels import tvm_ffi

    weights = inputs.gate, inputs.up, inputs.down
    routing = inputs.chosen.int().contiguous(), inputs.scores.contiguous()
    return tvm_ffi, routing, (*weights, inputs.count, inputs.top_k, team)


def forward(case: Case) -> dict[str, Call]:
    """Return the forward pass, whose saved tensors are let go at once."""
    kernels, routing, layer = _layer(case)

    def run(i: int) -> torch.Tensor:
        y: torch.Tensor = kernels.moe_fused_fwd_bf16(case.inputs.x, *routing, *layer)[0]
        kernels.moe_pop_fwd(layer[-1])
        return y

    return {"LigerCute": run}


def both(case: Case) -> dict[str, Call]:
    """Return both passes, with the gradients of tokens and of the three weights."""
    kernels, routing, layer = _layer(case)
    inputs = case.inputs

    def run(i: int) -> tuple[torch.Tensor, ...]:
        y, rows, hidden, offsets, slots, tiles, tile = kernels.moe_fused_fwd_bf16(
            inputs.x, *routing, *layer
        )
        x_grad, gate_grad, up_grad, down_grad, _ = kernels.moe_fused_bwd_bf16(
            inputs.grad, hidden, rows, slots, tiles, offsets, *routing, *layer, tile
        )
        kernels.moe_pop_fwd(layer[-1])
        return y, x_grad, gate_grad, up_grad, down_grad

    return {"LigerCute": run}


WAYS = {"experts, forward": forward, "experts, forward + backward": both}
