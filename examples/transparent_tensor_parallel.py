r"""A Llama block, tensor-parallel by ``parallelize_module``, fused by ``torch.compile``.

No line of the block mentions Interlace.

Without arguments it runs a tiny block on two ranks and checks itself, with and without sequence
parallelism: output and every gradient of the compiled block must be as near to the block in higher
precision as the eager one is. It prints which collectives were fused. On GPUs, with the sizes of
Llama 3 70B, and times of a step, forward and backward:

    python examples/transparent_tensor_parallel.py --world-size 4 --dtype bfloat16 \
        --width 8192 --heads 64 --kv-heads 8 --hidden 28672 --sequence 4096 --batch 1 --times
    torchrun --nproc-per-node 4 examples/transparent_tensor_parallel.py --dtype bfloat16 ...
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
import typer
from shared import commands
from shared.errors import DTYPES, higher
from shared.llama import Block, LlamaSettings, Positions, Sequences
from shared.ways import print_findings, print_ways, run_ways
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import interlace
import interlace.compile

# By name of a plan: without and with sequence parallelism.
PLANS = {"both": (False, True), "tensor": (False,), "sequence": (True,)}


@dataclasses.dataclass(frozen=True)
class Settings(LlamaSettings):
    """Settings of a block and its comparison."""

    sequence: Positions = 4
    batch: Sequences = 2
    times: commands.Times = False
    steps: commands.Steps = 20
    plan: Annotated[
        str, typer.Option(help="tensor: full activations between layers; sequence: sharded; both.")
    ] = "both"


# The block, as it would be written without Interlace, batch first


class Attention(nn.Module):
    """Causal self-attention, ``[B, S, width] -> [B, S, width]``.

    Several query heads share a key and value head.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.size = settings.width // settings.heads
        self.wq = nn.Linear(settings.width, settings.heads * self.size, bias=False)
        self.wk = nn.Linear(settings.width, settings.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(settings.width, settings.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(settings.heads * self.size, settings.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """The MLP ``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.w1, self.w3 = (
            nn.Linear(settings.width, settings.hidden, bias=False) for _ in range(2)
        )
        self.w2 = nn.Linear(settings.hidden, settings.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def parallelise(block: Block, device_type: str, sequence_parallel: bool) -> Block:
    """Shard the block by PyTorch's own plan: column-parallel in, row-parallel out.

    Activations between the layers are full, or sharded along the sequence.
    """
    out = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {f"attention.w{name}": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.w{name}": ColwiseParallel() for name in "13"}
    plan |= {name: RowwiseParallel(output_layouts=out) for name in ("attention.wo", "mlp.w2")}
    if sequence_parallel:
        plan |= {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"attention": gather, "mlp": gather}
    return parallelize_module(block, init_device_mesh(device_type, (dist.get_world_size(),)), plan)


# The comparison


def step(call: Callable[..., Any], block: Block, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run forward and backward pass; return this rank's output and gradients by name."""
    block.zero_grad()
    x = x.detach().requires_grad_()
    y = call(x)
    y.square().mean().backward()
    assert x.grad is not None
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    return {"output": y.detach(), "x": x.grad} | {
        name: getattr(grad, "_local_tensor", grad) for name, grad in gradients.items()
    }


def compare(settings: Settings) -> list[dict[str, Any]]:
    """Run the block in every way on this rank, for every plan.

    Returns:
        Per plan, the pass's findings, and for every way its name, errors and times.
    """
    device, dtype = interlace.group_of().device, DTYPES[settings.dtype]
    if settings.times:
        # Findings in graphs that come from Inductor's cache are not recorded.
        torch._inductor.config.force_disable_caches = True
    results = []
    for sequence_parallel in PLANS[settings.plan]:
        # One seed for all ranks, so that every rank has the same block and data.
        torch.manual_seed(0)
        block = Block(settings.width, Attention(settings), SwiGLU(settings)).to(device, dtype)
        block = parallelise(block, device.type, sequence_parallel)
        x = torch.randn(
            settings.batch, settings.sequence, settings.width, device=device, dtype=dtype
        )
        if sequence_parallel:
            x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
        exact_block = copy.deepcopy(block).to(higher(settings.dtype))
        exact = step(exact_block, exact_block, x.to(higher(settings.dtype)))
        with interlace.compile.recording() as findings:
            ways = run_ways(step, block, x, exact, times=settings.times, steps=settings.steps)
        results.append(
            {
                "sequence_parallel": sequence_parallel,
                "findings": findings,
                "ways": ways,
                "device": device.type,
            }
        )
    return results


def report(ranks: list[list[dict[str, Any]]], settings: Settings) -> None:
    """Print the findings, and a row for each way to run the block, of its worst rank.

    Fails if an error is larger than rounding explains.
    """
    console = commands.make_console()
    for plan in zip(*ranks, strict=True):
        name = "tensor + sequence parallel" if plan[0]["sequence_parallel"] else "tensor parallel"
        console.print(f"[bold]{name}, {len(ranks)} ranks, {settings.dtype}[/bold]")
        print_findings(console, plan[0]["findings"])
        print_ways(console, [rank["ways"] for rank in plan], settings.dtype, name)
        # On the CPU the pass fuses every pair that it can.
        if plan[0]["device"] == "cpu":
            fused = sum(finding.operator is not None for finding in plan[0]["findings"])
            assert fused == (8 if plan[0]["sequence_parallel"] else 7), (
                f"{name}: {fused} pairs were fused"
            )


def main(settings: Settings, ranks: int, backend: str) -> None:
    """Compile a tensor-parallel Llama block with the fusing pass and compare it with eager
    execution.
    """
    settings.require_fitting(ranks)
    if settings.plan not in PLANS:
        raise typer.BadParameter(f"--plan must be one of {', '.join(PLANS)}; got {settings.plan}.")
    report(interlace.launch(compare, ranks, settings, backend=backend), settings)


if __name__ == "__main__":
    commands.run_with_options(main, Settings)
