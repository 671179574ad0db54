"""Identify the members of a group, their nodes and their devices."""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any, Protocol

import torch
import torch.distributed as dist

from interlace.comm.host.nodes import numbered, own_node
from interlace.comm.host.processes import (
    Process,
    expected_owner,
    is_served_here,
    lives,
    own_process,
)
from interlace.errors import GroupError


class Exchange(Protocol):
    """Describe a collective exchange of one JSON value per rank; see :class:`HostChannel`."""

    def __call__(
        self, label: str, value: object, /, *, deadline_s: float | None = None
    ) -> list[Any]:
        """Return the ``value`` of every rank, in rank order."""


@dataclasses.dataclass
class Members:
    """Identify a group and this process's rank in it.

    Every part of a group refers to the same object. ``interlace_explorer`` makes groups whose ranks
    are threads and numbers them after construction, so no part may copy ``rank`` or ``world_size``
    while it is constructed.

    Attributes:
        name: Name of the process group; ``""`` for a process on its own.
        rank: Rank of this process in the group.
        world_size: Number of ranks in the group.
        device: Device that runs this rank's kernels; a GPU has an index.
        ranks_per_gpu: Largest number of ranks that share one GPU; 1 on the CPU backend.
        node_of_rank: Number of each rank's node, from 0; empty if all ranks are on one node.
        store_rank: Rank whose process has the process group's store, which is gone when it ends; -1
            if no rank's process has it.
        processes: The processes of ranks that this process can see; None for the others.
        backend: ``"cuda"`` or ``"cpu"``.
    """

    name: str
    rank: int
    world_size: int
    device: torch.device
    ranks_per_gpu: int = 1
    node_of_rank: tuple[int, ...] = ()
    store_rank: int = -1
    processes: tuple[Process | None, ...] = ()
    backend: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.backend = "cuda" if self.device.type == "cuda" else "cpu"

    @property
    def spans_nodes(self) -> bool:
        """Return whether some ranks do not share memory."""
        return bool(self.node_of_rank)

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return 1 + max(self.node_of_rank, default=0)

    @property
    def node(self) -> int:
        """Return the number of this rank's node."""
        return self.node_of_rank[self.rank] if self.node_of_rank else 0

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this rank's node, which share memory; this rank is among them."""
        if not self.node_of_rank:
            return tuple(range(self.world_size))
        return tuple(rank for rank, node in enumerate(self.node_of_rank) if node == self.node)

    @property
    def remote_ranks(self) -> tuple[int, ...]:
        """Return the ranks of other nodes, whose memory this rank cannot reach."""
        return tuple(rank for rank, node in enumerate(self.node_of_rank) if node != self.node)

    def ended_ranks(self) -> list[int]:
        """Return the ranks whose process has ended, of those that this process can see."""
        return [
            rank
            for rank, process in enumerate(self.processes)
            if process is not None and not lives(process)
        ]

    def node_of(self, rank: int) -> int | None:
        """Return the node of a rank for error messages; None where there is only one node."""
        return self.node_of_rank[rank] if 0 <= rank < len(self.node_of_rank) else None


def members_of(process_group: dist.ProcessGroup | None, device: torch.device) -> Members:
    """Return the members of a process group; None stands for this process on its own."""
    if process_group is None:
        return Members("", 0, 1, device)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    store_rank = expected_owner(process_group)
    return Members(process_group.group_name, rank, world_size, device, store_rank=store_rank)


def meet_members(members: Members, exchange: Exchange, store: dist.Store | None) -> None:
    """Learn the nodes and the GPUs of all ranks, and check that a node's GPUs reach each other.

    Collective. It sets ``node_of_rank``, ``ranks_per_gpu``, ``store_rank`` and ``processes`` of
    ``members``.

    Args:
        members: The group.
        exchange: The group's exchange.
        store: The process group's store; None for a process on its own.

    Raises:
        GroupError: This rank's GPU cannot reach the memory of a peer of its node.
        ArgumentError: ``INTERLACE_NODES`` does not divide the ranks of the program.
    """
    gpu = gpu_id(members.device) if members.backend == "cuda" else ""
    node = own_node() if members.name else []
    serves = store is not None and is_served_here(store)
    answers = exchange("joining a group", [node, gpu, serves, own_process()])
    members.node_of_rank = numbered([node for node, *_ in answers])
    processes = [None if process is None else Process(*process) for *_, process in answers]
    # Those of other machines and containers are not there from the beginning.
    members.processes = tuple(
        process if process and lives(process) else None for process in processes
    )
    owners = [rank for rank, (_, _, serves, _) in enumerate(answers) if serves]
    # Ranks of two machines may listen on a port of one number.
    if len(owners) <= 1:
        members.store_rank = owners[0] if owners else -1
    if members.backend == "cuda":
        members.ranks_per_gpu = check_gpus(members, [gpu for _, gpu, *_ in answers])


def check_gpus(members: Members, gpus: list[str]) -> int:
    """Check that this rank's GPU reaches the GPUs of its node's ranks; warn if ranks share one.

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
    remote = set(members.remote_ranks)
    for rank, gpu in enumerate(gpus):
        if rank in remote:
            continue
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
        count = len(set(gpus))
        warnings.warn(
            f"{members.world_size} ranks share {count} {'GPU' if count == 1 else 'GPUs'} by time "
            "slices. Results are right; times mean nothing.",
            stacklevel=2,
        )
    if limits_processors() and members.rank == 0:
        warnings.warn(
            f"{PROCESSOR_LIMIT} is set. Where NVIDIA's Multi-Process Service runs, cuBLAS of CUDA "
            "13.0 left parts of products unwritten under such a limit. Unset it.",
            stacklevel=2,
        )
    return ranks_per_gpu


PROCESSOR_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""Variable by which NVIDIA's Multi-Process Service limits the SMs of a process."""


def limits_processors() -> bool:
    """Return whether the environment limits the SMs of this process."""
    value = os.environ.get(PROCESSOR_LIMIT, "")
    return bool(value) and value not in ("100", "100.0")


def gpu_id(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in all processes.

    The index of a GPU depends on the GPUs that a process sees (``CUDA_VISIBLE_DEVICES``).
    """
    return str(torch.cuda.get_device_properties(device).uuid)


def by_rank(values: list[Any]) -> str:
    """Return the values with their ranks as text, for error messages."""
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
