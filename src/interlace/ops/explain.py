"""``interlace.explain``: what ``impl="auto"`` would run, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from interlace.errors import ArgumentError


def explain(operator: str, x: torch.Tensor, w: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> str:
    """Say what ``impl="auto"`` would run for these arguments, and why. Nothing is computed or sent.

    Args:
        operator: ``"gemv_all_reduce"``.
        x: as the operator takes it: ``[K/R]`` or ``[B, K/R]``.
        w: as the operator takes it: ``[N, K/R]``.
        group: as the operator takes it; default: the default process group, or this process on its own.

    Returns:
        One sentence: the implementation, the fused kernel's configuration, sizes, ranks, and the reason.

    Raises:
        ArgumentError: no such operator, or arguments that it would refuse.

    Example:
        >>> print(interlace.explain("gemv_all_reduce", x_shard_k, w_shard_k))
        gemv_all_reduce of x [1, 2048] and w [8192, 2048], bfloat16, on 4 ranks: fused (one_shot 4 512 4 1 0 0),
        because measured on ...
    """
    if operator not in _OPERATORS:
        raise ArgumentError(f"explain: operator must be one of {', '.join(sorted(_OPERATORS))}; got {operator!r}.")
    world_size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    return _OPERATORS[operator](x, w, world_size)


def _gemv_all_reduce(x: torch.Tensor, w: torch.Tensor, world_size: int) -> str:
    from interlace.ops.gemv_all_reduce.config import OPERATOR
    from interlace.ops.gemv_all_reduce.launch import choose
    from interlace.ops.gemv_all_reduce.validate import validate

    validate(x, w, None, "auto", None)
    choice = choose(
        tokens=x.shape[0] if x.dim() == 2 else 1,
        rows=w.shape[0],
        columns=w.shape[1],
        dtype=x.dtype,
        world_size=world_size,
        device=x.device,
    )
    how = f"fused ({choice.config})" if choice.impl == "fused" else choice.impl
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    what = f"{OPERATOR} of x {list(x.shape)} and w {list(w.shape)}, {str(x.dtype).removeprefix('torch.')}"
    return f"{what}, on {ranks}: {how}, because {choice.reason}."


_OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], str]] = {"gemv_all_reduce": _gemv_all_reduce}
