"""What ranks tell each other about their tables before the first call: a constant of compiled graphs."""

from __future__ import annotations

import dataclasses
import os

import torch

from interlace.comm import group_named
from interlace.errors import ArgumentError, GroupError, RankMismatchError
from interlace.ops.embedding_all_to_all.config import OPERATOR
from interlace.ops.embedding_all_to_all.record import MAX_RANKS


@dataclasses.dataclass(frozen=True)
class Agreed:
    """Of all ranks: how many tables each has, their widths in one list, and what the output is."""

    rank: int
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    output_dtype: str
    trains: bool


def agree(
    group_name: str,
    device: str,
    name: str,
    widths: tuple[int, ...],
    dtype: str | None,
    output_dtype: str | None,
    grad_enabled: bool,
    trains: bool,
) -> Agreed:
    """Every rank's widths, and the output's dtype; exchanged once per distinct arguments. Traced calls too are collective.

    Raises:
        RankMismatchError: tables or outputs of different dtypes.
        ArgumentError: no rank has a table, and nobody says what dtype the output has.
    """
    group = group_named(group_name, torch.device(device))
    group.check()
    if group.world_size > MAX_RANKS:
        raise GroupError(f"{OPERATOR}: a group must have at most {MAX_RANKS} ranks; got {group.world_size}.")
    # With grad_enabled, a rank without tables asks again too when the others change between training and evaluation.
    answers = group.gather(
        OPERATOR,
        name=name,
        widths=widths,
        dtype=dtype,
        output_dtype=output_dtype,
        grad_enabled=grad_enabled,
        trains=trains,
    )
    for what in ("name", "output_dtype", "grad_enabled"):
        _require_same(what.replace("_", " "), [answer[what] for answer in answers])
    dtypes = [answer["dtype"] for answer in answers]
    _require_same("the dtype of weights", dtypes, where=[bool(answer["widths"]) for answer in answers])
    found = [each for each in [output_dtype, *dtypes] if each is not None]
    if not found:
        raise ArgumentError(f"{OPERATOR}: some rank must have a table, or output_dtype must be given; got neither.")
    return Agreed(
        rank=group.rank,
        counts=tuple(len(answer["widths"]) for answer in answers),
        widths=tuple(width for answer in answers for width in answer["widths"]),
        output_dtype=found[0].removeprefix("torch."),
        trains=any(answer["trains"] for answer in answers),
    )


# What torch.compiler.assume_constant_result does, without importing the compiler, which takes seconds.
agree._dynamo_marked_constant = True  # type: ignore[attr-defined]


def checks_indices(wanted: bool | None, device: torch.device) -> bool:
    """Whether a call looks at the numbers in indices and offsets."""
    if wanted is not None:
        return wanted
    return device.type == "cpu" or os.environ.get("INTERLACE_CHECK_INDICES", "0") not in ("", "0")


def _require_same(what: str, values: list[object], where: list[bool] | None = None) -> None:
    counted = [value for value, taken in zip(values, where or [True] * len(values), strict=True) if taken]
    if any(value != counted[0] for value in counted):
        got = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
        raise RankMismatchError(f"{OPERATOR}: {what} must be the same on every rank; got {got}. Nothing was computed.")
