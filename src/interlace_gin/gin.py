"""GPU-initiated puts over the network (GIN), the host's side: windows, signals, communicators.

**Compiled, not run**: on GPUs this calls NCCL's device API, which no GPU at hand could run
(:mod:`interlace_gin.engine_nccl`). ``interlace doctor --network`` tries it. On the CPU backend,
messages of Gloo carry the puts (:mod:`interlace_gin.engine_cpu`), so kernels can be written and
tested there.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
import torch.distributed as dist

from interlace.comm.groups.group import Group, group_of
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import ArgumentError, GroupError, WorkspaceError

_MOST_SIGNALS, _MOST_BYTES = 65536, 2**40


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """Hold memory that GPU-initiated puts of every rank may read and write.

    Attributes:
        handle: Number of the window, for ``gin_put``; an address on a GPU.
        data: This rank's memory, uint8 ``[nbytes]``, zero at first. It lives as long as any view.
    """

    handle: int
    data: torch.Tensor

    @property
    def address(self) -> int:
        """Return the address of ``data``, for ``il.pointer``.

        Kernels must not take the tensor: Triton's interpreter would copy it back after the kernel,
        over what has arrived meanwhile.
        """
        return self.data.data_ptr()


class Engine(Protocol):
    """Describe what carries the puts of one :class:`Gin`."""

    address: int
    options: dict[str, Any]
    carrier: str

    def window(self, nbytes: int) -> Window:
        """Create and register zeroed memory. Collective."""

    def close(self) -> None:
        """End all puts, whatever the peers do, and free everything but windows in use."""


class Gin:
    """Put from kernels into windows of any rank of a group; :func:`open_gin` makes one.

    Puts work from the construction until :meth:`close`, the group's recovery, or the end of the
    object. ``interlace.recover`` closes it: open a new one afterwards.

    Attributes:
        group: The group whose ranks are reached.
        signals: Number of signals of each rank.
        counters: Number of counters of each rank.
        address: The argument ``gin`` of kernels.
        options: Options with which such kernels are launched: ``kernel[grid](..., **options)``.
        carrier: What carries the puts, in words.
    """

    def __init__(self, group: Group, engine: Engine, signals: int, counters: int) -> None:
        """Use ``engine``, which has been opened on every rank."""
        self.group, self.signals, self.counters = group, signals, counters
        self._engine: Engine | None = engine
        self.address, self.options, self.carrier = engine.address, engine.options, engine.carrier
        # Peers' puts of before may still arrive, so nothing but a new communicator is as new.
        group.cache.recoverable.add(self)

    @makes_ordinary_tensors
    def window(self, nbytes: int) -> Window:
        """Return memory that puts of every rank may read and write. Collective.

        Args:
            nbytes: Its size, above 0; equal on all ranks.

        Raises:
            ArgumentError: The size is not above 0.
            RankMismatchError: Sizes differ between ranks.
            GroupError: This object is closed.
            WorkspaceError: A CUDA graph is being captured, or there is not enough memory.
            BackendError: NCCL refuses; raised on every rank.
        """
        _require("window", "nbytes", nbytes, range(1, _MOST_BYTES + 1))
        if self._engine is None:
            raise GroupError(
                "gin must be open for a new window; it was closed. Call open_gin again."
            )
        _refuse_capture(self.group)
        self.group.agreement.compare("gin window", {"bytes": nbytes})
        with self.group.on_device(), self.group.agreement.together("registering a window"):
            return self._engine.window(nbytes)

    def close(self) -> None:
        """End all puts of this rank, with no kernel running that puts; further calls do nothing."""
        if self._engine is not None:
            self.group.streams.synchronize()
            engine, self._engine = self._engine, None
            engine.close()

    def reset(self) -> None:
        """Close, since the group recovers: signals of before would count for calls after it."""
        self.close()


def open_gin(signals: int, counters: int = 0, group: dist.ProcessGroup | None = None) -> Gin:
    """Open GPU-initiated puts between all ranks of a group. Collective; takes seconds on GPUs.

    **Compiled, not run**: no GPU-initiated put of this project has run on a GPU yet.

    On GPUs, NCCL's wheel 2.30.7 to 2.32 must be installed (``INTERLACE_NCCL`` names another
    folder), and NCCL must find a back end of GIN: a network card that it can drive from the GPU, or
    through a thread of the host. The communicator is one of its own.

    Args:
        signals: Number of signals of each rank, 1 or more.
        counters: Number of counters of each rank, for ``gin_sent``.
        group: Process group. Default: the default process group.

    Raises:
        ArgumentError: A number is out of range.
        RankMismatchError: Numbers, or versions of NCCL, differ between ranks.
        WorkspaceError: A CUDA graph is being captured.
        BackendError: NCCL is missing or too old, has no back end, or cannot connect in half of the
            group's deadline; raised on every rank.
    """
    _require("open_gin", "signals", signals, range(1, _MOST_SIGNALS + 1))
    _require("open_gin", "counters", counters, range(_MOST_SIGNALS + 1))
    owner = group_of(group)
    _refuse_capture(owner)
    owner.agreement.compare("open_gin", {"signals": signals, "counters": counters})
    if owner.backend == "cpu":
        from interlace_gin.engine_cpu import EmulatedEngine as Chosen
    else:
        from interlace_gin.engine_nccl import NcclEngine as Chosen  # type: ignore[assignment]
    return Gin(owner, Chosen(owner, signals, counters), signals, counters)


def _require(caller: str, name: str, number: object, allowed: range) -> None:
    """Refuse a number that is not an integer within ``allowed``."""
    if type(number) is not int or number not in allowed:
        raise ArgumentError(
            f"{caller}: {name} must be {allowed[0]} to {allowed[-1]}; got {number!r}."
        )


def _refuse_capture(group: Group) -> None:
    """Raise WorkspaceError if the GPU's current stream is being captured."""
    if group.streams.capturing():
        raise WorkspaceError(
            "gin and its windows must be opened before a CUDA graph is captured. Do it first, "
            "then capture."
        )


__all__ = ["Engine", "Gin", "Window", "open_gin"]
