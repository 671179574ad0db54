"""Time the loss over a sharded vocabulary, forward and backward, beside what people run.

    python benchmarks/linear_cross_entropy.py --json FILE [--ranks 2] [--share 2]

Ways: ``auto``, Interlace's; ``unfused``, the same in steps of PyTorch; ``loss_parallel``,
PyTorch's own over a sharded vocabulary, as torchtitan calls it; ``eager`` and ``compiled``,
``F.linear`` and ``F.cross_entropy`` of float32 logits, by PyTorch as it is and by Inductor;
``liger``, Liger-Kernel's fused loss, where it is installed. The last three know of no other rank,
so they are timed with one. ``products`` are the three matrix products by themselves, which no way
can do without.

``--share R`` with one rank gives it the columns of one of R ranks: all of its work, and no
exchange.

Times are milliseconds of the slowest rank, the median and deciles of 15, eager, and in a CUDA graph
where that is possible; host time is that of enqueueing. Memory is what the call needs beside its
arguments at its peak, gradients of x and w included. Losses and gradients are compared with
``unfused`` first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documents
import torch
import torch.distributed as dist
import torch.nn.functional as F
from program_times import in_graph, in_turn

import interlace
from interlace.comm import group_of

# Rows, width of x, vocabulary: Llama 3 8B and 70B, Qwen3, Llama 2.
SIZES = (
    (8192, 4096, 128256),
    (2048, 4096, 128256),
    (8192, 8192, 128256),
    (16384, 2048, 151936),
    (8192, 4096, 32000),
)
CAPTURED = ("unfused", "auto", "eager")  # ways that a CUDA graph can hold
SETTLING = 3
TOLERANCE = 0.02  # of the norm of a gradient, in bfloat16

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _eager(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w).float(), target)


def _loss_parallel(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    shared = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    sharded = DTensor.from_local(w, mesh, [Shard(0)], run_check=False)
    with loss_parallel():
        return F.cross_entropy(F.linear(shared, sharded).float(), target)


def _liger() -> dict[str, Loss]:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        print("liger: not installed; pip install liger-kernel", flush=True)
        return {}
    fused = LigerFusedLinearCrossEntropyLoss()
    return {"liger": lambda x, w, target: fused(w, x, target)}


def _ways() -> dict[str, Loss]:
    ways: dict[str, Loss] = {
        "unfused": lambda *call: interlace.linear_cross_entropy(*call, impl="unfused"),
        "auto": interlace.linear_cross_entropy,
        "loss_parallel": _loss_parallel,
    }
    if dist.get_world_size() == 1:
        ways |= {"eager": _eager, "compiled": torch.compile(_eager), **_liger()}
    return ways


def _backward(way: str, loss: torch.Tensor) -> None:
    if way != "loss_parallel":
        loss.backward()
        return
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel():  # as PyTorch asks for
        loss.backward()


def _times(call: Callable[[], object]) -> dict[str, Any]:
    return in_turn({"": lambda _: call()}, calls=1, settling=SETTLING, unit="ms")[""]


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (found.float() - wanted.float()).norm() / wanted.float().norm()
    return float(difference)


def time_sizes(rows: int, width: int, vocabulary: int, share: int) -> dict[str, Any]:
    """Return the times of all ways for one size."""
    columns = vocabulary // share
    torch.manual_seed(1)
    x = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(0, columns * dist.get_world_size(), (rows,), device="cuda")
    torch.manual_seed(2 + dist.get_rank())
    w = (0.02 * torch.randn(columns, width, device="cuda")).bfloat16().requires_grad_()
    found: dict[str, Any] = {"rows": rows, "width": width, "columns": columns, "share": share}
    wanted: list[torch.Tensor] = []
    for name, way in _ways().items():

        def both(name: str = name, way: Loss = way) -> torch.Tensor:
            x.grad = w.grad = None
            loss = way(x, w, target)
            _backward(name, loss)
            return loss.detach()

        loss = both()
        results = [loss.to_local() if hasattr(loss, "to_local") else loss, x.grad, w.grad]
        if not wanted:
            wanted = [each.clone() for each in results]
        distances = [round(_distance(*each), 6) for each in zip(results, wanted, strict=True)]
        if max(distances) > TOLERANCE:
            raise AssertionError(f"{name}: distances from unfused {distances}")
        del loss, results
        x.grad = w.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        torch.cuda.synchronize()
        memory = torch.cuda.max_memory_allocated() - before
        found[name] = _times(both) | {"memory_mib": memory >> 20, "distances": distances}
        if name in CAPTURED:
            found[name]["graph"] = in_graph(lambda _, call=both: call(), unit="ms")
        x.grad = w.grad = None
        torch.cuda.empty_cache()
    logits = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)

    def products() -> None:
        plain, weight = x.detach(), w.detach()
        torch.mm(plain, weight.t(), out=logits)
        torch.mm(logits, weight)
        torch.mm(logits.t(), plain)

    found["products"] = _times(products)
    return found


def worker(share: int) -> list[dict[str, Any]]:
    """Time all sizes on this rank."""
    group_of(None, torch.device("cuda", torch.cuda.current_device())).require_own_gpus("timing")
    results = []
    for rows, width, vocabulary in SIZES:
        results.append(time_sizes(rows, width, vocabulary, share or dist.get_world_size()))
        if dist.get_rank() == 0:
            print(results[-1], flush=True)
    return results


def main() -> None:
    """Run the benchmark and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share", type=int, default=0, help="ranks that share the vocabulary")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    results, *_ = interlace.launch(worker, options.ranks, options.share, backend="cuda")
    documents.write(options.json, results)


if __name__ == "__main__":
    main()
