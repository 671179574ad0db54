"""Find out which ranks of a group are on one node, and so share memory.

A node is a machine that one launcher's agent runs: ranks are on one node if their host name, the
boot of its kernel, and the launcher's number of the node are equal. So two machines never count as
one node, while one machine counts as several where the launcher (two torchrun agents) or
``INTERLACE_NODES`` says so.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from interlace.environment import whole_number
from interlace.errors import ArgumentError

NODES_VARIABLE = "INTERLACE_NODES"
"""Number of nodes that the ranks of a program count as, in equal and consecutive parts."""

# The variable that a launcher sets in every process that it starts, and the variable with the
# number of the process's node.
_LAUNCHERS = (("TORCHELASTIC_RUN_ID", "GROUP_RANK"), ("SLURM_PROCID", "SLURM_NODEID"))


def own_node() -> list[str]:
    """Return what identifies the node of this process: ranks of one node have equal lists.

    Raises:
        ArgumentError: ``INTERLACE_NODES`` does not divide the ranks of the program.
    """
    # Machines that were cloned from one image may have equal host names; their boot ids differ.
    return [socket.gethostname(), _boot_id(), _by_launcher(os.environ), _declared()]


def numbered(nodes: Sequence[object]) -> tuple[int, ...]:
    """Return the number of each rank's node, from 0 in the order of the ranks; empty for one node.

    Args:
        nodes: Each rank's :func:`own_node`, in rank order.
    """
    first_ranks = [nodes.index(node) for node in nodes]
    order = sorted(set(first_ranks))
    return tuple(map(order.index, first_ranks)) if len(order) > 1 else ()


def ranks_of_nodes(node_of_rank: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of each node.

    Args:
        node_of_rank: As :func:`numbered` returns it.
    """
    return [
        tuple(rank for rank, its_node in enumerate(node_of_rank) if its_node == node)
        for node in sorted(set(node_of_rank))
    ]


def declared_ranks_per_node() -> int | None:
    """Return the number of consecutive ranks on one node by what the environment says of it:
    ``INTERLACE_NODES``, then ``LOCAL_WORLD_SIZE``, which torchrun sets, then the step of Slurm
    whose tasks the ranks are. None if it says nothing.
    """
    if nodes := whole_number(NODES_VARIABLE, 0, least=1):
        return dist.get_world_size() // nodes
    if ranks := whole_number("LOCAL_WORLD_SIZE", 0, least=1):
        return ranks
    tasks, nodes = (whole_number(f"SLURM_STEP_NUM_{unit}", 0) for unit in ("TASKS", "NODES"))
    if nodes and dist.is_initialized() and tasks == dist.get_world_size():
        return max(1, tasks // nodes)
    return None


def _by_launcher(environment: Mapping[str, str]) -> str:
    """Return the launcher's number of this process's node, or ``""`` without a launcher."""
    for launched, number in _LAUNCHERS:
        if launched in environment and number in environment:
            return environment[number]
    return ""


def _declared() -> str:
    """Return the node of this process by ``INTERLACE_NODES``, or ``""`` if that is not set."""
    nodes = whole_number(NODES_VARIABLE, 0, least=1)
    if not nodes:
        return ""
    ranks = dist.get_world_size()
    if ranks % nodes:
        raise ArgumentError(
            f"{NODES_VARIABLE} must be a number that divides the {ranks} ranks; got {nodes}."
        )
    return str(dist.get_rank() // (ranks // nodes))


def _boot_id() -> str:
    """Return the kernel's identifier of the current boot, or ``""`` if it has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
