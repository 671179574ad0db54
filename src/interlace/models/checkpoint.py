"""Checkpoints of a model with sharded tables: written by all ranks at once, read by any number of ranks.

::

    FOLDER/step-00000100/
        checkpoint.json       step, ranks, and what the caller adds; there once everything else is
        dense.pt              the data-parallel part and its optimizer, from rank 0
        embeddings-0.pt ...   each rank's shards, under names that say which columns of which table they are

PyTorch's distributed checkpoint would do, but its metadata is a pickle that is executed when it is read. These files are read
with ``weights_only=True`` and ``json``.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from interlace.comm import Group
from interlace.errors import DataError, InterlaceError
from interlace.models.dlrm import DLRM

_INDEX = "checkpoint.json"


def save_checkpoint(
    folder: Path, model: DLRM, optimizer: torch.optim.Optimizer, step: int, extra: Mapping[str, Any] | None = None
) -> Path:
    """Write ``folder/step-<step>``; it appears under that name when it is complete. Collective.

    Args:
        folder: on a file system that all ranks see; made if it is not there.
        model: its tables' optimizer states go along.
        optimizer: of ``model.dense``.
        step: steps done.
        extra: JSON that :func:`load_checkpoint` gives back.

    Returns:
        The checkpoint's folder.

    Raises:
        DataError: on every rank, if one cannot write.
    """
    group = model.embeddings.group
    target = folder / f"step-{step:08d}"
    partial = folder / f".{target.name}.partial"

    def prepare() -> None:
        if group.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        torch.save(model.embeddings.state_dict(), partial / f"embeddings-{group.rank}.pt")
        if group.rank == 0:
            torch.save({"model": model.dense.state_dict(), "optimizer": optimizer.state_dict()}, partial / "dense.pt")
            index = {"step": step, "world_size": group.world_size, "extra": dict(extra or {})}
            (partial / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def finish() -> None:
        if group.rank == 0:
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)

    for action in (prepare, write, finish):
        _on_all_ranks(group, "save_checkpoint", action)
    return target


def load_checkpoint(path: Path, model: DLRM, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Load ``path`` into a model of the same tables, on any number of ranks. Collective.

    Each rank reads of all ranks' files what its own shards need (they are mapped, not read whole).

    Returns:
        ``{"step": ..., "world_size": ..., "extra": ...}`` as saved.

    Raises:
        DataError: on every rank, if one cannot read it, or it is not of such a model.
    """
    group = model.embeddings.group
    index: dict[str, Any] = {}

    def read() -> None:
        index.update(json.loads((path / _INDEX).read_text(encoding="utf-8")))
        shards: dict[str, Any] = {}
        for rank in range(int(index["world_size"])):
            shards |= _read(path / f"embeddings-{rank}.pt")
        model.embeddings.load_state_dict(shards)
        dense = _read(path / "dense.pt")
        model.dense.load_state_dict(dense["model"])
        if optimizer is not None:
            optimizer.load_state_dict(dense["optimizer"])

    _on_all_ranks(group, "load_checkpoint", read)
    return index


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of most steps in ``folder``; None if there is none."""
    return max((file.parent for file in folder.glob(f"step-*/{_INDEX}")), default=None)


def _read(file: Path) -> dict[str, Any]:
    found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(found, dict):
        raise DataError(f"{file} must be a part of a checkpoint; it is not.")
    return found


def _on_all_ranks(group: Group, what: str, action: Any) -> None:
    """Run ``action`` and wait for the others; if it fails on one rank, every rank raises."""
    problem = ""
    try:
        action()
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError, InterlaceError) as error:
        problem = f"{type(error).__name__}: {error}"
    failed = [(rank, text) for rank, text in enumerate(group.exchange(what, problem)) if text]
    if failed:
        raise DataError(f"{what} must succeed on every rank; got on rank {failed[0][0]}: {failed[0][1]}")
