"""``bmm_all_to_all`` and ``bmm_sum_all_to_all``: batches of products before an all-to-all.

The pass for ``torch.compile`` makes them of a layer of experts, after autograd, so they have no
gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from interlace.comm import Group, process_group_named
from interlace.comm.groups.registration import OPERATOR_TAGS, register
from interlace.comm.replay.deferred import DeferredCall, New
from interlace.comm.replay.replays import places
from interlace.gemm import invariance
from interlace.gemm.batch import BatchCall, BatchOperator, require_same_dtype
from interlace.gemm.dispatch import group_for
from interlace.gemm.implementations.network import pieces_of_batch, send_products
from interlace.gemm.implementations.outputs import KeptOutput, kept_output, product_work
from interlace.gemm.operands import Operands, contiguous_dimension
from interlace.operators.gemm_all_to_all import GemmAllToAllConfig, check_even, fused, reference
from interlace.registry import Implementation, operator

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    "bmm_all_to_all(Tensor x, Tensor w, str group_name, str impl) -> Tensor", tags=OPERATOR_TAGS
)
_library.define(
    "bmm_sum_all_to_all(Tensor[] x, Tensor[] w, str group_name) -> Tensor", tags=OPERATOR_TAGS
)


def _run_fused(call: BatchCall) -> DeferredCall | torch.Tensor:
    """Run one kernel for all products, whose operands are views where they lie one behind the
    other.
    """
    # The kernel sees the batch as one tall product. ``reshape`` copies operands only if the
    # products are not contiguous one after the other.
    (count, rows, inner), columns = call.x.shape, call.w.shape[2]
    along_k = contiguous_dimension(call.w[0]) == 0
    weights = (
        call.w.mT.reshape(count * columns, inner)
        if along_k
        else call.w.reshape(count * inner, columns).T
    )
    operands = Operands(
        call.x.reshape(count * rows, inner), weights, None, None, None, call.x.dtype
    )
    ranks = call.group.world_size
    sent = [[rows // ranks] * ranks] * ranks
    batch = fused.BatchedProducts(count, rows, columns)
    return fused.multiply_and_send(
        operands.for_kernel(), sent, call.group, call.config, call.mark, batch
    )


def _run_chunked(call: BatchCall) -> DeferredCall | torch.Tensor:
    """Run in chunks; by the fused kernel where the group has no output, or no peer to send to."""
    group = call.group
    if group.spans_nodes:
        return _run_between_nodes(call)
    work = None
    if group.world_size > 1:
        work = _in_chunks([call.x], [call.w], group, call.group_name, replace=call.is_explicit)
    # It is None on every rank or on none, so no rank falls back to the kernel by itself.
    return _run_fused(call) if work is None else work


def _run_between_nodes(call: BatchCall) -> torch.Tensor:
    """Multiply the peers' rows of ``x [B, M, K]`` slice by slice, this rank's own last, and send
    each slice. Collective in the group's first call.

    Returns:
        The rows of all products that all ranks have computed for this one, ``[B M, N]``.
    """
    ranks, (count, _, columns) = call.group.world_size, call.w.shape
    x = call.x.unflatten(1, (ranks, -1))
    share = x.shape[2]

    def multiply(rank: int, out: torch.Tensor, first: int) -> None:
        for products, part, begin, end in pieces_of_batch(out, first, share):
            torch.bmm(x[products, rank, begin:end], call.w[products], out=part)

    y = call.x.new_empty([ranks * count * share, columns])
    send_products(call, [[count * share] * ranks] * ranks, y, multiply)
    return y


def _in_chunks(
    x: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    group: Group,
    group_name: str,
    *,
    replace: bool,
) -> DeferredCall | None:
    """Return the work of a batch ``x [B, M, K] @ w [B, K, N]``, or of a sum of several, and the
    all-to-all of each product's rows, ``[B M, N]``; None if there is no output for these sizes.

    Args:
        replace: Whether the caller has asked for this implementation.

    Raises:
        ArgumentError, BackendError: The caller has asked for it, and there can be no output; see
            :func:`interlace.gemm.implementations.outputs.run_into_output`.
    """
    count, rows, columns = *x[0].shape[:2], w[0].shape[2]
    output = KeptOutput(
        "chunked batch",
        "all_to_all",
        functools.partial(_multiply_in_chunks, group),
        (group.world_size, count * rows // group.world_size, columns),
        x[0].dtype,
        {"transport": "copy_engine"},
    )
    product = kept_output(output, group, group_name, replace=replace)
    if product is None:
        return None
    total = count * rows
    new = New.like(x[0], [total, columns])
    return product_work(product, output, new, total, (x, w), places(*x, *w))


def _multiply_in_chunks(
    group: Group,
    x: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    *,
    out: torch.Tensor,
    send: Callable[[int], None],
) -> None:
    """Multiply as :func:`interlace.gemm.implementations.chunked.multiply_in_chunks` does, of every
    product the rows for one rank at a time.
    """
    chunks = [batch.unflatten(1, (group.world_size, -1)) for batch in x]
    for step in range(group.world_size):
        rank = (group.rank + 1 + step) % group.world_size
        result = out[rank].unflatten(0, (len(x[0]), -1))
        _sum_products(result, [chunk[:, rank] for chunk in chunks], w)
        send(rank)


def _sum_products(out: torch.Tensor, x: Sequence[torch.Tensor], w: Sequence[torch.Tensor]) -> None:
    """Compute the sum of batches ``x @ w`` into ``out``, by cuBLAS on a GPU."""
    torch.bmm(x[0], w[0], out=out)
    for part, weight in zip(x[1:], w[1:], strict=True):
        out.baddbmm_(part, weight)


def _run_unfused(call: BatchCall) -> torch.Tensor:
    call.group.check()
    return _send(torch.bmm(call.x, call.w), call.group, call.group_name)


def _send(products: torch.Tensor, group: Group, group_name: str) -> torch.Tensor:
    """Send each rank its rows of all products ``[B, M, N]`` by torch; ``[B M, N]``."""
    # An all-to-all sends one piece to each rank, but a rank's rows are spread over all products.
    sent = products.unflatten(1, (group.world_size, -1)).transpose(0, 1)
    sent = sent.reshape(-1, products.shape[2])
    return reference.send_back(sent, None, None, process_group_named(group_name))


@operator
class BmmAllToAll(BatchOperator):
    """The all-to-all of each product's rows: ``x [B, M, K] @ w [B, K, N] -> [B M, N]``."""

    collective = "all_to_all"
    config_type = GemmAllToAllConfig
    sum_name = "bmm_sum_all_to_all"
    implementations = (
        Implementation("fused", "one kernel for all products", _run_fused, is_batch_invariant=True),
        Implementation(
            "chunked",
            "torch.bmm for each rank's rows, and copy engines that take them",
            _run_chunked,
            schedule="by_rank",
            spans_nodes=True,
        ),
        Implementation(
            "unfused", "torch.bmm, then all_to_all_single", _run_unfused, spans_nodes=True
        ),
    )


_BMM = BmmAllToAll.name
_SUM = BmmAllToAll.sum_name


def _run(x: torch.Tensor, w: torch.Tensor, group_name: str, impl: str) -> torch.Tensor:
    """Run one call; every rank has as many rows for every other one.

    Raises:
        ArgumentError: Rows do not divide evenly, dtypes differ, or there is no such implementation.
        RankMismatchError: Ranks differ in shapes, dtype or impl.
    """
    count, rows, _ = x.shape

    def validate(group: Group) -> None:
        require_same_dtype(_BMM, [x, w])
        check_even(rows, group.world_size)

    declaration = BmmAllToAll()
    implementation, call = declaration.agreed_call(x, w, count * rows, group_name, impl, validate)
    columns = w.shape[2]
    if not count * rows * columns:
        return x.new_empty([count * rows, columns])
    y: torch.Tensor = declaration.run(implementation, call)
    return y


def _fake(x: torch.Tensor, w: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty([x.shape[0] * x.shape[1], w.shape[2]])


def _run_sum(x: Sequence[torch.Tensor], w: Sequence[torch.Tensor], group_name: str) -> torch.Tensor:
    """Run one call of a sum of batches, each shaped as in ``bmm_all_to_all``.

    Raises:
        ArgumentError: Rows do not divide evenly, or dtypes differ.
        RankMismatchError: Ranks differ in shapes or dtype.
    """
    if invariance.is_enabled():
        invariance.refuse(_SUM)
    require_same_dtype(_BMM, [*x, *w])
    (count, rows, _), columns = x[0].shape, w[0].shape[2]
    group = group_for(_BMM, group_name, x[0].device)
    _agree_on_sum(group, x, w)
    check_even(rows, group.world_size)
    if group.world_size > 1 and count * rows * columns and not group.spans_nodes:
        work = _in_chunks(x, w, group, group_name, replace=False)
        if work is not None:
            y: torch.Tensor = group.perform(work)
            return y
    total = x[0].new_empty([count, rows, columns])
    _sum_products(total, x, w)
    return _send(total, group, group_name)


def _agree_on_sum(group: Group, x: Sequence[torch.Tensor], w: Sequence[torch.Tensor]) -> None:
    shapes = tuple(tuple(matrix.shape) for matrix in (*x, *w))
    group.agree(f"{_BMM}, sum", the_shapes_of_x_and_w=shapes, dtype=str(x[0].dtype))


def _fake_sum(x: list[torch.Tensor], w: list[torch.Tensor], group_name: str) -> torch.Tensor:
    return _fake(x[0], w[0])


register(_library, _BMM, _run, _fake)
register(_library, _SUM, _run_sum, _fake_sum)
