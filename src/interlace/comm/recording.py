"""Memory for the events that kernels record, and the launches that record them.

A recording gives each launch of its group a context that asks for events, with rings of its own, so
that kernels that run side by side do not mix theirs. ``interlace.tracing`` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from interlace.comm import context as ctx
from interlace.comm.ordinary import makes_ordinary_tensors
from interlace.units import MIB

if TYPE_CHECKING:
    from interlace.comm.health import Health

MAX_BYTES = 512 * MIB
"""Most bytes of rings of one recording; launches beyond them record nothing."""

_PROGRAMS_OF_OTHERS = 128  # rings of a kernel whose number of programs is unknown
_ARENA_BYTES = 64 * MIB
_ORIGINAL, _RINGS = "interlace_original", "interlace_rings"  # attributes of a tensor
_PROGRAM_BYTES = ctx.RING_LANES * ctx.RING_BYTES


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

    @makes_ordinary_tensors
    def __init__(self, health: Health, device: torch.device) -> None:
        """Prepare to record.

        Args:
            health: The part of the group that makes its contexts.
            device: The group's device.
        """
        self._health = health
        # Zeroed before the launches, each of which would otherwise follow a kernel that does so.
        self._arenas = [_zeros(_ARENA_BYTES // 8, device)]
        self._used = 0  # numbers of the last arena
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
        if general is not None and self._is_last(general.rings):
            self._used -= general.rings.numel()
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
        rings = self._rings(programs, context.device)
        if rings is None:
            self.unrecorded += 1
            return context
        # From pinned memory, so that the host does not wait for the kernels before it.
        on_gpu = context.device.type == "cuda"
        more = torch.tensor([rings.data_ptr(), programs], dtype=torch.int64, pin_memory=on_gpu).to(
            context.device, non_blocking=True
        )
        recorded = torch.cat([context, more]).view(torch.uint64)
        setattr(recorded, _ORIGINAL, context)
        setattr(recorded, _RINGS, rings)
        self._launches[recorded] = RecordedLaunch(name, rings)
        return recorded

    def _rings(self, programs: int, device: torch.device) -> torch.Tensor | None:
        """Return zeroed rings; None if the recording has no memory left."""
        count = programs * _PROGRAM_BYTES // 8
        if self._used + count > self._arenas[-1].numel():
            nbytes = max(_ARENA_BYTES, 8 * count)
            if nbytes + sum(arena.nbytes for arena in self._arenas) > MAX_BYTES:
                return None
            self._arenas.append(_zeros(nbytes // 8, device))
            self._used = 0
        rings = self._arenas[-1][self._used : self._used + count]
        self._used += count
        return rings.view(programs, ctx.RING_LANES, 1 + ctx.RING_EVENTS, 2)

    def _is_last(self, rings: torch.Tensor) -> bool:
        """Return whether rings are the ones that were made last."""
        end = self._arenas[-1].data_ptr() + 8 * self._used
        return rings.data_ptr() + rings.nbytes == end


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    """Return int64 zeros; on the CPU, pages that nobody writes are never touched."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(count, np.int64))
    return torch.zeros(count, dtype=torch.int64, device=device)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_active: list[Recording] = []


def active() -> Recording | None:
    """Return the recording of this process, or None."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def recording(health: Health, device: torch.device) -> Iterator[Recording]:
    """Record what the kernels of a group do on its device within the context."""
    made = Recording(health, device)
    _active.append(made)
    try:
        yield made
    finally:
        _active.remove(made)
