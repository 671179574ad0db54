"""Memory for the events that kernels record, and the launches that record them.

A recording gives each launch of its group a context that asks for events, with rings of its own, so
that kernels that run side by side do not mix theirs. ``interlace.tracing`` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm.runtime import context as ctx
from interlace.comm.runtime.conditions import Condition, returns
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.units import MIB, ceil_div

if TYPE_CHECKING:
    from interlace.comm.host.health import Health

MAX_BYTES = 512 * MIB
"""Most bytes of rings of one recording; launches beyond them record nothing."""

_PROGRAMS_OF_OTHERS = 128  # rings of a kernel whose number of programs is unknown
_ORIGINAL, _RINGS = "interlace_original", "interlace_rings"  # attributes of a tensor


@dataclasses.dataclass(frozen=True)
class RecordedLaunch:
    """A launch that has recorded its events.

    Attributes:
        name: Name of the kernel, or of the operator where the kernel is not known.
        rings: int64 ``[programs, RING_LANES, 1 + RING_EVENTS, 2]`` in the device's memory.
    """

    name: str
    rings: torch.Tensor


class Recording:
    """Record the events of every kernel that reaches peers of one group.

    Attributes:
        unrecorded: Number of launches for which there was no memory.
    """

    def __init__(self, health: Health) -> None:
        """Prepare to record; ``health`` is the part of the group that makes its contexts."""
        self._health = health
        self._used = 0  # bytes of rings
        self._launches: dict[torch.Tensor, RecordedLaunch] = {}  # by context
        self.unrecorded = 0

    @property
    def launches(self) -> list[RecordedLaunch]:
        """The launches so far, in the order in which they were enqueued."""
        return list(self._launches.values())

    def arguments(
        self, kernel: Any, programs: int, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return a launch's arguments with a context of its own, if the kernel takes one."""
        context = arguments.get("ctx")
        if context is None:
            return arguments
        # The operator was given a context for a kernel of any size, which can go.
        general = self._launches.pop(context, None)
        if general is not None:
            self._used -= general.rings.nbytes
        context = getattr(context, _ORIGINAL, context)
        name = getattr(kernel, "__name__", str(kernel))
        return {**arguments, "ctx": self.context(context, name, programs)}

    @makes_ordinary_tensors
    def context(
        self, context: torch.Tensor, name: str, programs: int = _PROGRAMS_OF_OTHERS
    ) -> torch.Tensor:
        """Return a context by which one launch records its events; or the context as it is.

        The launch records nothing if the context is another group's, if the launch is captured in a
        CUDA graph, which may run after the recording, and if there is no memory left.

        Args:
            context: The context of an operator, int64 ``[context.LENGTH]``.
            name: Name of the kernel.
            programs: Number of programs; those of higher index share rings with others.

        Returns:
            uint64 ``[context.RECORDING_LENGTH]``, which keeps its rings alive: a launch that was
            prepared within a recording may be made after it.
        """
        if not self._health.has_made(context) or _is_capturing(context.device):
            return context
        nbytes = programs * ctx.RING_LANES * ctx.RING_BYTES
        if self._used + nbytes > MAX_BYTES:
            self.unrecorded += 1
            return context
        self._used += nbytes
        shape = (programs, ctx.RING_LANES, 1 + ctx.RING_EVENTS, 2)
        rings = torch.empty(shape, dtype=torch.int64, device=context.device)
        fields = torch.empty(ctx.RECORDING_LENGTH, dtype=torch.int64, device=context.device)
        _prepare(fields, context, rings)
        recorded = fields.view(torch.uint64)
        setattr(recorded, _ORIGINAL, context)
        setattr(recorded, _RINGS, rings)
        self._launches[recorded] = RecordedLaunch(name, rings)
        return recorded


def _prepare(fields: torch.Tensor, context: torch.Tensor, rings: torch.Tensor) -> None:
    """Enqueue the one kernel that a launch needs before it, so that a trace can leave it out."""
    from interlace.comm.replay.recording_kernel import RINGS, prepare_recording  # imports Triton

    count = rings.shape[0] * ctx.RING_LANES
    grid = (ceil_div(count, RINGS.value),)
    prepare_recording[grid](fields, context, rings.data_ptr(), rings.shape[0])


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_active: list[Recording] = []


def active() -> Recording | None:
    """Return the recording of this process, or None."""
    return _active[-1] if _active else None


def condition() -> Condition:
    """Return the condition that nothing is recorded, where nothing is."""
    return returns(_active.__len__)


@contextlib.contextmanager
def recording(health: Health) -> Iterator[Recording]:
    """Record what the kernels of a group do within the context."""
    made = Recording(health)
    _active.append(made)
    try:
        yield made
    finally:
        _active.remove(made)
