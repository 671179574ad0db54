"""Identify the members of a group and their devices, and check that they can share memory."""

from __future__ import annotations

import dataclasses
import socket
import warnings
from typing import Any, Protocol

import torch
import torch.distributed as dist

from interlace.errors import BackendError, GroupError


class Exchange(Protocol):
    """Describe a collective exchange of one JSON value per rank; see :class:`HostChannel`."""

    def __call__(
        self, label: str, value: object, /, *, deadline_s: float | None = None
    ) -> list[Any]:
        """Return the ``value`` of every rank, in rank order."""


@dataclasses.dataclass
class Members:
    """Identify a group and this process's rank in it.

    Every part of a group refers to the same object. ``interlace.testing`` makes groups whose ranks
    are threads and numbers them after construction, so no part may copy ``rank`` or ``world_size``
    while it is constructed.

    Attributes:
        name: Name of the process group; ``""`` for a process on its own.
        rank: Rank of this process in the group.
        world_size: Number of ranks in the group.
        device: Device that runs this rank's kernels; a GPU has an index.
        ranks_per_gpu: Largest number of ranks that share one GPU; 1 on the CPU backend.
        backend: ``"cuda"`` or ``"cpu"``.
    """

    name: str
    rank: int
    world_size: int
    device: torch.device
    ranks_per_gpu: int = 1
    backend: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.backend = "cuda" if self.device.type == "cuda" else "cpu"


def members_of(process_group: dist.ProcessGroup | None, device: torch.device) -> Members:
    """Return the members of a process group; None stands for this process on its own."""
    if process_group is None:
        return Members("", 0, 1, device)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    return Members(process_group.group_name, rank, world_size, device)


def check_members(members: Members, exchange: Exchange) -> int:
    """Check that all ranks are on one machine and that their GPUs reach each other. Collective.

    Returns:
        The largest number of ranks that share one GPU; 1 on the CPU backend.

    Raises:
        GroupError: Ranks are on several machines, or a GPU cannot reach a peer's memory.
    """
    gpu = gpu_id(members.device) if members.backend == "cuda" else ""
    answers = exchange("joining a group", [socket.gethostname(), _boot_id(), gpu])
    # Machines that were cloned from one image may have equal host names; their boot ids differ.
    if len({(host, boot) for host, boot, _ in answers}) > 1:
        raise GroupError(
            "all ranks of a group must be on one machine; got "
            f"{by_rank([host for host, _, _ in answers])}. "
            f"Use torch.distributed.new_group to form a group per machine."
        )
    return check_gpus(members, [gpu for _, _, gpu in answers]) if members.backend == "cuda" else 1


def check_gpus(members: Members, gpus: list[str]) -> int:
    """Check that this rank's GPU reaches the GPUs of all ranks, and warn if ranks share one.

    Args:
        members: The group.
        gpus: Identifier of each rank's GPU, as :func:`gpu_id` returns it, in rank order.

    Returns:
        The largest number of ranks that share one GPU.

    Raises:
        GroupError: This rank's GPU cannot access a peer's memory.
    """
    device = members.device
    indices = {gpu_id(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    for rank, gpu in enumerate(gpus):
        # A peer's GPU may be invisible to this process (CUDA_VISIBLE_DEVICES). The driver reports
        # whether it can be reached when its memory is mapped.
        index = indices.get(gpu, device.index)
        if index != device.index and not torch.cuda.can_device_access_peer(device.index, index):
            raise GroupError(
                f"GPUs of a group must reach each other's memory; {device} cannot reach "
                f"cuda:{index} of rank {rank}. "
                f"`interlace doctor` shows the links."
            )
    ranks_per_gpu = max(gpus.count(gpu) for gpu in gpus)
    if ranks_per_gpu > 1 and members.rank == 0:
        warnings.warn(
            f"{members.world_size} ranks share {len(set(gpus))} GPUs by time slices. Results "
            "are right; times mean nothing.",
            stacklevel=2,
        )
    return ranks_per_gpu


def require_dedicated_gpus(members: Members, activity: str) -> None:
    """Refuse to measure on GPUs that are shared between ranks.

    Args:
        members: The group.
        activity: Name of the measurement, for the error message.

    Raises:
        BackendError: Ranks of the group share a GPU.
    """
    if members.ranks_per_gpu > 1:
        raise BackendError(
            f"{activity} must have a GPU for each rank; got {members.ranks_per_gpu} ranks on one. "
            "Times of ranks that share a GPU "
            f"mean nothing; use fewer ranks."
        )


def gpu_id(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in all processes.

    The index of a GPU depends on the GPUs that a process sees (``CUDA_VISIBLE_DEVICES``).
    """
    return str(torch.cuda.get_device_properties(device).uuid)


def by_rank(values: list[Any]) -> str:
    """Return the values with their ranks as text, for error messages."""
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))


def _boot_id() -> str:
    """Return the kernel's identifier of the current boot, or ``""`` if it has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
