"""Products whose output is carried to the peers as it is written: ``impl="remote_stores"``, ``"chunked"``
and ``"triggered"``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from interlace.comm import Group
from interlace.comm.interpreter import require
from interlace.comm.kernels import Launch, describe_parts
from interlace.comm.replays import places
from interlace.errors import ArgumentError, BackendError, WorkspaceError
from interlace.gemm.config import ProductConfig
from interlace.gemm.launch import has_descriptors, operand_arguments, options, programs
from interlace.gemm.operands import ALIGNMENT_BYTES, Operands
from interlace.mapped import Fused, fuse
from interlace.units import ceil_div

_MOST = 8  # products whose memory a group keeps


def run_into_output(
    how: str,
    collective: str,
    operands: Operands,
    group: Group,
    process_group: dist.ProcessGroup | None,
    config: ProductConfig,
    *,
    replace: bool,
) -> torch.Tensor | None:
    """``x @ w.T`` and the collective of its rows; None if there is no output for these sizes.
    Collective where it is new.

    A group keeps the outputs of a few sizes until ``Group.release``. A new one takes tens of
    milliseconds, so a program whose sizes never settle should not have one made for each.

    Args:
        how: ``"remote_stores"``: cuBLAS, whose stores go to the peers; ``"chunked"``: cuBLAS, called for
            each rank's rows, and copy engines; ``"triggered"``: a kernel that counts its tiles, and
            copy engines.
        collective: of :data:`interlace.mapped.COLLECTIVES`.
        config: of the kernel that counts.
        replace: the implementation was asked for: where there are as many as are kept, give up the
            one that was not used for longest (but none that a CUDA graph has captured on any rank).
            Else there is none for new sizes, from then on.

    Raises:
        ArgumentError: with ``replace``: a mapped output would be padded to more than twice its
            size.
        BackendError: with ``replace``: the driver cannot map memory, or cannot let copies wait.
    """
    settings, arguments = _producer(
        how, operands, group, config, bias_once=collective != "all_to_all"
    )
    product = _kept_output(
        how, collective, settings, operands.out_dtype, group, process_group, replace=replace
    )
    if product is None:
        return None
    rows = operands.rows // group.world_size if collective == "reduce_scatter" else operands.rows
    y = operands.x.new_empty([rows, operands.columns], dtype=operands.out_dtype)
    if how == "triggered":  # its copies' waits are not for graphs that anybody may replay
        product.run_into(y, *arguments)
    else:
        _run(product, y, arguments, (how, collective, operands.place()), group)
    return y


def run_batch_into_output(
    x: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    group: Group,
    process_group: dist.ProcessGroup | None,
    *,
    replace: bool,
) -> torch.Tensor | None:
    """A batch ``x [B, M, K] @ w [B, K, N]``, or a sum of several, and the all-to-all of each
    product's rows, by ``"chunked"``.

    ``[B M, N]``; the rest as :func:`run_into_output`.
    """
    count, rows, columns = *x[0].shape[:2], w[0].shape[2]
    settings = {
        "producer": functools.partial(_split_batch, group),
        "shape": (group.world_size, count * rows // group.world_size, columns),
        "transport": "copy_engine",
    }
    product = _kept_output(
        "split batch", "all_to_all", settings, x[0].dtype, group, process_group, replace=replace
    )
    if product is None:
        return None
    y = x[0].new_empty([count * rows, columns])
    _run(product, y, (x, w), ("split batch", places(*x, *w)), group)
    return y


def _split_batch(
    group: Group,
    x: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    *,
    out: torch.Tensor,
    send: Callable[[int], None],
) -> None:
    """As :func:`split_product`, of every product the rows for one rank at a time."""
    parts = [each.unflatten(1, (group.world_size, -1)) for each in x]
    for step in range(group.world_size):
        to = (group.rank + 1 + step) % group.world_size
        multiply_batch_into(
            out[to].unflatten(0, (len(x[0]), -1)), [part[:, to] for part in parts], w
        )
        send(to)


def multiply_batch_into(
    out: torch.Tensor, x: Sequence[torch.Tensor], w: Sequence[torch.Tensor]
) -> None:
    """The sum of batches ``x @ w`` into ``out``, by cuBLAS where there is one."""
    torch.bmm(x[0], w[0], out=out)
    for part, weight in zip(x[1:], w[1:], strict=True):
        out.baddbmm_(part, weight)


def _kept_output(
    how: str,
    collective: str,
    settings: dict[str, Any],
    dtype: torch.dtype,
    group: Group,
    process_group: dist.ProcessGroup | None,
    *,
    replace: bool,
) -> Fused | None:
    """The producer with the output that the group keeps for it; None if there is none, which is
    remembered, too.

    All ranks make the same calls, so a key is new on every rank or on none. What is new is settled
    by all of them: a rank may have captured other outputs than its peers, or fail to map memory,
    and must not go its own way then.
    """
    key = (how, collective, settings["shape"], dtype, settings.get("tiles"))
    if group.kept.get(key) is None and (replace or key not in group.kept):
        with group.indivisible("making a mapped output"):
            group.kept[key] = _new_output(
                collective, settings, dtype, group, process_group, replace=replace
            )
    group.kept.move_to_end(key)
    return cast("Fused | None", group.kept[key])


def _new_output(
    collective: str,
    settings: dict[str, Any],
    dtype: torch.dtype,
    group: Group,
    process_group: dist.ProcessGroup | None,
    *,
    replace: bool,
) -> Fused | None:
    """A producer with a new output, for which another one may be given up. Collective."""
    if group.capture_id() is not None:
        raise WorkspaceError(
            "a mapped output must be made before a CUDA graph is captured. Call the operator once "
            "with these shapes first."
        )
    made = [(key, value) for key, value in group.kept.items() if isinstance(value, Fused)]
    everywhere = group.exchange(
        "mapped outputs in CUDA graphs", [value.output.captured for _, value in made]
    )
    free = [key for (key, _), *captured in zip(made, *everywhere, strict=True) if not any(captured)]
    if len(free) >= _MOST and not replace:
        return None
    try:
        product = fuse(
            collective=collective, dtype=dtype, group=process_group, device=group.device, **settings
        )
    except (ArgumentError, BackendError, WorkspaceError):  # on every rank alike
        if replace:
            raise
        return None
    given_up = free[: max(0, len(free) + 1 - _MOST)]
    if given_up:
        group.replays.clear()  # some may have their memory
    for key in given_up:
        del group.kept[key]
    return product


def _run(
    product: Fused,
    y: torch.Tensor,
    arguments: tuple[Any, ...],
    where: tuple[Hashable, ...],
    group: Group,
) -> None:
    """Run a producer and its collective into ``y``; a call that comes again, as a graph.

    Args:
        where: the call, and the addresses of its operands.
    """
    output = product.output
    key = (*where, output.half, output.turn, output.captured, places(y))
    with group.running():
        if not group.replays.run(key, lambda: product.run_into(y, *arguments)):
            output.advance()


def _producer(
    how: str, operands: Operands, group: Group, config: ProductConfig, bias_once: bool
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The producer with its output's settings, as ``fuse`` takes them, and the arguments of a call."""
    if how == "remote_stores":
        return {"producer": torch.mm, "shape": (operands.rows, operands.columns)}, (
            operands.x,
            operands.w.T,
        )
    rows = operands.rows // group.world_size
    settings: dict[str, Any] = {
        "shape": (group.world_size, rows, operands.columns),
        "transport": "copy_engine",
    }
    if how == "chunked":
        return settings | {"producer": functools.partial(split_product, group)}, (
            operands,
            bias_once,
        )
    tiles = ceil_div(rows, config.block_m) * ceil_div(operands.columns, config.block_n)
    settings |= {"producer": functools.partial(count_product, group), "tiles": tiles}
    return settings, (operands.for_kernel(), bias_once, config)


def split_product(
    group: Group, operands: Operands, bias_once: bool, *, out: torch.Tensor,
    send: Callable[[int], None]
) -> None:  # fmt: skip
    """cuBLAS once for each rank's rows, the next rank's first; each is on its way while the next is
    computed.

    Args:
        bias_once: of a sum over ranks: the bias is added to this rank's own rows only.
        out: ``[R, M/R, N]``, for rank r at r.
        send: called with each part that is complete.
    """
    parts, weight = operands.x.chunk(group.world_size), operands.w.T
    for step in range(group.world_size):
        to = (group.rank + 1 + step) % group.world_size
        multiply_into(
            out[to], parts[to], weight, None if bias_once and to != group.rank else operands.bias
        )
        send(to)


def multiply_into(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """``x @ w + bias`` into ``out``, by cuBLAS where there is one."""
    if bias is None:
        torch.mm(x, w, out=out)
    else:
        torch.addmm(bias, x, w, out=out)


def count_product(
    group: Group,
    operands: Operands,
    bias_once: bool,
    config: ProductConfig,
    *,
    out: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """Launch the product that counts its tiles; arguments as of :func:`split_product`.

    Args:
        counters: one for each piece of ``out``.
    """
    require(group.backend)
    from interlace.gemm.kernels.counted import counted_product

    pieces = counters.numel() // group.world_size
    rows = operands.rows // counters.numel()
    descriptors = has_descriptors(group)
    # A whole tile at the end of a piece would cover the next one of its rank.
    tiles = (
        descriptors
        and out.stride(1) * out.itemsize % ALIGNMENT_BYTES == 0
        and (pieces == 1 or rows % config.block_m == 0)
    )
    result = describe_parts(out, [config.block_m, config.block_n]) if tiles else None
    x, w, bias, x_scale, w_scale, *strides = operand_arguments(operands, config, descriptors)
    arguments = (
        x, w, bias, x_scale, w_scale, result, out.data_ptr(), counters.data_ptr(), group.rank,
        pieces, rows, operands.columns, operands.inner, *strides, out.stride(0), out.stride(1),
    )  # fmt: skip
    constants = options(operands, config, group, descriptors) | {
        "TILES": tiles,
        "OWN_BIAS": bias_once,
    }
    Launch(counted_product, (programs(group, config),), arguments, constants)()
