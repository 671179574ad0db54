"""Asynchronous tile stores to peers, through a tensor descriptor of the group's memory.

They exist in kernels that are compiled for NVIDIA GPUs only.
"""

import triton
from triton.language import core

from interlace.language._instructions import is_cuda, records
from interlace.language.recording import append_put


@core.extern
def _complete(_semantic=None):
    """Wait until the bulk copies of this program have written, and order later stores after them.
    """
    # Triton itself waits between stores only until the copies have read their source. That frees
    # the shared memory, but does not tell that the data have arrived, so this waits for the writes.
    # Copies go through another proxy than plain stores; the fence joins the two, so that a signal
    # covers both.
    core.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0;",
        "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic,
    )


@triton.jit
def put_tile(descriptor, place, value, group=None):
    """Store a tile at ``place`` of a descriptor over the group's memory.

    The copy runs by itself, out of shared memory, while the program goes on. :func:`complete_tiles`
    orders it.

    Args:
        descriptor: Tensor descriptor whose first dimension is the peer.
        place: List of int32 scalars: the tile's first element in each dimension.
        value: Tile of the descriptor's block shape; elements outside the descriptor's shape are
            left out.
        group: The value of :func:`join`, so that a trace has this put; None for a store that does
            not leave this rank.
    """
    descriptor.store(place, value)
    if group is not None:
        if records(group):
            append_put(value, place[0], group)


@triton.jit
def complete_tiles():
    """Wait until this program's tiles have arrived: a later :func:`signal` covers them like puts.
    """
    if is_cuda():
        _complete()


@core.extern
def _accept(_semantic=None):
    """Order later loads through descriptors after this thread's earlier operations."""
    core.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=core.int32, is_pure=False, pack=1,
        _semantic=_semantic
    )


@triton.jit
def accept_tiles():
    """Allow loads through a tensor descriptor of data that a :func:`wait` has announced.

    Call it after the wait: descriptors read by another proxy than plain loads, to which the wait
    alone promises nothing.
    """
    if is_cuda():
        _accept()
