"""The backend that a command runs on, and GPUs that commands take by name, which need not be here:
those that were measured, and those whose data sheets are known.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch

from interlace.costs.datasheets import DATASHEETS, least_us
from interlace.costs.known_profiles import most_measured_ranks, own_gpus, profile_of, profiled_gpus
from interlace.costs.time import SizedCall
from interlace.errors import ArgumentError, BackendError, did_you_mean
from interlace.gemm.choice import choose_on
from interlace.gemm.config import GemmConfig
from interlace.gemm.operator import GemmOperator, product_operator
from interlace.tuning.choice import Choice
from interlace.tuning.gpu import Gpu

SUM, NORMED = "gemm_all_reduce", "gemm_all_reduce_norm"
_NORM_GPU = "NVIDIA H200"
"""The GPU whose times of a norm stand for those of GPUs that were not measured."""

_SHARED_BYTES = 227 << 10
"""Shared memory of a program on GPUs whose data sheets are not known."""


def choose_backend(command: str, backend: str) -> str:
    """Return ``"cpu"`` or ``"cuda"``: for ``"auto"``, the latter where there are GPUs.

    Raises:
        ArgumentError: There is no such backend.
        BackendError: There are no GPUs for ``"cuda"``.
    """
    gpus = torch.cuda.device_count()
    if backend not in ("auto", "cpu", "cuda"):
        raise ArgumentError(f"--backend must be auto, cpu or cuda; got {backend!r}.")
    if backend == "cuda" and not gpus:
        raise BackendError(
            f"interlace {command} --backend cuda must have CUDA GPUs; got none. `interlace doctor` "
            "says what is missing."
        )
    return ("cuda" if gpus else "cpu") if backend == "auto" else backend


def gpu_named(text: str) -> Gpu:
    """Return the one GPU whose name contains a text, such as ``"h200"``, whatever its case; if
    several do, the one that was measured.

    Raises:
        ArgumentError: There is none, or several.
    """
    measured = {*profiled_gpus(), *own_gpus()}
    known = sorted({*measured, *DATASHEETS})
    matching = [name for name in known if text.lower() in name.lower()]
    # "NVIDIA L4" is part of another name, and "h200" of one that was not measured.
    for better in ({text}, measured):
        among = [name for name in matching if name in better]
        matching = among if len(among) == 1 else matching
    if len(matching) != 1:
        if matching:
            hint = ", which is a part of each of these names. Give more of the one that you mean."
        else:
            hint = (
                f".{did_you_mean(text, known)} `interlace tune machine` on another GPU measures "
                "its profile; until then impl='auto' guesses."
            )
        raise ArgumentError(
            f"--gpu must name one of {', '.join(matching or known)}; got {text!r}{hint}"
        )
    (name,) = matching
    datasheet = DATASHEETS.get(name)
    shared_bytes = _SHARED_BYTES if datasheet is None else datasheet.shared_bytes
    return Gpu(name, profile_of(name).processors, shared_bytes)


def choice_on(
    gpu: Gpu, declaration: GemmOperator, call: SizedCall, dtype: torch.dtype
) -> Choice[Any]:
    """Return what ``impl="auto"`` would run on a GPU, as a call there finds it."""
    return declaration.choose(device=gpu, **_sizes(call, dtype))


def times_on(
    gpu: Gpu, declaration: GemmOperator, call: SizedCall, dtype: torch.dtype
) -> dict[str, float]:
    """Return the microseconds of an operator's implementations on a GPU, in the order in which
    ``impl="auto"`` takes them: predicted ones, and what a tuned table has for the very sizes. None
    is less than the GPU's data sheet allows.
    """
    times_us, profile = _composed_on(gpu, declaration, call, dtype), profile_of(gpu.name)
    if declaration.name == NORMED and {"gemm", "unfused"} <= times_us.keys():
        # What follows a sum was measured with two ranks alone, and does not hold for more.
        summed = _composed_on(gpu, product_operator(SUM), call, dtype)
        times_us["gemm"] = max(times_us["gemm"], min(summed.values()))
        times_us["unfused"] = summed["unfused"] + norm_us(gpu, call, dtype)
    least = least_us(profile, declaration.name, call)
    return {name: max(us, least) for name, us in times_us.items()}


def norm_us(gpu: Gpu, call: SizedCall, dtype: torch.dtype) -> float:
    """Return the microseconds of PyTorch's residual and norm behind a sum over any ranks."""
    two = dataclasses.replace(call, world_size=2)
    known = gpu_named(_NORM_GPU) if profile_of(gpu.name, gpu.processors).is_guess else gpu
    normed, summed = (
        _composed_on(known, product_operator(name), two, dtype)["unfused"] for name in (NORMED, SUM)
    )
    return max(normed - summed, 0.0)


def _composed_on(
    gpu: Gpu, declaration: GemmOperator, call: SizedCall, dtype: torch.dtype
) -> dict[str, float]:
    """Return the times of :func:`times_on` as the profile composes them."""
    tiled = declaration.config_type
    # The tiles of a kernel whose configuration has none are not asked for.
    config_type = cast(Any, tiled if issubclass(tiled, GemmConfig) else GemmConfig)
    times_us = choose_on(gpu, declaration.name, config_type, **_sizes(call, dtype)).times_us
    choice = choice_on(gpu, declaration, call, dtype)
    measured = {}
    if choice.is_exact and choice.table_us is not None:
        measured = {choice.impl: choice.table_us}
    # In front of the others, and with the measured time.
    return measured | dict(times_us) | measured


def _sizes(call: SizedCall, dtype: torch.dtype) -> dict[str, Any]:
    """Return the sizes of a call as an operator chooses by them."""
    return {
        "rows": call.rows,
        "columns": call.columns,
        "inner": call.inner,
        "dtype": dtype,
        "world_size": call.world_size,
    }


def provenance(gpu: Gpu, world_size: int) -> str:
    """Return sentences that say with how many ranks calls were measured on a GPU, and whether ever
    with so many.
    """
    profile, most_ranks = profile_of(gpu.name, gpu.processors), most_measured_ranks()
    ranks = " and ".join(map(str, profile.measured_ranks))
    text = f"Measured on {gpu.name}: {f'calls with {ranks} ranks' if ranks else 'no calls'}."
    if world_size > max([most_ranks, *profile.measured_ranks]):
        text += (
            f" Calls with more than {most_ranks} ranks were never run: all times with {world_size} "
            "are predicted only."
        )
    return text
