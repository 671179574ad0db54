"""The Llama 3 of ``torchtitan``, with tensor and sequence parallelism, compiled by Interlace: one
word of its configuration.

    pip install torchtitan
    python examples/integrations/torchtitan_llama.py          # two ranks, on GPUs or without
    torchrun --nproc-per-node 2 examples/integrations/torchtitan_llama.py

It is torchtitan's debug model with one layer and what its trainer makes of it, without the trainer:
sharding, ``apply_compile``, initial weights, loss. It prints what is fused, and checks the loss and
all gradients. In torchtitan's own configuration the word is ``--compile.backend interlace``; its
models with FlexAttention take Inductor only: call ``interlace.compile.install()`` there.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

import interlace

VOCABULARY = 2048


def step(compiling: CompileConfig, device: torch.device) -> list[torch.Tensor]:
    """The loss of a training step, and the gradients of this rank's shards."""
    config = model_registry("debugmodel").model
    config.layers = config.layers[:1]
    for layer in config.layers:  # FlexAttention has no gradient on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=True)
    with torch.device("meta"):
        model = config.build()
    ranks = dist.get_world_size()
    dims = ParallelDims.from_config(ParallelismConfig(tensor_parallel_degree=ranks), ranks)
    dims.build_mesh()
    model.parallelize(dims)
    if compiling.enable:
        apply_compile(model, compile_config=compiling, parallel_dims=dims)
    model.to_empty(device=device)
    torch.manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (2, 17)).to(device)
    # Threads of autograd would not know the mesh: torchtitan's trainer switches them off, too.
    with get_spmd_context(parallel_dims=dims)(), torch.autograd.set_multithreading_enabled(False):
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        loss_of = CrossEntropyLoss(CrossEntropyLoss.Config(global_vocab_size=VOCABULARY))
        tokens = torch.tensor(32, device=device)
        loss, _ = loss_of(model(rows[:, :-1]), rows[:, 1:], tokens)
        loss.backward()
    return [loss.detach(), *[each.grad for each in model.parameters() if each.grad is not None]]


def worker() -> float:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parallel_dims.device_type = device.type  # torchtitan assumes a GPU
    expected = step(CompileConfig(enable=False), device)
    with interlace.compile.recording() as findings:
        found = step(CompileConfig(enable=True, backend="interlace"), device)
    if dist.get_rank() == 0:
        print(*findings, sep="\n")
    pairs = zip(found, expected, strict=True)
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def main() -> None:
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group()
        errors = [worker()]
        dist.destroy_process_group()
    else:
        errors = interlace.launch(worker, 2)
    print(f"largest relative difference of loss and gradients: {max(errors):.1e}")
    assert max(errors) < 1e-3


if __name__ == "__main__":
    main()
