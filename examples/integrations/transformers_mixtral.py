"""A Mixtral of ``transformers`` with expert parallelism by Interlace: one call before the model is
loaded, one word in its configuration.

    pip install transformers accelerate
    python examples/integrations/transformers_mixtral.py          # two ranks, on GPUs or without
    torchrun --nproc-per-node 2 examples/integrations/transformers_mixtral.py

The weights are random and small. It checks the loss and the experts' gradients against those of
transformers' own implementation.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.distributed import DistributedConfig

import interlace
import interlace.integrations.transformers

CONFIG = MixtralConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    vocab_size=256,
)


def step(folder: str, implementation: str) -> list[torch.Tensor]:
    """The loss of a training step, and the gradients of this rank's experts."""
    ranks = dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(
            tp_size=ranks, ep_size=ranks, ep_implementation=implementation
        ),
        dtype=torch.float32,
    )
    tokens = torch.arange(64, device=model.device).view(2, 32)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    experts = [weight for name, weight in model.named_parameters() if "experts" in name]
    return [loss.detach(), *[weight.grad.to_local() for weight in experts]]


def worker(folder: str) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # What torchrun sets, and transformers reads.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    if rank == 0:
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    dist.barrier()
    interlace.integrations.transformers.register()
    pairs = zip(step(folder, "interlace"), step(folder, "auto"), strict=True)
    return max(float((found - expected).norm() / expected.norm()) for found, expected in pairs)


def main() -> None:
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group()
        folder = Path(tempfile.gettempdir()) / f"interlace-{os.environ['TORCHELASTIC_RUN_ID']}"
        errors = [worker(str(folder))]
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            errors = interlace.launch(worker, 2, folder)
    print(f"largest relative difference of loss and gradients: {max(errors):.1e}")
    assert max(errors) < 1e-3


if __name__ == "__main__":
    main()
