"""Operations of Triton's interpreter that the primitives consist of: plain Python, called while a
kernel runs.

Every store to a peer goes through ``cpu_faults.deliver``, which counts it and may hold it back.
``_device`` has the same names for GPUs, with their shapes and dtypes.
"""

import ctypes
import functools
import time
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from interlace.comm.cpu import cpu_faults, shortcuts
from interlace.comm.runtime import context
from interlace.comm.replay.memory import memory_of
from interlace.comm.runtime.deadlines import pause_s
from interlace.errors import ArgumentError
from interlace.units import MIB

shortcuts.mend()  # kernels may be launched by Triton itself

# An address that is farther behind a block has nothing to do with it. Two ranks' parts are farther
# apart, in the explorer too.
_NEAR = 32 * MIB


def is_cuda():
    """Tell that the kernel does not run on an NVIDIA GPU."""
    return False


def num_threads():
    """Return the number of threads of a program: one."""
    return 1


def clock_ns(lanes):
    """Read the clock in ns, as an int64 tile of the shape of ``lanes``."""
    return tl.full(lanes.shape, time.monotonic_ns(), tl.int64)


def to_float8(value):
    """Round float32 numbers to float8_e4m3fn. Triton's interpreter loses carries where it converts:
    127.9 would become 64.
    """
    rounded = torch.from_numpy(np.array(plain(value), np.float32)).to(torch.float8_e4m3fn)
    handle = TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)
    return tl.tensor(handle, tl.block_type(tl.float8e4nv, list(value.shape)))


def processor(lane):
    """Return 0, as int64 of the shape of ``lane``: programs run one after another."""
    return tl.full(lane.shape, 0, tl.int64)


def records(group):
    """Tell if a program of this group's value records events."""
    return len(group) > 3


def asks_for_records(ctx):
    """Tell if a context asks the kernel to record events."""
    return ctx.dtype.element_ty == tl.uint64


def is_tile(value):
    """Tell if a value is a tile, not a scalar."""
    return isinstance(value, tl.tensor) and value.type.is_block()


def tile_bytes(value):
    """Return the bytes of a tile or a scalar."""
    return value.handle.data.size * value.dtype.primitive_bitwidth // 8


def kind_of_event(name):
    """Return the number of a kind of events that a kernel may record."""
    return context.KINDS[plain(name)]


def fence_system(scratch):
    """Deliver every store that is held back; ``scratch`` is for GPUs."""
    cpu_faults.flush()


def pause(looks):
    """Pause between two looks at a signal: let stores be delivered, and other ranks compute.

    Args:
        looks: Number of looks that this wait has made; pauses grow with it.
    """
    cpu_faults.progress()
    time.sleep(pause_s(np.asarray(plain(looks)).item()))


def load_acquire(ptr, mask):
    """Load int32 signals; stores that were released before them are visible. 0 outside ``mask``."""
    return tl.atomic_add(ptr, 0, mask=mask, sem="acquire", scope="sys")


def load_whole(ptr, mask):
    """Load integers of 16 or 32 bits that a peer may store meanwhile: each as it was before, or as
    it is after. 0 outside ``mask``.
    """
    if ptr.dtype.element_ty.primitive_bitwidth == 32 or cpu_faults.world() is not None:
        # The explorer lets one rank access memory at a time, and sees which elements it loads.
        return tl.load(ptr, mask=mask, other=0)
    # Triton's interpreter copies elements by memcpy, which may load the bytes of two one after the
    # other: half of a number would arrive. It loads aligned words of four bytes at once.
    address = ptr.to(tl.int64)
    pair = tl.load((address & -4).to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    return (pair >> ((address & 2) * 8).to(tl.int32)).to(tl.int16)


def require_peers(primitive, peer, mask, group):
    """Refuse ranks that the group does not have: there is no memory of theirs to access.

    Args:
        primitive: Name of the primitive, for the error.
        peer: Ranks, a scalar or a tile.
        mask: Tile that broadcasts with ``peer``, or None; ranks outside it are not used.
        group: The value of :func:`interlace.language.join`.

    Raises:
        ArgumentError: a rank within the mask is below 0, or not below the number of ranks.
    """
    # The context is memory of this process. A load by the interpreter takes a hundred times longer.
    field = int(plain(group[0]).item()) + context.WORLD_SIZE * 8
    ranks = ctypes.c_int64.from_address(field).value
    peers = np.asarray(plain(peer))
    outside = (peers < 0) | (peers >= ranks)
    if not outside.any():
        return
    mask = plain(mask)
    if mask is not None:
        outside, peers = np.broadcast_arrays(outside & np.asarray(mask, bool), peers)
    if outside.any():
        raise ArgumentError(
            f"{plain(primitive)}: peer must be a rank of the group, 0 to {ranks - 1}; got "
            f"{peers[outside].flat[0]} on rank {plain(group[1]).item()}. Take it modulo the "
            "number of ranks, or leave it out by the mask."
        )


def require_grid(most):
    """Refuse a launch whose programs have not each an epoch cell of their own.

    Args:
        most: Number of epoch cells.

    Raises:
        ArgumentError: the grid has another dimension, or too many programs.
    """
    grid = interpreter_builder.grid_dim
    if grid[0] > plain(most) or grid[1] > 1 or grid[2] > 1:
        raise ArgumentError(
            f"next_epoch, enter: the grid must be 1-D, of at most {plain(most)} programs, since "
            f"each has an epoch cell; got {tuple(grid)}. Let each program take several tiles: "
            "tl.range(tl.program_id(0), tiles, tl.num_programs(0))."
        )


def require_aligned(address):
    """Refuse an address that is not what kernels are compiled for: a GPU's load would fault.

    Raises:
        ArgumentError: the address is no multiple of 16.
    """
    number = int(np.asarray(plain(address)).item())
    if number % 16:
        raise ArgumentError(
            f"pointer: address must be a multiple of 16; got one with a remainder of {number % 16}. "
            "Add multiples of 16 bytes to SymmetricTensor.address, and elements to the pointer."
        )


def require_memory(primitive, ptr, peer, mask, group):
    """Refuse addresses that are not symmetric memory of the peer whose copy they shall be.

    Args:
        primitive: Name of the primitive, for the error.
        ptr: Pointer, or tile of pointers, at which this rank sees the peer's copy.
        peer: Ranks of the group, a scalar or a tile that broadcasts with ``ptr``.
        mask: Tile that broadcasts with ``ptr``, or None; addresses outside it are not used.
        group: The value of :func:`interlace.language.join`.

    Raises:
        ArgumentError: an address within the mask is of no block of the peer.
    """
    mask = plain(mask)
    addresses, peers, selected = np.broadcast_arrays(
        ptr.handle.data, np.asarray(plain(peer)), np.asarray(True if mask is None else mask, bool)
    )
    itemsize = max(ptr.dtype.element_ty.primitive_bitwidth // 8, 1)
    require_addresses(plain(primitive), addresses[selected], peers[selected], itemsize, group)


def require_addresses(
    primitive: str, addresses: Any, peers: Any, itemsize: int, group: Any
) -> None:
    """Refuse elements of ``itemsize`` bytes outside of the symmetric memory of their ranks.

    Args:
        primitive: Name of the primitive, for the error.
        addresses: Uint64 array.
        peers: Rank whose memory each element shall be in: a scalar, or an array of that shape.
        itemsize: Bytes of an element.
        group: The value of :func:`interlace.language.join`.

    Raises:
        ArgumentError: an element lies, in part or whole, in no block of its rank.
    """
    # A process on its own may have any of its memory written as if by a peer.
    if not np.asarray(plain(group[2])).item():
        return
    peers = np.broadcast_to(np.asarray(plain(peers)), addresses.shape)
    for peer in sorted(set(peers.ravel().tolist())):
        of_peer = addresses[peers == peer]
        first, last = int(of_peer.min()), int(of_peer.max()) + itemsize
        blocks = memory_of(peer)
        # As a rule, a tile is of one block.
        if any(start <= first and last <= start + nbytes for start, nbytes in blocks):
            continue
        outside = np.ones(of_peer.shape, bool)
        for start, nbytes in blocks:
            outside &= (of_peer - np.uint64(start)) > np.uint64(max(nbytes - itemsize, 0))
        if outside.any():
            stray = int(of_peer[outside][0])
            raise ArgumentError(
                f"{primitive}: every address must be of symmetric memory of rank {peer}; "
                f"{outside.sum()} of {outside.size} are not{_distance(stray, blocks)}, on rank "
                f"{np.asarray(plain(group[1])).item()}. Allocate as much as the kernel uses, mask "
                "what is beyond it, and give the kernel SymmetricTensor.address, for il.pointer, "
                "instead of a tensor."
            )


def _distance(address, blocks):
    """Say how far an address lies behind the last block that begins before it, if it is near."""
    before = [(start, nbytes) for start, nbytes in blocks if start <= address]
    if not before:
        return ""
    start, nbytes = max(before)
    beyond = address - start - nbytes
    return f" (the first is {beyond} bytes past the end of {nbytes})" if beyond < _NEAR else ""


def store_to_peer(ptr, value, peer, rank, mask):
    """Store a tile at pointers into the memory of ``peer``; it may be delivered late."""
    addresses, values, selected = _store_arguments(ptr, value, mask)
    world = cpu_faults.world()
    # Under the explorer, memory is simulated, and stores are steps of a schedule.
    if world is not None:
        world.send(addresses[selected], values[selected], "put")
    else:
        _deliver(addresses, values, selected, peer, rank, ordered=False, count=_count_put)


def signal_peer(ptr, epoch, peer, rank, mask, ORDER):
    """Set int32 signals in the memory of ``peer`` to ``epoch``.

    Raises:
        ValueError: ``ORDER`` is neither ``"release"`` nor ``"relaxed"``.
    """
    order = plain(ORDER)
    if order not in ("release", "relaxed"):
        raise ValueError("signal: order must be release or relaxed")
    addresses, values, selected = _store_arguments(ptr, epoch, mask)
    world = cpu_faults.world()
    if world is not None:
        world.send(addresses[selected], values[selected], order)
    else:
        ordered = order == "release"
        _deliver(addresses, values, selected, peer, rank, ordered=ordered, count=_count_signal)


def _deliver(addresses, values, selected, peer, rank, *, ordered, count):
    """Send one message per peer: a tile for several peers leaves as several messages."""
    me = np.asarray(plain(rank)).item()
    peers = np.broadcast_to(np.asarray(plain(peer)), addresses.shape)
    for destination in sorted(set(peers[selected].tolist())):
        part = selected & (peers == destination)
        store = functools.partial(interpreter.store, addresses, values, part)
        # A store to the rank's own memory crosses no link: it is neither counted nor held back.
        if destination == me:
            store()
            continue
        count(destination, int(part.sum()) * values.dtype.itemsize)
        cpu_faults.deliver(store, ordered=ordered)


def _count_put(peer, nbytes):
    cpu_faults.traffic().count_put(peer, nbytes)


def _count_signal(peer, nbytes):
    cpu_faults.traffic().signals += 1


def _store_arguments(ptr, value, mask):
    """Return the numpy arrays of a store, of one shape: addresses, values and the mask."""
    if not isinstance(value, tl.tensor):
        value = tl.full([], plain(value), ptr.dtype.element_ty)
    value = value.to(ptr.dtype.element_ty)
    addresses = np.asarray(ptr.handle.data)
    mask = plain(mask)
    selected = np.asarray(True if mask is None else mask)
    shape = np.broadcast_shapes(addresses.shape, value.handle.data.shape, selected.shape)
    # Copies, because Triton 3.6 asks for arrays that may be written to, even where it only reads
    # them; a broadcast array may not be.
    return tuple(
        np.array(np.broadcast_to(array, shape), order="C")
        for array in (addresses, value.handle.data, selected.astype(bool))
    )


def plain(x):
    """Return a tensor's numpy array, a constexpr's value, or ``x`` itself."""
    if isinstance(x, tl.tensor):
        return x.handle.data
    return getattr(x, "value", x)
