"""GPUs that commands take by name: those whose profiles are shipped, which need not be here."""

from __future__ import annotations

from interlace.costs.known_profiles import profile_of, profiled_gpus
from interlace.errors import ArgumentError
from interlace.gemm.choice import Gpu

_SHARED_BYTES = 227 << 10
"""Shared memory of a program on the GPUs whose profiles are shipped."""


def gpu_named(text: str) -> Gpu:
    """Return the one profiled GPU whose name contains a text, such as ``"h200"``.

    Raises:
        ArgumentError: There is none, or several.
    """
    known = profiled_gpus()
    found = [name for name in known if text.lower() in name.lower()]
    if len(found) != 1:
        raise ArgumentError(f"--gpu must name one of {', '.join(known)}; got {text!r}.")
    return Gpu(found[0], profile_of(found[0]).processors, _SHARED_BYTES)
