"""Ranges around calls of operators, which PyTorch's profilers and, through them, NVTX show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from interlace.units import format_bytes

is_listening = torch.autograd._profiler_enabled
"""Whether a profiler records what this thread does."""

_NOTHING = contextlib.nullcontext()


def around(
    operator: str,
    implementation: str,
    tensors: Iterable[torch.Tensor | None],
    link_bytes: Callable[[], int | None],
) -> contextlib.AbstractContextManager[object]:
    """Return a context that a profiler shows as a range, on the host and over the GPU's kernels.

    ``torch.profiler`` and ``torch.autograd.profiler.emit_nvtx`` see the range, whether the launches
    within are enqueued or replayed. While no profiler listens, the context does nothing, and
    ``link_bytes`` is not called.

    Args:
        operator: Name of the operator.
        implementation: Name of the implementation that runs.
        tensors: The operands whose shapes are part of the range's name; None is left out.
        link_bytes: Returns the bytes that leave this rank if rows are shared out evenly; None where
            no formula is declared.

    Example:
        >>> with ranges.around("gemm_all_reduce", "fused", (x, w), lambda: 14_000_000):
        ...     launch()

        The range is "interlace: gemm_all_reduce fused, bfloat16 [64, 512] x [256, 512], sends 14
        MB".
    """
    if not is_listening():
        return _NOTHING
    return torch.profiler.record_function(_name(operator, implementation, tensors, link_bytes()))


def _name(
    operator: str,
    implementation: str,
    tensors: Iterable[torch.Tensor | None],
    link_bytes: int | None,
) -> str:
    """Return the text of a range.

    Everything is in the name, since NVTX shows nothing else of a range.
    """
    operands = [tensor for tensor in tensors if tensor is not None]
    shapes = " x ".join(str(list(operand.shape)) for operand in operands)
    dtype = str(operands[0].dtype).removeprefix("torch.") if operands else ""
    sent = "" if link_bytes is None else f", sends {format_bytes(link_bytes)}"
    return f"interlace: {operator} {implementation}, {dtype} {shapes}{sent}"
