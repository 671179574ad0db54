"""What the primitives are made of in Triton's interpreter: plain Python, called while a kernel
runs.

Every store to a peer goes through ``cpu_faults.deliver``, which counts it and may hold it back.
"""

import functools
import time

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter

from interlace.comm import cpu_faults

# Long enough to leave the core to a rank that computes, short beside a step of the interpreter.
_PAUSE_S = 5e-4


def is_cuda():
    return False


def num_threads():
    return 1


def clock_ns(lanes):
    return tl.full(lanes.shape, time.monotonic_ns(), tl.int64)


def fence_system(scratch):
    cpu_faults.flush()


def pause():
    """Between two looks at a signal: let the network deliver, and other ranks use the core."""
    cpu_faults.progress()
    time.sleep(_PAUSE_S)


def load_acquire(ptr, mask):
    return tl.atomic_add(ptr, 0, mask=mask, sem="acquire", scope="sys")


def store_to_peer(ptr, value, peer, rank, mask):
    addresses, values, taken = _store_arguments(ptr, value, mask)
    world = cpu_faults.world()
    if world is not None:
        world.send(addresses[taken], values[taken], "put")
    else:
        _deliver(addresses, values, taken, peer, rank, ordered=False, count=_count_put)


def signal_peer(ptr, epoch, peer, rank, mask, ORDER):
    if _plain(ORDER) not in ("release", "relaxed"):
        raise ValueError("signal: order must be release or relaxed")
    addresses, values, taken = _store_arguments(ptr, epoch, mask)
    world = cpu_faults.world()
    if world is not None:
        world.send(addresses[taken], values[taken], _plain(ORDER))
    else:
        _deliver(addresses, values, taken, peer, rank, ordered=_plain(ORDER) == "release", count=_count_signal)


def _deliver(addresses, values, taken, peer, rank, *, ordered, count):
    """One message a peer: a tile whose elements go to several peers leaves as several messages."""
    here = np.asarray(_plain(rank)).item()
    peers = np.broadcast_to(np.asarray(_plain(peer)), addresses.shape)
    for destination in np.unique(peers[taken]).tolist():
        chosen = taken & (peers == destination)
        store = functools.partial(interpreter.store, addresses, values, chosen)
        if destination == here:
            store()
            continue
        count(destination, int(chosen.sum()) * values.dtype.itemsize)
        cpu_faults.deliver(store, ordered=ordered)


def _count_put(peer, nbytes):
    cpu_faults.traffic().count_put(peer, nbytes)


def _count_signal(peer, nbytes):
    cpu_faults.traffic().signals += 1


def _store_arguments(ptr, value, mask):
    if not isinstance(value, tl.tensor):
        value = tl.full([], _plain(value), ptr.dtype.element_ty)
    value = value.to(ptr.dtype.element_ty)
    addresses = np.asarray(ptr.handle.data)
    mask = _plain(mask)
    taken = np.asarray(True if mask is None else mask)
    shape = np.broadcast_shapes(addresses.shape, value.handle.data.shape, taken.shape)
    # Copies: a broadcast array may not be written to, which Triton 3.6 asks of what it only reads.
    return tuple(np.array(np.broadcast_to(each, shape), order="C") for each in (addresses, value.handle.data, taken.astype(bool)))


def _plain(x):
    """A tensor's numpy array, a constexpr's value, or ``x`` itself."""
    if isinstance(x, tl.tensor):
        return x.handle.data
    return getattr(x, "value", x)
