"""GPUs that commands take by name: those whose profiles are known, which need not be here."""

from __future__ import annotations

from interlace.costs.known_profiles import own_gpus, profile_of, profiled_gpus
from interlace.errors import ArgumentError
from interlace.gemm.choice import Gpu

_SHARED_BYTES = 227 << 10
"""Shared memory of a program on the GPUs whose profiles are known."""


def gpu_named(text: str) -> Gpu:
    """Return the one profiled GPU whose name contains a text, such as ``"h200"``.

    Raises:
        ArgumentError: There is none, or several.
    """
    known = sorted({*profiled_gpus(), *own_gpus()})
    matching = [name for name in known if text.lower() in name.lower()]
    if len(matching) != 1:
        raise ArgumentError(
            f"--gpu must name one GPU whose profile is known: {', '.join(known)}; got {text!r}. "
            "`interlace tune machine` on a GPU measures its profile; until then impl='auto' goes "
            "by the H200's."
        )
    return Gpu(matching[0], profile_of(matching[0]).processors, _SHARED_BYTES)
