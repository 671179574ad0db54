"""Carry GPU-initiated puts by NCCL's device API. **Compiled, not run.**

A communicator of NCCL of its own, which does not block, is made with an id that travels through the
group's store; torch's communicators are left alone, as torch may have loaded another version. All
that can hang has a deadline on the host, and waits of kernels have the group's.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import time
from typing import Any

import torch

from interlace.comm.groups.group import Group
from interlace.comm.replay.memory import call_when_gone
from interlace.comm.runtime.dlpack import tensor_at
from interlace.comm.runtime.ordinary import makes_ordinary_tensors
from interlace.errors import BackendError, WorkspaceError
from interlace.units import format_bytes, round_up
from interlace_gin import nccl
from interlace_gin.gin import Window

_abandoned: list[Any] = []  # what calls of NCCL that did not complete may still use, for ever


class NcclEngine:
    """Hold a communicator of NCCL, its device communicator, and registered windows.

    Attributes:
        address: Address of the device communicator in this GPU's memory.
        options: Triton's option that links our LLVM IR and NCCL's device code.
        carrier: NCCL's version and back end.
    """

    def __init__(self, group: Group, signals: int, counters: int) -> None:
        """Connect all ranks. Collective.

        Raises:
            BackendError: A rank cannot connect; raised on every rank.
            RankMismatchError: Versions of NCCL differ.
        """
        self._group = group
        with group.agreement.together("loading NCCL"):
            self._nccl = nccl.nccl()
        group.agreement.compare("open_gin", {"NCCL": nccl.in_words(self._nccl.version)})
        with group.agreement.together("beginning a communicator"):
            identifier = nccl.UniqueId()
            if group.rank == 0:
                self._nccl.call("ncclGetUniqueId", ctypes.byref(identifier))
        told = group.exchange("gin's communicator", bytes(identifier).hex())
        identifier = nccl.UniqueId.from_buffer_copy(bytes.fromhex(told[0]))
        with group.on_device(), group.agreement.together("connecting gin"):
            self._communicator = _Communicator(self._nccl, group, identifier)
            call_when_gone(self, group.device, self._communicator.close)
            try:
                self._device_communicator = self._create(signals, counters)
            except BackendError:
                self._communicator.close()
                raise
        self.address = self._device_communicator.data_ptr()
        version, back_end = nccl.in_words(self._nccl.version), self._communicator.back_end
        self.carrier = f"NCCL {version}, {back_end}"
        text = importlib.resources.files("interlace_gin") / "gin.ll"
        # In this order: the second resolves what the first refers to. Pairs, as Launch needs
        # options that can be a key.
        libraries = (("interlace_gin", str(text)), ("nccl", str(self._nccl.device_code)))
        self.options: dict[str, Any] = {"extern_libs": libraries}

    @makes_ordinary_tensors
    def _create(self, signals: int, counters: int) -> torch.Tensor:
        """Return a device communicator in this GPU's memory, as bytes that NCCL alone reads."""
        content = bytearray(self._communicator.connect(signals, counters))
        return torch.frombuffer(content, dtype=torch.uint8).to(self._group.device)

    def window(self, nbytes: int) -> Window:
        """Allocate memory that a network card may reach, and register it. Collective."""
        memory = _NcclMemory(self._nccl, self._group.device, round_up(nbytes, nccl.ALIGNMENT_BYTES))
        data = tensor_at(memory.address, (memory.nbytes,), torch.uint8, self._group.device, memory)
        data.zero_()
        # No peer puts before the exchange that follows, so zeros never replace what arrives.
        torch.cuda.synchronize(self._group.device)
        return Window(self._communicator.register(memory), data[:nbytes])

    def close(self) -> None:
        """Free the communicator and all that belongs to it, but not the windows' memory."""
        self._communicator.close()


class _Communicator:
    """Own a communicator of NCCL whose calls do not block, until it is closed.

    Attributes:
        back_end: Name of NCCL's back end of GIN, once it is connected.
    """

    def __init__(self, library: nccl.Nccl, group: Group, identifier: nccl.UniqueId) -> None:
        """Connect all ranks. Collective.

        Raises:
            BackendError: It fails, or a rank is late.
        """
        self._nccl, self._handle, self.back_end = library, ctypes.c_void_p(), ""
        # A rank on which a call has failed waits for the others in an exchange, whose deadline is
        # the group's.
        self._patience_s = group.deadline_s / 2
        self._device_communicator: Any = None
        self._windows: list[tuple[ctypes.c_void_p, _NcclMemory]] = []
        self._is_stuck = False
        settings = nccl.config()
        try:
            begun = ctypes.byref(self._handle)
            self._perform(
                "ncclCommInitRankConfig", begun, group.world_size, identifier, group.rank,
                ctypes.byref(settings),
            )  # fmt: skip
        except BackendError:
            self.close()
            raise

    def connect(self, signals: int, counters: int) -> bytes:
        """Create the device communicator and return its content. Collective.

        Raises:
            BackendError: NCCL finds no back end of GIN that connects all ranks, or cannot connect.
        """
        found = nccl.properties()
        self._nccl.call("ncclCommQueryProperties", self._handle, ctypes.byref(found))
        if not found.deviceApiSupport or found.ginType == nccl.NO_GIN:
            lacks = "back end of GIN" if found.deviceApiSupport else "device API"
            raise BackendError(
                f"gin must have NCCL's device API and a back end of GIN; NCCL "
                f"{nccl.in_words(self._nccl.version)} finds no {lacks} that connects all ranks. It "
                "wants an InfiniBand or RoCE card with GPUDirect RDMA. NCCL_DEBUG=INFO says why."
            )
        self.back_end = nccl.GIN_TYPES.get(found.ginType, f"back end {found.ginType}")
        needs = nccl.requirements(self._nccl.version, signals, counters)
        memory = ctypes.create_string_buffer(nccl.DEVICE_COMMUNICATOR_BYTES)
        self._perform("ncclDevCommCreate", self._handle, ctypes.byref(needs), memory)
        self._device_communicator = memory
        return memory.raw

    def register(self, memory: _NcclMemory) -> int:
        """Register memory of this rank as part of a window and return its handle. Collective.

        Raises:
            BackendError: NCCL cannot register it.
        """
        handle = ctypes.c_void_p()
        # Kept before NCCL knows of it, in case that the call does not complete.
        self._windows.append((handle, memory))
        self._perform(
            "ncclCommWindowRegister", self._handle, memory.address, memory.nbytes,
            ctypes.byref(handle), nccl.SYMMETRIC_WINDOW,
        )  # fmt: skip
        if not handle.value:
            raise BackendError(
                "gin must have windows; NCCL registers none on this machine. It needs "
                "NCCL_CUMEM_ENABLE=1, its default."
            )
        return handle.value

    def _perform(self, function: str, *arguments: Any) -> None:
        """Call a collective function and wait until it is complete, on this rank."""
        try:
            self._nccl.call(function, *arguments)
            self._nccl.finish(self._handle, function, time.monotonic() + self._patience_s)
        except BackendError:
            # A thread of NCCL may still write to what it was given, or register it.
            _abandoned.append((arguments, self._windows))
            self._is_stuck = True
            raise

    def close(self) -> None:
        """Free everything, once, whatever the peers do."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if not handle.value:
            return
        try:
            if not self._is_stuck:
                self._unregister(handle)
        finally:
            self._nccl.call("ncclCommAbort", handle)

    def _unregister(self, handle: ctypes.c_void_p) -> None:
        """Destroy the device communicator and all windows.

        These calls end before they return, and ask no peer. An abort does not block on such a
        communicator, and nobody learns when it is over: memory must not be registered by then.
        """
        if self._device_communicator is not None:
            self._nccl.call("ncclDevCommDestroy", handle, self._device_communicator)
        while self._windows:
            window, memory = self._windows.pop()
            if window.value:
                self._nccl.call("ncclCommWindowDeregister", handle, window)
            del memory


class _NcclMemory:
    """Own memory of ``ncclMemAlloc`` until the last tensor over it is gone.

    Attributes:
        address: Its address.
        nbytes: Its size.
    """

    def __init__(self, library: nccl.Nccl, device: torch.device, nbytes: int) -> None:
        address = ctypes.c_void_p()
        try:
            library.call("ncclMemAlloc", ctypes.byref(address), nbytes)
        except BackendError as error:
            raise WorkspaceError(
                f"a window of {format_bytes(nbytes)} must fit in the GPU's memory; got: {error}"
            ) from error
        assert address.value is not None
        self.address, self.nbytes = number, _ = address.value, nbytes
        call_when_gone(self, device, lambda: library.call("ncclMemFree", number))
