"""Call NCCL's library and find its device code, both from one installed wheel, by ctypes.

Only GPU-initiated puts (:mod:`interlace_gin.engine_nccl`) need this: everything else goes through
torch.
Library and device code must be of one version, as one writes structures that the other reads.
Structures here are those of NCCL 2.30.7; ``tests/gin/test_nccl.py`` compares each field, constant
and function with the headers of a wheel.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import time
from pathlib import Path
from typing import Any, NoReturn

from interlace.errors import BackendError

FOLDER_VARIABLE = "INTERLACE_NCCL"
"""Folder with NCCL's ``lib``, instead of the installed wheel's ``site-packages/nvidia/nccl``."""

OLDEST, NEWEST = 23007, 23299
"""Versions whose structures are known, as NCCL numbers them: from 2.30.7 to 2.32."""

MAGIC = 0xCAFEBEEF
UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT
UNIQUE_ID_BYTES = 128
SYMMETRIC_WINDOW = 1  # NCCL_WIN_COLL_SYMMETRIC
ALIGNMENT_BYTES = 4096  # NCCL_WIN_REQUIRED_ALIGNMENT
NO_GIN = 0  # NCCL_GIN_TYPE_NONE
FULL_CONNECTION = 1  # NCCL_GIN_CONNECTION_FULL
SUCCESS, IN_PROGRESS = 0, 7  # ncclSuccess, ncclInProgress
GIN_TYPES = {2: "proxy through the host", 3: "GDAKI", 4: "GPI", 5: "EFA GDA"}
"""Back ends of GIN by ``ncclGinType_t``: PROXY, GDAKI, GPI and EFA_GDA."""

DEVICE_COMMUNICATOR_BYTES = 4096
"""Room for ``ncclDevComm``, which only NCCL reads: 240 bytes in 2.30.7."""

_INSTALL = (
    "Install it with `pip install --no-deps 'nvidia-nccl-cu13>=2.30.7,<2.33'` (nvidia-nccl-cu12 "
    f"for CUDA 12), or set {FOLDER_VARIABLE} to the folder that has its lib and include."
)
_POLL_INTERVAL_S = 0.002


class UniqueId(ctypes.Structure):
    """Mirror ``ncclUniqueId``."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """Mirror ``ncclConfig_t`` of 2.30; libraries after it fill in what came later."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
        ("commName", ctypes.c_char_p),
        ("collnetEnable", ctypes.c_int),
        ("CTAPolicy", ctypes.c_int),
        ("shrinkShare", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int),
        ("nChannelsPerNetPeer", ctypes.c_int),
        ("nvlinkCentricSched", ctypes.c_int),
        ("graphUsageMode", ctypes.c_int),
        ("numRmaCtx", ctypes.c_int),
        ("maxP2pPeers", ctypes.c_int),
        ("graphStreamOrdering", ctypes.c_int),
    )


class Requirements(ctypes.Structure):
    """Mirror ``ncclDevCommRequirements`` of 2.30.7; ``size`` says that nothing follows."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("resourceRequirementsList", ctypes.c_void_p),
        ("teamRequirementsList", ctypes.c_void_p),
        ("lsaMultimem", ctypes.c_bool),
        ("barrierCount", ctypes.c_int),
        ("lsaBarrierCount", ctypes.c_int),
        ("railGinBarrierCount", ctypes.c_int),
        ("lsaLLA2ABlockCount", ctypes.c_int),
        ("lsaLLA2ASlotCount", ctypes.c_int),
        ("ginForceEnable", ctypes.c_bool),
        ("ginContextCount", ctypes.c_int),
        ("ginSignalCount", ctypes.c_int),
        ("ginCounterCount", ctypes.c_int),
        ("ginConnectionType", ctypes.c_int),
        ("ginExclusiveContexts", ctypes.c_bool),
        ("ginQueueDepth", ctypes.c_int),
        ("ginTrafficClass", ctypes.c_int),
        ("worldGinBarrierCount", ctypes.c_int),
        ("ginStrongSignalsRequired", ctypes.c_bool),
        ("ginVaSignalsRequired", ctypes.c_bool),
    )


class Properties(ctypes.Structure):
    """Mirror ``ncclCommProperties`` of 2.30.7."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("rank", ctypes.c_int),
        ("nRanks", ctypes.c_int),
        ("cudaDev", ctypes.c_int),
        ("nvmlDev", ctypes.c_int),
        ("deviceApiSupport", ctypes.c_bool),
        ("multimemSupport", ctypes.c_bool),
        ("ginType", ctypes.c_int),
        ("nLsaTeams", ctypes.c_int),
        ("hostRmaSupport", ctypes.c_bool),
        ("railedGinType", ctypes.c_int),
    )


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t

# Functions and their parameters; each returns ncclResult_t.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRankConfig": (
        *(ctypes.POINTER(_POINTER), ctypes.c_int, UniqueId, ctypes.c_int),
        ctypes.POINTER(Config),
    ),
    "ncclCommGetAsyncError": (_POINTER, ctypes.POINTER(ctypes.c_int)),
    "ncclCommQueryProperties": (_POINTER, ctypes.POINTER(Properties)),
    "ncclDevCommCreate": (_POINTER, ctypes.POINTER(Requirements), _POINTER),
    "ncclDevCommDestroy": (_POINTER, _POINTER),
    "ncclMemAlloc": (ctypes.POINTER(_POINTER), _SIZE),
    "ncclMemFree": (_POINTER,),
    "ncclCommWindowRegister": (
        *(_POINTER, _POINTER, _SIZE, ctypes.POINTER(_POINTER), ctypes.c_int),
    ),
    "ncclCommWindowDeregister": (_POINTER, _POINTER),
    "ncclCommAbort": (_POINTER,),
}


@dataclasses.dataclass(frozen=True)
class Nccl:
    """Hold NCCL's library, its version, and its device code.

    Attributes:
        library: The loaded library.
        version: Its version as NCCL numbers it: 23007 is 2.30.7.
        device_code: ``libnccl_device.bc``, LLVM bitcode.
    """

    library: Any
    version: int
    device_code: Path

    def call(self, function: str, *arguments: Any) -> int:
        """Call a function that returns ``ncclResult_t``; return that: success or in progress.

        Raises:
            BackendError: The function failed.
        """
        result = int(getattr(self.library, function)(*arguments))
        if result not in (SUCCESS, IN_PROGRESS):
            self._fail(function, result)
        return result

    def finish(self, communicator: Any, step: str, end: float) -> None:
        """Wait until the last call on a communicator that does not block is complete.

        Args:
            communicator: The communicator.
            step: Name of the call, for errors.
            end: Time at which it must be complete, of ``time.monotonic``.

        Raises:
            BackendError: It failed, or is not complete by then.
        """
        state = ctypes.c_int(IN_PROGRESS)
        while True:
            self.call("ncclCommGetAsyncError", communicator, ctypes.byref(state))
            if state.value == SUCCESS:
                return
            if state.value != IN_PROGRESS:
                self._fail(step, state.value)
            if time.monotonic() > end:
                raise BackendError(
                    f"{step} must be complete on all ranks in half of the group's deadline; it is "
                    "not. A rank is late, or the network does not connect the machines: "
                    "NCCL_DEBUG=INFO says more."
                )
            time.sleep(_POLL_INTERVAL_S)

    def _fail(self, function: str, result: int) -> NoReturn:
        """Raise BackendError with NCCL's words for a result, and for its last error."""
        words = self.library.ncclGetErrorString(result).decode(errors="replace")
        last = (self.library.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        raise BackendError(
            f"{function} must succeed; got {f'{words} ({last})' if last else words}. Run with "
            "NCCL_DEBUG=INFO to see why."
        )


def folder() -> Path:
    """Return the folder of NCCL's wheel, which has ``lib`` and ``include``.

    Raises:
        BackendError: There is none, or it has no device code.
    """
    text = os.environ.get(FOLDER_VARIABLE, "")
    places = [Path(text)] if text else _installed()
    if not places:
        raise BackendError(f"gin must have NCCL's wheel; it is not installed. {_INSTALL}")
    for place in places:
        if (place / "lib" / "libnccl_device.bc").is_file():
            return place
    raise BackendError(
        f"gin must have NCCL 2.30.7 or later, with its device code; got {places[0]}, which has no "
        f"lib/libnccl_device.bc. {_INSTALL}"
    )


def _installed() -> list[Path]:
    """Return the folders of the package ``nvidia.nccl``, which has no ``__init__``."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    return (
        [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    )


@functools.cache
def nccl() -> Nccl:
    """Return NCCL, loaded from the installed wheel or from ``INTERLACE_NCCL``.

    Raises:
        BackendError: It is absent, cannot be loaded, or has a version that is not known here.
    """
    place = folder()
    path = place / "lib" / "libnccl.so.2"
    # torch may have loaded another version. NCCL's functions call one another by names, which would
    # lead from one version into the other: RTLD_DEEPBIND makes a library look in itself first.
    mode = os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND
    try:
        library = ctypes.CDLL(str(path), mode=mode)
    except OSError as error:
        raise BackendError(f"gin must load {path}; got: {error}. {_INSTALL}") from error
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    if not OLDEST <= version.value <= NEWEST:
        raise BackendError(
            f"gin must have NCCL 2.30.7 to 2.32; got {in_words(version.value)} at {place}. "
            f"{_INSTALL}"
        )
    for name, types in FUNCTIONS.items():
        getattr(library, name).argtypes = types
    for name in ("ncclGetErrorString", "ncclGetLastError"):
        getattr(library, name).restype = ctypes.c_char_p
    return Nccl(library, version.value, place / "lib" / "libnccl_device.bc")


def in_words(version: int) -> str:
    """Return a version of NCCL as people write it: 23007 is 2.30.7."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def config() -> Config:
    """Return the configuration of a communicator whose calls do not block."""
    undefined = {
        name: UNDEFINED for name, kind in Config._fields_[3:] if kind is ctypes.c_int
    }  # fmt: skip
    return Config(
        **{**undefined, "blocking": 0}, size=ctypes.sizeof(Config), magic=MAGIC, version=OLDEST
    )


def requirements(version: int, signals: int, counters: int) -> Requirements:
    """Return what a device communicator must have: one context that connects all ranks.

    Args:
        version: Version of the library. It fills a device communicator for this version's device
            code.
        signals: Number of signals.
        counters: Number of counters.
    """
    # Weak signals, each for the put that it comes with, are all that gin_put uses.
    return Requirements(
        size=ctypes.sizeof(Requirements), magic=MAGIC, version=version,
        ginContextCount=1, ginSignalCount=signals, ginCounterCount=counters,
        ginConnectionType=FULL_CONNECTION, ginTrafficClass=UNDEFINED,
        ginStrongSignalsRequired=False, ginVaSignalsRequired=False,
    )  # fmt: skip


def properties() -> Properties:
    """Return a structure for ``ncclCommQueryProperties``."""
    return Properties(size=ctypes.sizeof(Properties), magic=MAGIC, version=OLDEST)


__all__ = [
    "Nccl",
    "config",
    "folder",
    "in_words",
    "nccl",
    "properties",
    "requirements",
]
