"""GPU-initiated puts over the network (GIN): compiled for NVIDIA GPUs, and never run on any yet.

A program puts a contiguous range of a registered window into a window of any rank of the group, of
another node as well, by NCCL's device API. Nothing passes through the host. The put increments a
signal of that rank, behind the data. ``gin`` is the argument ``open_gin(...).address`` of the
kernel, which is launched with that object's ``options``. ``README.md`` has an example.

On the CPU backend messages of Gloo carry the puts.
"""

import triton
import triton.language as tl

from interlace.comm.runtime import context
from interlace.comm.runtime.interpreter import interpreting
from interlace.language._instructions import num_threads, records, require_peers
from interlace.language.deadlines import LATE, after_look, report
from interlace.language.recording import SEVERAL, UNPACKED, WAIT, append

# Triton compiles or interprets a function when it is decorated, so the choice is made once for all.
if interpreting():
    from interlace_gin._interpreted import (
        post, read_counter, read_signal, reset_counter, shadow_address,
    )
else:
    from interlace_gin._device import (
        post, read_counter, read_signal, reset_counter, shadow_address,
    )

_RELAXED, _ACQUIRE = tl.constexpr(0), tl.constexpr(2)  # numbers of C++
_SIGNAL, _COUNTER = tl.constexpr(0), tl.constexpr(1)
_PUT = tl.constexpr(context.PUT)


@triton.jit
def gin_put(
    gin, target, target_start, source, source_start, nbytes, peer, signal, group,
    counter=-1,
):
    """Put a range of this rank's window into a window of ``peer``, and then increment a signal.

    The program does not wait. The signal tells that this put has arrived; it tells nothing of
    other puts. What this program has stored before is part of the put, and so is what other
    programs have stored, once this one has acquired it (:func:`interlace.language.arrive_last`).
    The source must stay as it is until the put has been sent (:func:`gin_sent`), or its receiver
    has answered.

    Args:
        gin: int64 scalar: ``Gin.address``.
        target: int64 scalar: ``Window.handle`` of the window that is written, on ``peer``.
        target_start: int64 scalar: its first byte.
        source: int64 scalar: ``Window.handle`` of the window of this rank that is read.
        source_start: int64 scalar: its first byte.
        nbytes: int64 scalar: length of the range, above 0.
        peer: int32 scalar.
        signal: int32 scalar: the number of the signal, below ``Gin.signals``.
        group: The value of :func:`interlace.language.join`.
        counter: int32 scalar: the number of a counter of this rank for :func:`gin_sent`, below
            ``Gin.counters``; -1: none.
    """
    require_peers("gin_put", peer, None, group)
    # Recorded first: the peer could see the signal before the record of the put had a time.
    if records(group):
        append(tl.zeros([], tl.int32), _PUT, peer, nbytes, group)
    # One thread puts. The barrier brings the other threads' stores into its past.
    tl.debug_barrier()
    post(
        tl.cast(gin, tl.int64), tl.cast(peer, tl.int32), tl.cast(target, tl.int64),
        tl.cast(target_start, tl.int64), tl.cast(source, tl.int64), tl.cast(source_start, tl.int64),
        tl.cast(nbytes, tl.int64), tl.cast(signal, tl.int32), tl.cast(counter, tl.int32),
    )


@triton.jit
def gin_arrived(gin, signal):
    """Return how many puts with a signal have arrived that no :func:`gin_wait` has taken (int64).

    The order is relaxed: only :func:`gin_wait` makes the data visible.
    """
    # Each thread reads at its own time; the minimum gives all of them the same answer.
    taken = tl.load(_shadow(gin, signal), volatile=True)
    return tl.min(_read(gin, signal, _SIGNAL, _RELAXED), 0) - taken


@triton.jit
def gin_wait(gin, signal, puts, peer, slice, group):
    """Wait until ``puts`` more puts with a signal have arrived at this rank, and take them.

    All threads of the program may then load what they have brought. Signals count from call to
    call, also in replays of a CUDA graph: a wait takes as many puts as it waits for, so the next
    wait is for the following ones. One program at a time may wait for a signal.

    Args:
        gin: int64 scalar: ``Gin.address``.
        signal: int32 scalar: the number of the signal.
        puts: int scalar: how many puts are awaited, 1 or more.
        peer: int32 scalar: the rank that puts, for the error; -1 if they are several.
        slice: int32 scalar: number of the awaited slice, from 0, for the error.
        group: The value of :func:`interlace.language.join`.

    Returns:
        True once they have arrived (bool scalar). False after the deadline, or once the group is
        broken: the program must not use the awaited data, and should end. Nothing is taken then.
    """
    shadow = _shadow(gin, signal)
    goal = tl.load(shadow, volatile=True) + tl.cast(puts, tl.int64)
    arrived = _await(gin, signal, goal, _SIGNAL, peer, slice, group)
    # Every thread has read the shadow before the first one writes it: _await ends in a barrier.
    if arrived:
        tl.store(shadow, goal)
    tl.debug_barrier()
    return arrived


@triton.jit
def gin_sent(gin, counter, puts, peer, slice, group):
    """Wait until puts with a counter have been sent: their sources may be written again.

    That they have arrived is not said.

    Args:
        gin: int64 scalar: ``Gin.address``.
        counter: int32 scalar: the number of the counter.
        puts: int scalar: all puts that this rank has made with the counter since the last
            ``gin_sent`` of it.
        peer: int32 scalar: the rank that they go to, for the error; -1 if they are several.
        slice: int32 scalar: number of the slice, from 0, for the error.
        group: The value of :func:`interlace.language.join`.

    Returns:
        True once they have been sent (bool scalar); False as :func:`gin_wait`.
    """
    sent = _await(gin, counter, tl.cast(puts, tl.int64), _COUNTER, peer, slice, group)
    if sent:
        reset_counter(tl.cast(gin, tl.int64), tl.cast(counter, tl.int32))
    tl.debug_barrier()
    return sent


@triton.jit
def _await(gin, index, goal, OF: tl.constexpr, peer, slice, group):
    """Wait until a signal or a counter has reached ``goal``; see :func:`gin_wait`."""
    if records(group):
        other = tl.where(tl.cast(peer, tl.int32) < 0, SEVERAL, peer)
        append(tl.zeros([], tl.int32), WAIT, other, slice, group)
    absent = tl.full([], 1, tl.int32)
    looks = 0
    start = tl.zeros([], tl.int64)
    expired = tl.zeros([], tl.int32)
    # NCCL's own waits would spin for ever: a device communicator of a program has no flag at which
    # they end.
    while absent > 0:
        # Each thread reads at its own time; the maximum gives all of them the same answer.
        absent = tl.max((_read(gin, index, OF, _RELAXED) < goal).to(tl.int32), 0)
        absent, looks, start, expired = after_look(absent, looks, start, expired, group)
    if expired > 0:
        # Signals have no epoch: with 0 for it, the error speaks of a slice of the network.
        no_epoch = tl.zeros([], tl.int32)
        report(group, peer, slice + 1, no_epoch, no_epoch, LATE)
    # An acquire empties the first-level cache, so looks are relaxed, and one acquire by every
    # thread follows. After the barrier any thread may load what any other thread has acquired.
    _read(gin, index, OF, _ACQUIRE)
    tl.debug_barrier()
    if records(group):
        append(tl.zeros([], tl.int32), UNPACKED, other, slice, group)
    return expired == 0


@triton.jit
def _read(gin, index, OF: tl.constexpr, ORDER: tl.constexpr):
    """Read a signal or a counter once by each thread (int64 tile of as many elements)."""
    lanes = tl.arange(0, num_threads())
    indices = tl.cast(index, tl.int32) + lanes * 0
    if OF == _SIGNAL:
        return read_signal(tl.cast(gin, tl.int64), indices, tl.cast(ORDER, tl.int32))
    else:
        return read_counter(tl.cast(gin, tl.int64), indices, tl.cast(ORDER, tl.int32))


@triton.jit
def _shadow(gin, signal):
    """Return a pointer to the number of puts that waits have taken from a signal (int64)."""
    address = shadow_address(tl.cast(gin, tl.int64), tl.cast(signal, tl.int32))
    return address.to(tl.pointer_type(tl.int64))


__all__ = ["gin_arrived", "gin_put", "gin_sent", "gin_wait"]
