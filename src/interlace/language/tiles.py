"""Asynchronous tile stores to peers, through a tensor descriptor of the group's memory. Compiled
kernels only.
"""

import triton
import triton.language as tl
from triton.language import core

from interlace.comm.interpreter import interpreting

if interpreting():

    def is_cuda():
        return False

else:
    from interlace.language._device import is_cuda


@core.extern
def _complete(_semantic=None):
    # Waiting for reads alone, as Triton does between stores, frees the shared memory but says
    # nothing of arrival.
    core.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0;",
        "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic,
    )


@triton.jit
def put_tile(descriptor, place, value):
    """Store a tile at ``place`` of a descriptor over the group's memory (its first dimension is the
    peer).

    The copy runs by itself, out of shared memory, while the program goes on; what lies outside the
    descriptor's shape is left out. Order it by :func:`complete_tiles`.
    """
    descriptor.store(place, value)


@triton.jit
def complete_tiles():
    """Wait until this program's tiles have arrived: a later :func:`signal` covers them like other
    puts.
    """
    if is_cuda():
        _complete()


@core.extern
def _accept(_semantic=None):
    core.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=core.int32, is_pure=False, pack=1,
        _semantic=_semantic
    )


@triton.jit
def accept_tiles():
    """After a :func:`wait`: what peers have stored may be loaded through a tensor descriptor, too,
    from here on.
    """
    if is_cuda():
        _accept()
