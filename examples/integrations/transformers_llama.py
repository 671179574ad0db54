"""A Llama of ``transformers``, sharded by its own plan and compiled by Interlace: no edit of the
model, one word at ``torch.compile``.

    pip install transformers accelerate
    python examples/integrations/transformers_llama.py          # two ranks, on a GPU or without
    torchrun --nproc-per-node 2 examples/integrations/transformers_llama.py

The weights are random and small. It prints what is fused, and checks the logits.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

import interlace

CONFIG = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, vocab_size=512,
)  # fmt: skip


def worker(folder: str) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # What torchrun sets, and transformers reads.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    if rank == 0:
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto"),
        dtype=torch.float32,
    ).eval()
    tokens = torch.arange(16, device=model.device).view(1, 16)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    with torch.no_grad():
        expected = logits(tokens)
        report = interlace.compile.explain(logits, tokens)
        torch.compiler.reset()
        found = torch.compile(logits, backend="interlace")(tokens)
    if rank == 0:
        print(report)
    return float((found - expected).norm() / expected.norm())


def main() -> None:
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group()
        folder = Path(tempfile.gettempdir()) / f"interlace-{os.environ['TORCHELASTIC_RUN_ID']}"
        errors = [worker(str(folder))]
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            errors = interlace.launch(worker, 2, folder)
    print(f"largest relative difference of the logits: {max(errors):.1e}")
    assert max(errors) < 1e-3


if __name__ == "__main__":
    main()
