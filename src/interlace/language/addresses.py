"""The group as a kernel sees it: this rank, the number of ranks, and addresses of symmetric memory.
"""

import triton
import triton.language as tl

from interlace.comm.runtime import context
from interlace.language._instructions import asks_for_records, require_aligned
from interlace.language.recording import BEGIN, NOBODY, append, rings_of_program
from interlace.language.sizes import next_power_of_2

_RANK = tl.constexpr(context.RANK)
_WORLD_SIZE = tl.constexpr(context.WORLD_SIZE)
_STRIDE_BYTES = tl.constexpr(context.STRIDE_BYTES)


@triton.jit
def join(ctx):
    """Read the group's values for the primitives; call it once, near the top of the kernel.

    Args:
        ctx: int64 pointer to the operator's context (``Group.context(operator)``).

    Returns:
        ``group``, the argument of the primitives: the context, this rank (int32) and the number of
        bytes between two ranks' copies (int64); and, in a trace, the address of this program's
        rings of events.
    """
    # Volatile, so that the compiler does not move the loads to the first primitive: there the
    # program would wait for a trip to memory, and here its first loads of data hide that trip.
    this_rank = tl.load(ctx + _RANK, volatile=True).to(tl.int32)
    stride = tl.load(ctx + _STRIDE_BYTES, volatile=True).to(tl.int64)
    if asks_for_records(ctx):
        group = (ctx, this_rank, stride, rings_of_program(ctx))
        append(tl.zeros([], tl.int32), BEGIN, NOBODY, 0, group)
        return group
    else:
        return ctx, this_rank, stride


@triton.jit
def rank(group):
    """Return this rank's number in the group (int32 scalar)."""
    return group[1]


@triton.jit
def world_size(group):
    """Return the number of ranks in the group (int32 scalar).

    A loop over peers that shall be unrolled needs the number as a constexpr argument instead.
    """
    return tl.load(group[0] + _WORLD_SIZE).to(tl.int32)


@triton.jit
def pointer(address, dtype: tl.constexpr):
    """Make a pointer to symmetric memory from its address.

    Args:
        address: int64 scalar: ``SymmetricTensor.address``, a multiple of 16. Kernels take symmetric
            memory as an integer, because the interpreter would copy a tensor argument back after
            the kernel, over everything that peers have written meanwhile.
        dtype: Triton's dtype of the elements.
    """
    require_aligned(address)
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(dtype)), 16)


@triton.jit
def multiple_of(value, FACTOR: tl.constexpr):
    """Return an argument, and tell the compiler that it is a multiple of ``FACTOR``.

    Triton tells the compiler which arguments are multiples of 16, and ignores ``tl.multiple_of`` of
    an argument. Rows of 1000 elements of 16 bits begin at multiples of 16 bytes, too, but without
    this every element would be loaded by itself.

    Args:
        value: int scalar, an argument of the kernel.
        FACTOR: ``interlace.comm.launching.kernels.known_factor`` of it; 1 says nothing.
    """
    return value if FACTOR == 1 else value // FACTOR * FACTOR


@triton.jit
def peer_pointer(ptr, peer, group):
    """Return the address at which this rank sees ``peer``'s copy of ``ptr``.

    Args:
        ptr: Pointer, or tile of pointers, to rank 0's copy.
        peer: int32 scalar, or a tile that broadcasts with ``ptr``.
        group: The value of :func:`join`.
    """
    require_pointer(ptr)
    # All ranks' copies lie in one range of addresses, one constant stride apart. That it is a
    # multiple of 16 is said by arithmetic: a hint at a division by 1 would go with the division.
    stride = group[2] // (16 * (ptr.dtype.element_ty.primitive_bitwidth // 8)) * 16
    return ptr + stride * peer


@triton.jit
def require_pointer(ptr):
    """Refuse an address in place of a pointer."""
    tl.static_assert(
        ptr.dtype.is_ptr(),
        "ptr must be a pointer to symmetric memory; make one of an address by il.pointer",
    )


@triton.jit
def other_ranks(this_rank, WORLD_SIZE: tl.constexpr):
    """Return the numbers of all ranks, and which of them are peers of ``this_rank``.

    Args:
        this_rank: int32 scalar, the value of :func:`rank`.
        WORLD_SIZE: Number of ranks.

    Returns:
        Two tiles of as many elements as the next power of 2: int32, counting from 0, and bool.
    """
    lanes = tl.arange(0, next_power_of_2(WORLD_SIZE))
    return lanes, (lanes < WORLD_SIZE) & (lanes != this_rank)
