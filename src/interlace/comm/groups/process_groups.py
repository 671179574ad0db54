"""Torch's process groups: by name, their sizes, the default backend, and collectives by the names
that this version of torch has.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.runtime.conditions import Condition, by_id, returns
from interlace.environment import whole_number
from interlace.errors import ArgumentError, BackendError, GroupError

_ranks_before: int | None = None
"""Number of ranks of the default process group that was used last, which may be destroyed now."""

default_group: contextvars.ContextVar[Any] = contextvars.ContextVar("default_group", default=None)
"""The :class:`Group` that is the default group of this thread, for ranks that are threads; None in
all other threads.
"""


def default_device_type() -> str:
    """Return ``"cuda"`` or ``"cpu"``: ``INTERLACE_BACKEND``, or ``"cuda"`` if there is a GPU.

    Raises:
        BackendError: ``INTERLACE_BACKEND`` is neither ``auto``, ``cuda`` nor ``cpu``.
    """
    choice = os.environ.get("INTERLACE_BACKEND", "auto")
    if choice not in ("auto", "cuda", "cpu"):
        raise BackendError(f"INTERLACE_BACKEND must be auto, cuda or cpu; got {choice!r}.")
    if choice == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return choice


def device_of_group(device: torch.device | str | None) -> torch.device:
    """Return the device of a group for ``device``: a GPU with its index, or the CPU without one.

    Raises:
        BackendError: The device is neither a GPU nor the CPU.
    """
    # Every call of an operator comes here with the device of a tensor, and a new one takes long.
    if not isinstance(device, torch.device):
        device = torch.device(default_device_type() if device is None else device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cuda", "cpu"):
        raise BackendError(f"a group's device must be cuda or cpu; got {device}.")
    return torch.device("cpu") if device.type == "cpu" and device.index is not None else device


@functools.cache  # an import takes longer than what it finds, and compiled graphs ask in each call
def _resolver() -> Callable[[str], dist.ProcessGroup]:
    """Return what finds torch's process groups by name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    # The parameter is annotated as str until torch 2.12.
    resolve: Callable[[str], dist.ProcessGroup] = _resolve_process_group  # type: ignore[assignment]
    return resolve


def process_group_named(name: str) -> dist.ProcessGroup | None:
    """Return the process group of a name; ``""`` gives None, the default group.

    Raises:
        GroupError: There is no such group, or it was destroyed.
    """
    if not name:
        return None
    try:
        return _resolver()(name)
    except (RuntimeError, ValueError, LookupError) as error:
        raise GroupError(
            f"a process group must exist while it is used; got the name {name!r}, which no group "
            "has or whose group was destroyed. Make the group before the call, and destroy it "
            "after its last one."
        ) from error


def named_condition(name: str) -> Condition:
    """Return the condition that a name is that of the process group that has it now, which the
    condition does not keep alive.
    """
    return by_id(returns(_resolver(), name))


def default_name(group: dist.ProcessGroup | None) -> str:
    """Return the name under which operators carry ``group``; see :func:`group_named`.

    Raises:
        GroupError: This rank is not a member.
    """
    require_member(group)
    return "" if group is None else group.group_name


def require_member(group: object) -> None:
    """Refuse a process group that this rank does not belong to, and what is no process group.

    Raises:
        ArgumentError: It is no process group.
        GroupError: This rank is not a member.
    """
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    # What new_group returns to other ranks, a number; other things may compare by element.
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(
            "the calling rank must be a member of the process group; it is not. Call only on "
            "members."
        )
    raise ArgumentError(
        f"group must be a torch.distributed.ProcessGroup, or None for the default one; got "
        f"{group!r}. Of a DeviceMesh, pass mesh.get_group(name)."
    )


def note_default_group(ranks: int) -> None:
    """Remember the size of the default process group, which exists, for :func:`require_alone`."""
    global _ranks_before
    _ranks_before = ranks


def require_alone() -> None:
    """Refuse a call without a process group in a process that has peers, or had some.

    There is no default process group. A process that has no peers is a group of its own; one of
    several ranks would take its part of the result for the whole.

    Raises:
        GroupError: ``WORLD_SIZE`` is above 1, or a default process group of several ranks was
            destroyed.
        ArgumentError: ``WORLD_SIZE`` is no number.
    """
    ranks = whole_number("WORLD_SIZE", 0)
    if ranks > 1:
        raise GroupError(
            "a process group must exist in each of several processes; got none, and WORLD_SIZE is "
            f"{ranks}. Call torch.distributed.init_process_group() before the first call, and "
            "destroy_process_group() after the last one. A program without peers unsets WORLD_SIZE."
        )
    # Torch keeps the method by which a group was made after the group, but not the number of ranks.
    is_unknown = _ranks_before is None and not ranks
    had_group = getattr(dist.distributed_c10d, "_default_pg_init_method", None) is not None
    if (_ranks_before or 1) > 1 or (is_unknown and had_group):
        raise GroupError(
            "a process group must exist while it is used; got none, as the default one was "
            "destroyed. Call torch.distributed.destroy_process_group() after the last call, or "
            "init_process_group() again. A program without peers sets WORLD_SIZE=1."
        )


def rank_and_size(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in a group and the group's size; 0 and 1 without a group.

    Raises:
        GroupError: This rank is not a member, the group was destroyed, or there is none in a
            process of several.
    """
    require_member(process_group)
    # torch.compile cannot look into a context variable, and calls come here again when they run.
    is_running = not torch.compiler.is_compiling()
    if is_running:
        substitute = default_group.get()
        if process_group is None and substitute is not None:
            return substitute.rank, substitute.world_size
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        if is_running:
            require_alone()
        return 0, 1
    try:
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    except ValueError as error:
        raise GroupError(
            "a process group must exist while it is used; got one that was destroyed. Make "
            "another group, and what uses it, and load the state dict."
        ) from error
    if is_running and process_group is None:
        note_default_group(ranks)
    return rank, ranks


def require_same_ranks(
    subject: str, process_group: dist.ProcessGroup | None, rank: int, world_size: int
) -> None:
    """Refuse to use a module with other ranks than it was made for.

    Without its process group a module would take this process alone for all ranks, and return a
    part of its result.

    Args:
        subject: The module's name in the error.
        process_group: Its process group; None is the default one.
        rank: This process's rank when the module was made.
        world_size: Number of ranks when the module was made.

    Raises:
        GroupError: The group was destroyed, or another one is the default group now.
    """
    now = rank_and_size(process_group)
    if now != (rank, world_size):
        raise GroupError(
            f"{subject}: its process group must have the ranks that it was made for, this one "
            f"being rank {rank} of {world_size}; got rank {now[0]} of {now[1]}, as the default "
            "process group was destroyed or replaced. Make the module again, and load its state "
            "dict."
        )


def gather(result: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Gather all ranks' x in ``result``."""
    # Named all_gather_single since torch 2.13, which warns of the older name.
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(result, x, group=group)


def scatter(result: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Add all ranks' parts and store this rank's rows of the sum in ``result``."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(result, parts, group=group)
