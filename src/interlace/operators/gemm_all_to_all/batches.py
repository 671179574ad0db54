"""``bmm_all_to_all`` and ``bmm_sum_all_to_all``: batches of products before an all-to-all.

The pass for ``torch.compile`` makes them of a layer of experts, after autograd, so they have no
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.comm import Group, process_group_named
from interlace.comm.groups.registration import OPERATOR_TAGS, register
from interlace.comm.replay.deferred import DeferredCall
from interlace.gemm import invariance
from interlace.gemm.batch import BatchCall, BatchOperator, require_same_dtype
from interlace.gemm.dispatch import group_for
from interlace.gemm.implementations import chunked, network_batch
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


def _run_chunked(call: BatchCall) -> DeferredCall | torch.Tensor | None:
    # A single rank has nothing to send, so the fused kernel runs instead, without an output.
    if call.group.world_size == 1:
        return None
    if call.group.spans_nodes:
        return network_batch.run_all_to_all(call)
    return chunked.run_batch(
        [call.x], [call.w], call.group, call.group_name, replace=call.is_explicit
    )


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
    y: torch.Tensor | None = declaration.run(implementation, call)
    # It is None on every rank or on none, so no rank falls back to the kernel by itself.
    if y is None:
        y = call.group.perform(_run_fused(call))
    assert y is not None
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
        work = chunked.run_batch(x, w, group, group_name, replace=False)
        if work is not None:
            y: torch.Tensor = group.perform(work)
            return y
    total = x[0].new_empty([count, rows, columns])
    chunked.multiply_batch_into(total, x, w)
    return _send(total, group, group_name)


def _agree_on_sum(group: Group, x: Sequence[torch.Tensor], w: Sequence[torch.Tensor]) -> None:
    shapes = tuple(tuple(matrix.shape) for matrix in (*x, *w))
    group.agree(f"{_BMM}, sum", the_shapes_of_x_and_w=shapes, dtype=str(x[0].dtype))


def _fake_sum(x: list[torch.Tensor], w: list[torch.Tensor], group_name: str) -> torch.Tensor:
    return _fake(x[0], w[0])


register(_library, _BMM, _run, _fake)
register(_library, _SUM, _run_sum, _fake_sum)
