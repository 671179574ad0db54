"""From a call to what it enqueues: agreement, what brings the peers' rows, products by cuBLAS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from interlace.comm import Group, copies
from interlace.comm.interpreter import require
from interlace.comm.replays import places
from interlace.errors import ArgumentError
from interlace.gemm import fetch
from interlace.gemm.choice import Choice, choose_product, group_for
from interlace.gemm.config import ProductConfig
from interlace.gemm.fetch import Own, Piece, Staging
from interlace.gemm.launch import padded_columns
from interlace.gemm.spread import spread
from interlace.operators.all_to_all_bmm.config import IMPLS, OPERATOR


def choose(**call: Any) -> Choice[ProductConfig]:
    """Which implementation is faster than the pair, if one is; see
    :func:`interlace.gemm.choice.choose_product`.

    Its configuration means nothing here. ``rows`` are those of all products.
    """
    return choose_product(OPERATOR, ProductConfig, **call)


def run(
    x: torch.Tensor, w: torch.Tensor, group_name: str, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[B, R C, N]`` and ``[B, R C, K]`` of ``x [R B C, K]`` and ``w [B, K, N]``; see README.md.

    Args:
        impl: of :data:`IMPLS`.

    Raises:
        ArgumentError: x and w do not fit each other, x's rows do not divide evenly, or there is no
            such implementation.
        RankMismatchError: ranks differ in shapes, dtypes or impl.
    """
    group = group_for(OPERATOR, group_name, x.device)
    mark, how = group.once(
        (OPERATOR, x.shape, w.shape, x.dtype, w.dtype, impl), lambda: _decide(x, w, group, impl)
    )
    count, inner, columns = w.shape
    rows = x.shape[0] // count
    if group.world_size == 1:
        received = x.view(count, rows, inner).clone(memory_format=torch.contiguous_format)
        return torch.bmm(received, w), received
    require(group.backend)
    x = x if x.stride(1) == 1 else x.contiguous()
    y, whole = (
        x.new_empty([count, rows, columns]),
        x.new_empty([count, rows, padded_columns(inner, x.dtype)]),
    )
    # Before anything is enqueued: memory may have to grow.
    if how == "pushed":
        enqueue = _spread(x, w, y, whole, group, mark)
    else:
        staging = Staging(OPERATOR, len(x), inner, x.dtype)
        staging.workspace(group)
        enqueue = functools.partial(_fetch, x, w, y, whole, staging, group, mark)
    with group.running():
        group.replays.run((OPERATOR, mark, places(x, w, y, whole)), enqueue)
    return y, whole[..., :inner].contiguous()


def _decide(x: torch.Tensor, w: torch.Tensor, group: Group, impl: str) -> tuple[int, str]:
    """Check a call on all ranks: its mark, and how it runs."""
    mark = group.agree(
        OPERATOR, the_shape_of_x=tuple(x.shape), the_shape_of_w=tuple(w.shape),
        dtypes=(str(x.dtype), str(w.dtype)), impl=impl
    )  # fmt: skip
    if impl not in IMPLS:
        raise ArgumentError(f"{OPERATOR}: impl must be one of {', '.join(IMPLS)}; got {impl!r}.")
    if (
        x.dim() != 2
        or w.dim() != 3
        or x.shape[1] != w.shape[1]
        or x.dtype != w.dtype
        or not (x.numel() and w.numel())
    ):
        raise ArgumentError(
            f"{OPERATOR}: x must be [R B C, K] and w [B, K, N] of the same dtype, not empty; got "
            f"{list(x.shape)} of {x.dtype} and "
            f"{list(w.shape)} of {w.dtype}."
        )
    if x.shape[0] % (group.world_size * w.shape[0]):
        raise ArgumentError(
            f"{OPERATOR}: rows of x must divide evenly over {group.world_size} ranks and "
            f"{w.shape[0]} products; "
            f"got {x.shape[0]}. Pad x."
        )
    if impl != "auto":
        return mark, impl
    sizes = {"rows": len(x), "columns": w.shape[2], "inner": w.shape[1]}
    chosen = choose(**sizes, dtype=x.dtype, world_size=group.world_size, device=x.device).impl
    return mark, chosen if chosen in IMPLS else "chunked"


def _spread(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, whole: torch.Tensor, group: Group, mark: int
) -> Callable[[], None]:  # fmt: skip
    """What enqueues one kernel that stores rows where they are multiplied, and the products into
    ``y``.
    """
    ranks, inner = group.world_size, x.shape[1]
    share = whole.shape[1] // ranks
    rows = [len(w) * share] * ranks
    spreading = spread(group, OPERATOR, x, whole, rows, mark, share=share, distance=ranks * share)

    def enqueue() -> None:
        spreading()
        torch.bmm(whole[..., :inner], w, out=y)

    return enqueue


def _fetch(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, whole: torch.Tensor, staging: Staging,
    group: Group, mark: int
) -> None:  # fmt: skip
    """The products into ``y``, of this rank's own rows while copies bring the peers' into ``whole
    [B, R C, padded K]``.
    """
    ranks, me, count, inner = group.world_size, group.rank, len(w), x.shape[1]
    share = whole.shape[1] // ranks
    share_bytes = share * staging.row_bytes

    def place(source: int) -> int:
        """Where rows of ``source`` begin; those for the next product follow ``ranks`` shares later."""
        return whole.data_ptr() + source * share_bytes

    pieces = {
        source: [
            Piece(me * count * share_bytes, place(source), share_bytes, count, ranks * share_bytes)
        ]
        for source in ((me + step) % ranks for step in range(1, ranks))
    }
    own = Own(me * count * share, count * share, place(me), share, ranks * share, staged=False)
    fetching = fetch.begin(
        group, staging, x, None, whole, pieces, mark, own=own, first=True, signal=False
    )
    arriving, results = (
        whole.view(count, ranks, share, -1)[..., :inner],
        y.view(count, ranks, share, -1),
    )
    torch.bmm(x.view(ranks, count, share, inner)[me], w, out=results[:, me])
    # What lies side by side is one product: a product for each source would have a last wave of
    # tiles for each.
    for sources in (slice(me + 1, ranks), slice(0, me)):
        for source in range(ranks)[sources]:
            copies.wait_for(group, fetching.arrived[source])
        if sources.stop > sources.start:
            torch.bmm(arriving[:, sources].flatten(1, 2), w, out=results[:, sources].flatten(1, 2))
    fetch.settle(group, staging, y, mark)
    fetch.end(group, fetching)
