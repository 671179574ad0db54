"""Stock pairs: PyTorch's own ways to multiply and communicate, as implementations like any other.

They run where the installed PyTorch has them and refuse elsewhere, with the reason. Memory that
they need is kept by the group, as that of the other implementations is.

Source: torch.distributed._symmetric_memory of PyTorch 2.5 and later.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import BackendError, WorkspaceError
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations import unfused
from interlace.gemm.terms import Terms
from interlace.registry import Implementation
from interlace.units import next_power_of_2

ONE_SHOT_BYTES = 1 << 24
"""Above this size every rank would read too much from every other one."""

_SUMMED = (torch.bfloat16, torch.float32)
"""Dtypes that PyTorch's symmetric-memory reductions add."""

_ALIGNMENT_BYTES = 16
"""PyTorch's symmetric-memory reductions move so many bytes at a time, and take no odd sizes."""


def _on_cuda(terms: Terms) -> list[str]:
    return [] if terms.device_type == "cuda" else ["a GPU"]


def _has(operator: str) -> bool:
    """Return whether this PyTorch has ``torch.ops.symm_mem.<operator>``."""
    # The import defines the operators.
    import torch.distributed._symmetric_memory

    return hasattr(torch.ops.symm_mem, operator)


@functools.cache
def own_kernel(operator: str, device_type: str) -> Callable[..., Any]:
    """Return PyTorch's own kernel of ``torch.ops.symm_mem.<operator>``.

    It stays PyTorch's own if :mod:`interlace.integrations.symm_mem` replaces the operator later;
    the implementations here are never what replaced it.

    Args:
        operator: The operator's name.
        device_type: ``"CUDA"``; or ``"CPU"``, for which PyTorch has no kernel but the plain pair
            that it traces shapes with.
    """
    # The import defines the operators.
    import torch.distributed._symmetric_memory

    key = getattr(torch._C.DispatchKey, device_type)
    kernel = torch.library.get_kernel(
        f"symm_mem::{operator}", "Meta" if device_type == "CPU" else device_type
    )
    return functools.partial(kernel.call_boxed, torch._C.DispatchKeySet(key))


def _unmet(terms: Terms, operator: str) -> list[str]:
    """Return what a call must have for one of PyTorch's symmetric-memory operators, and has not."""
    unmet = _on_cuda(terms)
    if not unmet and not _has(operator):
        unmet.append(f"a PyTorch with torch.ops.symm_mem.{operator}")
    if terms.converts:
        unmet.append("a result of the dtype of x")
    if terms.dtype not in _SUMMED:
        unmet.append("bfloat16 or float32 operands")
    return unmet


def _refuse_all_reduce(terms: Terms, operator: str, most_bytes: int | None = None) -> str | None:
    unmet = _unmet(terms, operator)
    if terms.result_bytes % _ALIGNMENT_BYTES:
        unmet.append(f"a result whose size is a multiple of {_ALIGNMENT_BYTES} bytes")
    if most_bytes is not None and terms.result_bytes > most_bytes:
        unmet.append(f"a result of at most {most_bytes >> 20} MiB")
    return " and ".join(unmet) or None


def _refuse_chunks(terms: Terms, operator: str) -> str | None:
    unmet = _unmet(terms, operator)
    if not terms.is_even:
        unmet.append("rows that are split evenly")
    if terms.has_bias:
        unmet.append("no bias")
    return " and ".join(unmet) or None


def _refuse_without_nccl(terms: Terms) -> str | None:
    return " and ".join(_on_cuda(terms)) or None


NCCL = Implementation(
    "nccl",
    "cuBLAS, then NCCL's collective",
    unfused.run,
    _refuse_without_nccl,
    is_stock=True,
)


def _run_all_reduce(call: GemmCall, shot: str) -> torch.Tensor | None:
    """Multiply into symmetric memory of PyTorch's and reduce it there."""
    operands, group = call.operands, call.group
    if group.world_size == 1:
        result: torch.Tensor = call.operator.run_unfused(call)
        return result
    memory = _symmetric(call, operands.rows, operands.columns)
    if memory is None:
        return None
    part, name = memory
    with group.running():
        torch.mm(operands.x, operands.w.T, out=part)
        # The next call reuses the memory, so the result has its own.
        y = torch.empty_like(part)
        if shot == "one":
            torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", name, y)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_out(part, "sum", name, y)
    return y if operands.bias is None else y.add_(operands.bias)


def _symmetric(call: GemmCall, rows: int, columns: int) -> tuple[torch.Tensor, str] | None:
    """Return ``[rows, columns]`` of PyTorch's symmetric memory, and its group's name; collective
    where it has to be allocated.

    Returns:
        None where it cannot be had, or not while a CUDA graph is captured, and the caller has not
        asked for this implementation.

    Raises:
        WorkspaceError, BackendError: The same where the caller has asked for it.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    group, dtype = call.group, call.operands.out_dtype
    process_group = call.process_group or dist.group.WORLD
    assert process_group is not None
    name = process_group.group_name
    # Captured graphs refer to the memory, so none is given up for a larger one. Powers of two keep
    # the sum of all sizes below twice the largest.
    numel = next_power_of_2(rows * columns)
    key = ("stock", dtype, numel)
    if key not in group.kept or (group.kept[key] is None and call.is_explicit):
        # Allocating symmetric memory is collective and waits on the host, which a capture forbids.
        if group.capture_id() is not None:
            if not call.is_explicit:
                return None
            raise WorkspaceError(
                "memory of a stock pair must be allocated before a CUDA graph is captured. Call "
                "the operator once with these shapes first."
            )
        memory = None
        try:
            with group.together("allocating memory of a stock pair"):
                memory = symmetric_memory.empty(numel, dtype=dtype, device=group.device)
                symmetric_memory.rendezvous(memory, name)
        except (WorkspaceError, BackendError):  # on every rank alike
            if call.is_explicit:
                raise
            memory = None
        group.kept[key] = memory
    memory = group.kept[key]
    return None if memory is None else (memory[: rows * columns].view(rows, columns), name)


ONE_SHOT = Implementation(
    "one_shot",
    "cuBLAS, then PyTorch's one-shot all-reduce in symmetric memory",
    functools.partial(_run_all_reduce, shot="one"),
    functools.partial(
        _refuse_all_reduce, operator="one_shot_all_reduce_out", most_bytes=ONE_SHOT_BYTES
    ),
    is_stock=True,
)
TWO_SHOT = Implementation(
    "two_shot",
    "cuBLAS, then PyTorch's two-shot all-reduce in symmetric memory",
    functools.partial(_run_all_reduce, shot="two"),
    functools.partial(_refuse_all_reduce, operator="two_shot_all_reduce_out"),
    is_stock=True,
)


def _enabled(call: GemmCall) -> str:
    """Return the group's name, with symmetric memory enabled where PyTorch still asks for that."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    process_group = call.process_group or dist.group.WORLD
    assert process_group is not None
    name = process_group.group_name
    with warnings.catch_warnings():
        # Needed until PyTorch 2.10, deprecated since.
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(name)
    return name


def _run_async_reduce_scatter(call: GemmCall) -> torch.Tensor:
    operands = call.operands
    if call.group.world_size == 1:
        alone: torch.Tensor = call.operator.run_unfused(call)
        return alone
    name = call.group.once(("async_tp", call.group_name), lambda: _enabled(call))
    with call.group.running():
        y: torch.Tensor = own_kernel("fused_matmul_reduce_scatter", "CUDA")(
            operands.x, operands.w.T, "sum", 0, name
        )
    return y


def _run_async_all_gather(call: GemmCall) -> tuple[torch.Tensor, torch.Tensor]:
    operands = call.operands
    if call.group.world_size == 1:
        alone: tuple[torch.Tensor, torch.Tensor] = call.operator.run_unfused(call)
        return alone
    name = call.group.once(("async_tp", call.group_name), lambda: _enabled(call))
    with call.group.running():
        gathered, (y,) = own_kernel("fused_all_gather_matmul", "CUDA")(
            operands.x, [operands.w.T], 0, name, return_A=call.gather
        )
    return y, gathered if call.gather else operands.x.new_empty([0, operands.inner])


ASYNC_REDUCE_SCATTER = Implementation(
    "async_tp",
    "PyTorch's asynchronous tensor parallelism: cuBLAS in chunks and copies",
    _run_async_reduce_scatter,
    functools.partial(_refuse_chunks, operator="fused_matmul_reduce_scatter"),
    schedule="by_rank",
    is_stock=True,
)
ASYNC_ALL_GATHER = Implementation(
    "async_tp",
    "PyTorch's asynchronous tensor parallelism: copies and cuBLAS in chunks",
    _run_async_all_gather,
    functools.partial(_refuse_chunks, operator="fused_all_gather_matmul"),
    schedule="by_rank",
    is_stock=True,
)
