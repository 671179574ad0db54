"""GPUs that commands take by name: those whose profiles are known, which need not be here."""

from __future__ import annotations

from typing import Any, cast

import torch

from interlace.costs.known_profiles import own_gpus, profile_of, profiled_gpus
from interlace.costs.time import Call
from interlace.errors import ArgumentError
from interlace.gemm.choice import Gpu, choose_on
from interlace.gemm.config import GemmConfig
from interlace.gemm.operator import GemmOperator
from interlace.tuning.choice import Choice

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


def choice_on(gpu: Gpu, declaration: GemmOperator, call: Call, dtype: torch.dtype) -> Choice[Any]:
    """Return what ``impl="auto"`` would run on a GPU, with the tiles of the operator's kernel."""
    tiled = declaration.config_type
    return choose_on(
        gpu,
        declaration.name,
        # The tiles of a kernel whose configuration has none are not asked for.
        cast(Any, tiled if issubclass(tiled, GemmConfig) else GemmConfig),
        rows=call.rows,
        columns=call.columns,
        inner=call.inner,
        dtype=dtype,
        world_size=call.world_size,
    )
