"""Checkpoints of a model with sharded tables: written by all ranks at once, read by any number of
ranks.

::

    FOLDER/step-00000100/
        checkpoint.json       step, number of ranks, and the caller's ``extra``
        dense.pt              the data-parallel part and its optimizer, from rank 0
        embeddings-0.pt ...   each rank's shards, named by table and columns

A checkpoint that exists under its name is complete. All ranks write into ``.step-00000100.partial``
and force their files to disk; rank 0 gives the folder its name when every rank has succeeded. If a
rank fails, every rank raises an error that names it, the partial folder is removed, and a
checkpoint that stood under the same name is still there. A process that is killed leaves the
partial folder behind; the next save of that step replaces it. A checkpoint that is being replaced
is ``.step-00000100.replaced`` until the new one has its name, and is found there if a kill came
between the two renames.

PyTorch's distributed checkpoint is not used, because its metadata is a pickle that is executed when
it is read. These files are read with ``weights_only=True`` and ``json``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from interlace import Group
from interlace_dlrm.dlrm import DLRM
from interlace_dlrm.errors import DataError

DEADLINE_S = 3600.0
"""Default time, in seconds, that the fastest rank waits for the slowest one in each phase of a
checkpoint.

Ranks hold tables of different sizes and write to disks of different speeds, so this has nothing to
do with the group's deadline, which bounds how long a kernel may wait for a peer.
"""

_INDEX = "checkpoint.json"


def save_checkpoint(
    folder: Path,
    model: DLRM,
    optimizer: torch.optim.Optimizer,
    step: int,
    extra: Mapping[str, Any] | None = None,
    *,
    deadline_s: float = DEADLINE_S,
) -> Path:
    """Write the checkpoint ``folder/step-<step>``. Collective.

    The checkpoint appears under that name when it is complete.

    Args:
        folder: Folder on a file system that all ranks see; made if it does not exist.
        model: Model to save, with its tables' optimizer states.
        optimizer: Optimizer of ``model.dense``.
        step: Number of steps that the model has been trained for.
        extra: Values for JSON, which has no NaN and no infinity; :func:`load_checkpoint` returns
            them.
        deadline_s: Time, in seconds, that a rank waits for the others once it has written its own
            files.

    Returns:
        The checkpoint's folder.

    Raises:
        DataError: a rank cannot write. It is raised on every rank and names that rank; earlier
            checkpoints in the folder are unchanged.
        PeerTimeoutError: a rank did not finish within ``deadline_s``. The group is broken then.
    """
    group = model.embeddings.group
    target = folder / f"step-{step:08d}"
    partial, replaced = folder / f".{target.name}.partial", _replaced(target)

    # Three phases, with an agreement of all ranks after each: rank 0 makes the folder before anyone
    # writes into it, and renames it after everyone has written.
    def prepare() -> None:
        if group.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        files = [partial / f"embeddings-{group.rank}.pt"]
        torch.save(model.embeddings.state_dict(), files[0])
        if group.rank == 0:
            files += [partial / "dense.pt", partial / _INDEX]
            torch.save(
                {"model": model.dense.state_dict(), "optimizer": optimizer.state_dict()}, files[1]
            )
            index = {"step": step, "world_size": group.world_size, "extra": dict(extra or {})}
            text = json.dumps(index, indent=1, allow_nan=False)
            files[2].write_text(text + "\n", encoding="utf-8")
        for file in files:
            _flush(file)

    def finish() -> None:
        if group.rank == 0:
            _flush(partial)
            exists = target.exists()
            if exists:
                # A folder cannot be renamed onto one that has files in it, so the earlier
                # checkpoint of this step steps aside, and comes back if the new one cannot take its
                # name. Without a target, what stands aside may be all that a kill has left.
                shutil.rmtree(replaced, ignore_errors=True)
                target.rename(replaced)
            try:
                partial.rename(target)
            except OSError:
                if exists:
                    replaced.rename(target)
                raise
            _flush(folder)
            if replaced.exists():
                # Not removed under a name under which it may be read.
                replaced.rename(partial)
                shutil.rmtree(partial, ignore_errors=True)

    try:
        for action in (prepare, write, finish):
            _on_all_ranks(group, "save_checkpoint", action, deadline_s)
    except DataError:
        # Every rank has come to the end of its phase, so no rank is still writing into the folder.
        if group.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def load_checkpoint(
    path: Path,
    model: DLRM,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    deadline_s: float = DEADLINE_S,
) -> dict[str, Any]:
    """Load a checkpoint into a model of the same tables, on any number of ranks. Collective.

    Each rank reads the parts of all ranks' files that its own shards need; the files are mapped
    into memory, not read completely.

    Args:
        path: The checkpoint's folder, as :func:`save_checkpoint` returned it.
        model: Model to load into.
        optimizer: Optimizer of ``model.dense``; None ignores the saved optimizer.
        deadline_s: Time, in seconds, that a rank waits for the others once it has read its files.

    Returns:
        ``{"step": ..., "world_size": ..., "extra": ...}`` as saved.

    Raises:
        DataError: a rank cannot read the checkpoint, or it is of another model. It is raised on
            every rank and names that rank. If a file cannot be read, no rank's model has changed.
        PeerTimeoutError: a rank did not finish within ``deadline_s``. The group is broken then.
    """
    group = model.embeddings.group
    index: dict[str, Any] = {}
    shards: dict[str, Any] = {}
    dense: dict[str, Any] = {}

    def read() -> None:
        stood_aside = _replaced(path)
        source = stood_aside if stood_aside.exists() and not path.exists() else path
        index.update(json.loads((source / _INDEX).read_text(encoding="utf-8")))
        for rank in range(int(index["world_size"])):
            shards.update(_read(source / f"embeddings-{rank}.pt"))
        dense.update(_read(source / "dense.pt"))

    def load() -> None:
        model.embeddings.load_state_dict(shards)
        model.dense.load_state_dict(dense["model"])
        if optimizer is not None:
            optimizer.load_state_dict(dense["optimizer"])

    _on_all_ranks(group, "load_checkpoint", read, deadline_s)
    # Nodes may see a shared folder at different times.
    steps = group.exchange("load_checkpoint", index["step"], deadline_s=deadline_s)
    if len(set(steps)) > 1:
        raise DataError(f"{path} must be one checkpoint on all ranks; got steps {steps}.")
    _on_all_ranks(group, "load_checkpoint", load, deadline_s)
    return index


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the most steps in ``folder``, or None.

    One that a kill has left without its name counts; see the module.
    """
    found = {
        int(name[1]): file.parent
        for pattern in (".step-*.replaced", "step-*")  # The second goes before the first.
        for file in folder.glob(f"{pattern}/{_INDEX}")
        if (name := re.fullmatch(r"\.?step-(\d+)(\.replaced)?", file.parent.name))
    }
    return found[max(found)] if found else None


def _replaced(path: Path) -> Path:
    """Return where the checkpoint stands while another one takes its name."""
    return path.with_name(f".{path.name}.replaced")


def _read(file: Path) -> dict[str, Any]:
    """Read a file of tensors, by name.

    Raises:
        DataError: the file holds something else.
    """
    contents = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(contents, dict):
        raise DataError(f"{file} must be a part of a checkpoint; it is not.")
    return contents


def _flush(path: Path) -> None:
    """Wait until a file's data, or a folder's names, are on the disk.

    Otherwise a rename could reach the disk first, and a machine that loses power then would have an
    incomplete checkpoint under the name of a complete one.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _on_all_ranks(
    group: Group, operation: str, action: Callable[[], None], deadline_s: float
) -> None:
    """Run ``action`` and wait for the other ranks; if it fails on one rank, every rank raises.

    Args:
        group: The ranks.
        operation: Name of the public function, for errors.
        action: This rank's part.
        deadline_s: Time, in seconds, that a rank waits for the others once its action has ended.

    Raises:
        DataError: the action failed on a rank, which the message names.
        PeerTimeoutError: a rank did not end its action within ``deadline_s`` of this rank.
    """
    problem = ""
    try:
        action()
    # Any exception: the other ranks are about to wait for this one and must learn of it.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    failed = [
        (rank, text)
        for rank, text in enumerate(group.exchange(operation, problem, deadline_s=deadline_s))
        if text
    ]
    if failed:
        raise DataError(
            f"{operation} must succeed on every rank; got on rank {failed[0][0]}: {failed[0][1]}"
        )
