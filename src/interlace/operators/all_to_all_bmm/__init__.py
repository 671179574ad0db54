"""All-to-All + batch of GEMMs: the dispatch to experts and their first product; see README.md.

The pass for ``torch.compile`` makes the operator, after autograd, so it has no gradient. Triton is
imported by the first call.
"""

from __future__ import annotations

import torch

from interlace.comm import Group
from interlace.comm.groups.registration import OPERATOR_TAGS, register
from interlace.errors import ArgumentError
from interlace.gemm.batch import BatchOperator
from interlace.operators.all_to_all_bmm import launch
from interlace.registry import Implementation, operator

_library = torch.library.Library("interlace", "FRAGMENT")
_library.define(
    "all_to_all_bmm(Tensor x, Tensor w, str group_name, str impl) -> (Tensor, Tensor)",
    tags=OPERATOR_TAGS,
)

Pair = tuple[torch.Tensor, torch.Tensor]


@operator
class AllToAllBmm(BatchOperator):
    """The products of rows that come from all ranks, and the rows themselves.

    ``x [R B C, K]``, ``w [B, K, N] -> [B, R C, N]`` and ``[B, R C, K]``: each rank sends C rows to
    each of the B products of every rank.
    """

    collective = "all_to_all"
    collective_first = True
    implementations = (
        Implementation(
            "chunked",
            "torch.bmm of each rank's rows once copy engines have brought them",
            launch.run_chunked,
            schedule="by_rank",
            spans_nodes=True,
        ),
        Implementation(
            "pushed",
            "one kernel stores rows where they are multiplied, then torch.bmm",
            launch.run_pushed,
            is_batch_invariant=True,
        ),
        Implementation(
            "unfused", "all_to_all_single, then torch.bmm", launch.run_unfused, spans_nodes=True
        ),
    )


_NAME = AllToAllBmm.name


def _run(x: torch.Tensor, w: torch.Tensor, group_name: str, impl: str) -> Pair:
    """Run one call; see :class:`AllToAllBmm` for the shapes.

    Raises:
        ArgumentError: x and w do not fit each other, x's rows do not divide evenly, or there is no
            such implementation.
        RankMismatchError: Ranks differ in shapes, dtypes or impl.
    """
    declaration = AllToAllBmm()
    implementation, call = declaration.agreed_call(
        x, w, len(x), group_name, impl, lambda group: _validate(x, w, group)
    )
    if call.group.world_size == 1:
        count, inner, _ = w.shape
        # PyTorch forbids an operator to return a view of its argument.
        received = x.view(count, -1, inner).clone(memory_format=torch.contiguous_format)
        return launch.multiplied(received, w, call.is_batch_invariant), received
    y: Pair = declaration.run(implementation, call)
    return y


def _validate(x: torch.Tensor, w: torch.Tensor, group: Group) -> None:
    fits = x.dim() == 2 and w.dim() == 3 and x.shape[1] == w.shape[1] and x.dtype == w.dtype
    if not fits or not x.numel() or not w.numel():
        raise ArgumentError(
            f"{_NAME}: x must be [R B C, K] and w [B, K, N] of the same dtype, not empty; got "
            f"{list(x.shape)} of {x.dtype} and {list(w.shape)} of {w.dtype}."
        )
    if x.shape[0] % (group.world_size * w.shape[0]):
        raise ArgumentError(
            f"{_NAME}: rows of x must divide evenly over {group.world_size} ranks and "
            f"{w.shape[0]} products; got {x.shape[0]}. Pad x."
        )


def _fake(x: torch.Tensor, w: torch.Tensor, *_: str) -> Pair:
    count, inner, columns = w.shape
    rows = x.shape[0] // count
    return x.new_empty([count, rows, columns]), x.new_empty([count, rows, inner])


register(_library, _NAME, _run, _fake)
