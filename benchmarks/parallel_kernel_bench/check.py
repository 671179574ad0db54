"""Compare the solutions of ParallelKernelBench with its references on the CPU backend.

    python benchmarks/parallel_kernel_bench/check.py --harness FOLDER [--ranks 2] [NUMBER ...]

Inputs are the bench's, of smaller sizes. Kernels run in Triton's interpreter, and the references'
collectives through Gloo, so times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import math
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import interlace
from benchmarks.parallel_kernel_bench.harness import (
    difference,
    inputs_of,
    lines_of,
    number_of,
    reference_of,
    solution_of,
    stems,
)

SHAPES = {48: (32, 32), 79: (128, 64), 85: (256, 128)}
"""Sizes by problem; the bench derives most inputs from them."""


def _spectrum(arguments: Any, ranks: int, rank: int) -> Any:
    whole = torch.fft.rfft2(torch.randn(2, 3, 16, 24), norm="ortho")
    return whole.chunk(ranks, 2)[rank].contiguous(), (16, 24), *arguments[2:]


def _table(arguments: Any, ranks: int, rank: int) -> Any:
    ids = torch.randint(0, ranks * 100, (64,))
    return (
        torch.randn(100, 128).bfloat16(),
        ids,
        torch.randn(128, 128).bfloat16(),
        ranks * 100,
        None,
    )


def _ranges(arguments: Any, ranks: int, rank: int) -> Any:
    tokens, ranges = 24, torch.arange(0, 84, 21)
    query, kv = (torch.randn(4 * tokens // ranks, 8, n).bfloat16() for n in (16, 32))
    return query, kv[:, :4].contiguous(), torch.stack([ranges, ranges + 21], 1), 4, 21, None


SMALLER: dict[int, Callable[[Any, int, int], Any]] = {
    60: _spectrum,
    62: lambda arguments, ranks, rank: (arguments[0][:2], *arguments[1:]),
    68: _table,
    74: lambda arguments, ranks, rank: (
        *(x[:, :8] for x in arguments[:5]), *arguments[5:],
    ),
    72: lambda arguments, ranks, rank: (
        *(x[:, :16] for x in arguments[:3]), arguments[3][:16], arguments[4][:16], 16,
        *arguments[6:],
    ),
    75: lambda arguments, ranks, rank: (
        *(x[:, :8] for x in arguments[:5]), *arguments[5:],
    ),
    77: _ranges,
    76: lambda arguments, ranks, rank: (
        arguments[0][:, :, :, :8, :8], arguments[1][:16], arguments[2][:16], *arguments[3:],
    ),
    78: lambda arguments, ranks, rank: (
        arguments[0][:, :, :4, :14, :14].contiguous(), 3, 4, 8, *arguments[4:6], 4, 2,
        *arguments[8:],
    ),
    87: lambda arguments, ranks, rank: (
        arguments[0][..., :8], arguments[1][:8], arguments[2][:8], *arguments[3:],
    ),
}  # fmt: skip
"""What takes the place of inputs of a fixed size that are too large for a CPU."""


class _OnCpu(TorchFunctionMode):
    """Take tensors that a reference wants on a GPU to be on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def _gathered(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Return all ranks' tensors of equal shape, as bytes travel through Gloo."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    received = [torch.empty_like(raw) for _ in range(dist.get_world_size(group))]
    _ALL_GATHER(received, raw, group=group)
    return [each.view(tensor.dtype).view(tensor.shape) for each in received]


def _summed(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        by_maximum = op == dist.ReduceOp.MAX
        by_minimum = op == dist.ReduceOp.MIN
        total = total.maximum(part) if by_maximum else (
            total.minimum(part) if by_minimum else total + part
        )  # fmt: skip
    return total


class _Nccl:
    """Collectives as NCCL has them, for Gloo: some that it lacks, and what others leave alone."""

    @staticmethod
    def all_gather_into_tensor(out: Any, x: Any, group: Any = None) -> None:
        out.copy_(torch.stack(_gathered(x, group)).view(out.shape))

    @staticmethod
    def all_gather(outputs: Any, x: Any, group: Any = None) -> None:
        sizes = [t.numel() for t in outputs]
        padded = x.new_empty(max(sizes))
        padded[: x.numel()] = x.flatten()
        for out, part in zip(outputs, _gathered(padded, group), strict=True):
            out.copy_(part[: out.numel()].view_as(out))

    @staticmethod
    def all_reduce(x: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        x.copy_(_summed(_gathered(x, group), op))

    @staticmethod
    def reduce(x: Any, dst: int = 0, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        total = _summed(_gathered(x, group), op)
        if dist.get_rank(group) == dst:
            x.copy_(total)

    @staticmethod
    def reduce_scatter_tensor(
        out: Any, x: Any, op: Any = dist.ReduceOp.SUM, group: Any = None
    ) -> None:
        total = _summed(_gathered(x, group), op).chunk(dist.get_world_size(group))
        out.copy_(total[dist.get_rank(group)].view(out.shape))

    @staticmethod
    def all_to_all(outputs: Any, inputs: Any, group: Any = None, async_op: bool = False) -> None:
        sizes = [t.numel() for t in outputs], [t.numel() for t in inputs]
        received = torch.empty(sum(sizes[0]), dtype=outputs[0].dtype)
        sent = torch.cat([t.reshape(-1) for t in inputs])
        dist.all_to_all_single(received, sent, *sizes, group=group)
        for out, part in zip(outputs, received.split(sizes[0]), strict=True):
            out.copy_(part.view_as(out))


_ALL_GATHER = dist.all_gather


@contextlib.contextmanager
def _without_gpus() -> Iterator[None]:
    """Let a reference run without GPUs."""
    replaced = {name: value.__func__ for name, value in vars(_Nccl).items() if name[0] != "_"}
    kept = {name: getattr(dist, name) for name in replaced}
    current_device = torch.cuda.current_device
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    vars(dist).update(replaced)
    try:
        with _OnCpu():
            yield
    finally:
        vars(dist).update(kept)
        torch.cuda.current_device = current_device


@contextlib.contextmanager
def _small_table() -> Iterator[None]:
    """Let the bench make no table of gigabytes; another one takes its place."""
    randn = torch.randn

    def small(*shape: Any, **kinds: Any) -> torch.Tensor:
        sizes = shape[0] if shape and isinstance(shape[0], (tuple, list)) else shape
        return randn(1, **kinds) if math.prod(sizes) > 1 << 25 else randn(sizes, **kinds)

    torch.randn = small  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.randn = randn


def _rounded(values: Any) -> Any:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def check(harness: Path, stem: str, trial: int, size: int) -> str:
    """Return how a solution differs on this rank; "" if it does not."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Those that are listed would take a CPU too long even at the small size.
    shape = SHAPES.get(number_of(stem), (size, size)) if size < 1024 else (size, size)
    kinds: Any = {"base_shape": shape, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    with _small_table():
        arguments = [inputs_of(harness, stem, ranks, rank, trial=trial, **kinds) for _ in range(2)]
    smaller = SMALLER.get(number_of(stem))
    if smaller is not None:
        for i in range(2):
            torch.manual_seed(trial)
            arguments[i] = smaller(arguments[i], ranks, rank)
    with _without_gpus():
        wanted = reference_of(harness, stem)(*arguments[0])
    return difference(wanted, solution_of(stem)(*arguments[1]))


def check_on_all(harness: Path, stem: str, size: int) -> list[str]:
    """Return how a solution differs, by rank, in the first call in which it does.

    It is called several times, as memory takes turns. Every rank goes on if all do.
    """
    found: list[Any] = [""]
    for trial in range(3):
        try:
            own = check(harness, stem, trial, size)
        except Exception:
            own = traceback.format_exc(limit=-4)
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        if any(found):
            break
    return found


def worker(harness: Path, chosen: list[str], size: int) -> int:
    """Check problems one after another; return how many are right on all ranks."""
    # GPUs round to the nearest bfloat16, as the references do; Triton's interpreter cuts off.
    conversions = importlib.import_module("interlace.comm.cpu.shortcuts")._CONVERSIONS
    conversions["fp32", "bf16"] = _rounded
    # The references are compared where a rank fails alone, so the others must not wait long.
    interlace.set_deadline(20.0)
    faulthandler.dump_traceback_later(500)
    right = 0
    for stem in chosen:
        begin = time.perf_counter()
        found = check_on_all(harness, stem, size)
        right += not any(found)
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - begin
            verdict = "right" if not any(found) else f"WRONG {found}".replace("\\n", "\n")
            print(f"{stem}, {lines_of(stem)} lines, {seconds:.1f} s: {verdict}", flush=True)
        if interlace.group_of().broken:
            interlace.recover()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--harness", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", type=int, default=128, help="the bench's is 1024")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("numbers", type=int, nargs="*")
    options = parser.parse_args()
    chosen = [
        stem for stem in stems() if number_of(stem) in options.numbers or not options.numbers
    ]  # fmt: skip
    right = interlace.launch(
        worker, options.ranks, options.harness, chosen, options.size, backend="cpu",
        timeout_s=options.timeout,
    )  # fmt: skip
    print(f"{right[0]} of {len(chosen)} are right")


if __name__ == "__main__":
    main()
