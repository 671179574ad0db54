"""The kernel that prepares the memory in which a launch records its events."""

import triton
import triton.language as tl

from interlace.comm.runtime import context
from interlace.units import next_power_of_2

_LENGTH = tl.constexpr(context.LENGTH)
_RINGS_ADDRESS = tl.constexpr(context.RINGS_ADDRESS)
_RING_PROGRAMS = tl.constexpr(context.RING_PROGRAMS)
_FIELDS = tl.constexpr(next_power_of_2(context.RECORDING_LENGTH))
_RECORDING_LENGTH = tl.constexpr(context.RECORDING_LENGTH)
_LANES = tl.constexpr(context.RING_LANES)
_RING_BYTES = tl.constexpr(context.RING_BYTES)
RINGS = tl.constexpr(1024)  # that a program empties


@triton.jit(do_not_specialize=["rings", "programs"])
def prepare_recording(recorded, original, rings, programs):
    """Write the context of a launch that records its events, and empty the launch's rings.

    ``ceil(programs * RING_LANES / RINGS)`` programs. Peers take no part. Only the number of events
    in a ring is written, since no event beyond it is read.

    Args:
        recorded: int64 ``[RECORDING_LENGTH]``: the context to be written.
        original: int64 ``[LENGTH]``: the context of the operator.
        rings: Address of int64 ``[programs, RING_LANES, 1 + RING_EVENTS, 2]``.
        programs: Programs that there are rings for.
    """
    part = tl.program_id(0)
    ring = part * RINGS + tl.arange(0, RINGS)
    counts = (rings + ring.to(tl.int64) * _RING_BYTES).to(tl.pointer_type(tl.int64))
    tl.store(counts, tl.zeros([RINGS], tl.int64), mask=ring < programs * _LANES)
    if part == 0:
        field = tl.arange(0, _FIELDS)
        value = tl.load(original + field, mask=field < _LENGTH, other=0)
        value = tl.where(field == _RINGS_ADDRESS, rings, value)
        value = tl.where(field == _RING_PROGRAMS, programs, value)
        tl.store(recorded + field, value, mask=field < _RECORDING_LENGTH)
