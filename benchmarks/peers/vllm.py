"""vLLM's custom all-reduce, outside of an engine, behind cuBLAS's product."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.case import Call, Case, device
from benchmarks.peers.driver import Refused
from benchmarks.peers.products import EPS

NAME, DISTRIBUTION = "vLLM", "vllm"
INSTALL = "pip install vllm==0.26.0"


def environment(folders: list[str]) -> dict[str, str]:
    """Return variables without which vLLM starts processes of its own to try the links."""
    return {"VLLM_SKIP_P2P_CHECK": "1", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}


@functools.cache
def _communicator() -> Any:
    """Return the communicator of all ranks. Collective."""
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    communicator = CustomAllreduce(dist.new_group(backend="gloo"), device())
    # Later versions open the peers' memory by a call of its own.
    getattr(communicator, "finalize_p2p", lambda: None)()
    if communicator.disabled:
        raise RuntimeError("vLLM has switched its custom all-reduce off on this machine")
    return communicator


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Capture calls as vLLM does: their buffers are registered behind the capture."""
    with _communicator().capture():
        yield


def _sum(case: Case) -> Call:
    inputs, communicator = case.inputs, _communicator()
    if not communicator.should_custom_ar(inputs.y):
        raise Refused(f"vLLM sums {inputs.y.nbytes >> 20} MiB by NCCL")

    def run(i: int) -> torch.Tensor:
        total: torch.Tensor = communicator.custom_all_reduce(inputs.product(i))
        return total

    return run


def gemm_all_reduce(case: Case) -> dict[str, Call]:
    """Return the product, then the all-reduce."""
    return {"cuBLAS + vLLM": _sum(case)}


def gemm_all_reduce_norm(case: Case) -> dict[str, Call]:
    """Return the product, the all-reduce, and vLLM's addition and RMSNorm, which are in place.

    So the residual grows from call to call, and the results compared are those of the first one.
    """
    inputs, total = case.inputs, _sum(case)
    from vllm import _custom_ops

    residual = inputs.residual.clone()

    def run(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = total(i)
        _custom_ops.fused_add_rms_norm(y, residual, inputs.norm_weight, EPS)
        return y, residual

    return {"cuBLAS + vLLM": run}


WAYS = {
    "GEMM + all-reduce": gemm_all_reduce,
    "GEMM + all-reduce + residual + norm": gemm_all_reduce_norm,
}
