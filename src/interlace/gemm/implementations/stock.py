"""Stock pairs: PyTorch's own ways to multiply and communicate, as implementations like any other.

They run where the installed PyTorch has them and refuse elsewhere, with the reason. Memory that
they need is kept by the group, as that of the other implementations is.

Source: torch.distributed._symmetric_memory of PyTorch 2.5 and later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.groups.reservation import Reservation
from interlace.comm.host.channel import GivenUpError
from interlace.comm.runtime.driver import has_memory
from interlace.errors import BackendError, WorkspaceError
from interlace.gemm.call import GemmCall
from interlace.gemm.implementations.refusals import needs
from interlace.registry import Implementation
from interlace.units import next_power_of_2

_ONE_SHOT_BYTES = 2 << 20
"""How much a rank reads from its peers in one shot at most; in two shots it reads less, later.

With this limit 817 recorded calls of two ranks take 0.11 % longer on H100s, and 0.16 % on H200s,
than with the faster of both; with 1 MiB 0.52 and 0.24 %. Of more ranks nothing says where it should
be: 28 calls of four have two shots in place only, which gives results no memory of their own.
"""

_SUMMED = (torch.bfloat16, torch.float32)
"""Dtypes that PyTorch's symmetric-memory reductions add."""

_ALIGNMENT_BYTES = 16
"""PyTorch's symmetric-memory reductions move so many bytes at a time, and take no odd sizes."""

_needs = functools.partial(needs, gpu=True, same_dtype=True, dtypes=_SUMMED)


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


def _run_all_reduce(call: GemmCall) -> torch.Tensor | None:
    """Multiply into symmetric memory of PyTorch's and reduce it there."""
    operands, group = call.operands, call.group
    if group.world_size == 1:
        result: torch.Tensor = call.operator.run_unfused(call)
        return result
    memory = _symmetric(call, operands.rows, operands.columns)
    if memory is None:
        return None
    part, name = memory
    read_bytes = (group.world_size - 1) * part.nbytes
    shots = "one" if read_bytes <= _ONE_SHOT_BYTES else "two"
    reduce = getattr(torch.ops.symm_mem, f"{shots}_shot_all_reduce_out")
    with group.running():
        torch.mm(operands.x, operands.w.T, out=part)
        # The next call reuses the memory, so the result has its own.
        y = torch.empty_like(part)
        reduce(part, "sum", name, y)
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

    group, dtype, name = call.group, call.operands.out_dtype, _name_of(call)
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
            # Two steps, as PyTorch's rendezvous waits for ranks that have no memory to bring.
            with group.agreement.together("allocating memory of a stock pair"):
                memory = symmetric_memory.empty(numel, dtype=dtype, device=group.device)
            with group.agreement.together("sharing memory of a stock pair"):
                symmetric_memory.rendezvous(memory, name)
        except (WorkspaceError, BackendError) as error:  # on every rank alike
            if call.is_explicit or isinstance(error, GivenUpError):
                raise
            memory = None
        group.kept[key] = memory
    memory = group.kept[key]
    return None if memory is None else (memory[: rows * columns].view(rows, columns), name)


SYMM_MEM = Implementation(
    "symm_mem",
    "cuBLAS, then PyTorch's all-reduce in symmetric memory, one-shot or two-shot by size",
    _run_all_reduce,
    # PyTorch has had the one-shot operator for longer.
    _needs(torch_operator="two_shot_all_reduce_out", multiple_bytes=_ALIGNMENT_BYTES),
    is_stock=True,
    # PyTorch's symmetric memory is none of the group's.
    reservation=lambda _: Reservation(),
)


def _name_of(call: GemmCall) -> Any:
    """Return the name of the process group of a call of several ranks."""
    process_group = call.process_group or dist.group.WORLD
    assert process_group is not None
    return process_group.group_name


def _run_async(call: GemmCall, run: Callable[[GemmCall, str], Any]) -> Any:
    if call.group.world_size == 1:
        return call.operator.run_unfused(call)
    _require_memory(call)
    name = call.group.once(("async_tp", call.group_name), lambda: _name_of(call))
    with call.group.running():
        return run(call, name)


def _require_memory(call: GemmCall) -> None:
    """Check that all ranks have memory for asynchronous tensor parallelism; collective in calls
    that need more than any before.

    PyTorch allocates its symmetric memory in the first of these, and its rendezvous waits without a
    limit for a rank that has failed before it.

    Raises:
        WorkspaceError: A rank has none; raised on every rank.
    """
    group, operands = call.group, call.operands
    # The rows of all ranks in symmetric memory and gathered; or the product there, and its parts.
    rows = max(operands.rows, sum(call.rows.by_rank))
    gathered = 2 * rows * operands.inner * operands.x.itemsize
    needed = gathered + 3 * rows * operands.columns * operands.out_dtype.itemsize
    key = ("memory of async_tp",)
    # PyTorch refuses to allocate while a CUDA graph is captured, on every rank.
    if needed <= group.kept.get(key, 0) or group.capture_id() is not None:
        return
    if not all(group.exchange(key[0], has_memory(needed, group.device))):
        raise WorkspaceError(
            f"{call.operator.name}: impl='async_tp' must have {needed} bytes of GPU memory on "
            "every rank; a rank has less. Free memory there, or take impl='unfused'."
        )
    group.kept[key] = needed


def _reduce_scatter(call: GemmCall, name: str) -> Any:
    x, w = call.operands.x, call.operands.w
    return own_kernel("fused_matmul_reduce_scatter", "CUDA")(x, w.T, "sum", 0, name)


def _all_gather(call: GemmCall, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    # PyTorch's copies are of whole rows, one behind the other.
    x, w = call.operands.x.contiguous(), call.operands.w
    gathered, (y,) = own_kernel("fused_all_gather_matmul", "CUDA")(
        x, [w.T], 0, name, return_A=call.gather
    )
    return y, gathered if call.gather else x.new_empty([0, call.operands.inner])


# Streams, barriers and copies for every rank's rows, one call of the driver after another, in a
# program that trains on two H200s (decision record 0014).
_ASYNC_HOST_US = 1000.0


def _async_tp(steps: str, run: Callable[[GemmCall, str], Any], operator: str) -> Implementation:
    """Return asynchronous tensor parallelism by one operator of ``torch.ops.symm_mem``."""
    return Implementation(
        "async_tp",
        f"PyTorch's asynchronous tensor parallelism: {steps}",
        functools.partial(_run_async, run=run),
        _needs(torch_operator=operator, even_rows=True, no_bias=True),
        schedule="by_rank",
        is_stock=True,
        host_us=_ASYNC_HOST_US,
        reservation=lambda _: Reservation(),
    )


ASYNC_REDUCE_SCATTER = _async_tp(
    "cuBLAS in chunks and copies", _reduce_scatter, "fused_matmul_reduce_scatter"
)
ASYNC_ALL_GATHER = _async_tp("copies and cuBLAS in chunks", _all_gather, "fused_all_gather_matmul")
