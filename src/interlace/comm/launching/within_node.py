"""The ranks of this rank's node, as kernels that store to all ranks of a group see them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from interlace.comm.cpu import cpu_faults
from interlace.comm.groups.group import Group
from interlace.comm.groups.symmetric_memory import Workspace
from interlace.comm.replay.memory import Block
from interlace.errors import PeerTimeoutError


def distance(ranks: Sequence[int]) -> int | None:
    """Return the difference between each rank and the next; None if it is not always the same.

    A single rank has the distance 1.
    """
    steps = {after - before for before, after in itertools.pairwise(ranks)} or {1}
    return steps.pop() if len(steps) == 1 else None


class WithinNode:
    """Let kernels run on the ranks of one node of a group that spans nodes.

    The kernels number these ranks from 0. They use the group's memory, deadline and record of
    failures, so errors name ranks of the group. The ranks must be at equal distances, as rank r's
    copy of an address is r strides from rank 0's.

    Attributes:
        ranks: The ranks of this node, which share memory.
        rank: This process among them.
        world_size: How many they are.
        backend: ``"cuda"`` or ``"cpu"``.
        device: Device of this rank's kernels.
        cache: What earlier calls of the group have left.
    """

    def __init__(self, group: Group) -> None:
        """See the node of ``group``'s rank; nothing is exchanged."""
        self._group = group
        self.ranks = group.members.local_ranks
        self.rank, self.world_size = self.ranks.index(group.rank), len(self.ranks)
        self.backend, self.device, self.cache = group.backend, group.device, group.cache
        step = distance(self.ranks)
        assert step is not None
        self._stride = step * group.stride
        # Kept as long as kernels may run: the CPU backend checks their addresses by these blocks.
        self._workspaces: dict[str, Workspace] = {}

    def workspace(self, operator: str, half_bytes: int, signal_count: int = 1) -> Workspace:
        """Return an operator's memory, whose addresses are those of the node's first rank.

        Collective among all ranks of the group when it must grow.
        """
        workspace = self._group.workspace(operator, half_bytes, signal_count)
        part = dataclasses.replace(
            workspace, data=self._part(workspace.data), signals=self._part(workspace.signals)
        )
        self._workspaces[operator] = part
        return part

    def context(self, operator: str) -> torch.Tensor:
        """Return the ``ctx`` argument of an operator's kernels."""
        return self._group.health.context(operator, self._stride, self.ranks)

    @contextlib.contextmanager
    def running(self, operator: str) -> Iterator[None]:
        """Surround launches on these ranks, within ``Group.running``.

        Raises:
            PeerTimeoutError: On the CPU backend, a peer was late; it names the rank that was late
                first, which may be one of another node that the peer has waited for.
        """
        if self.backend == "cuda":
            yield
            return
        group = self._group
        # These kernels number the node's ranks from 0, so they count on their own, and the counts
        # are added under the group's ranks.
        traffic = cpu_faults.Traffic()
        with cpu_faults.counting(traffic):
            yield
        group.traffic.add(traffic, self.ranks)
        try:
            group.check()
        except PeerTimeoutError as error:
            if not error.different_call:
                # Kernels count slices from 0; here 0 stands for an exchange on the host.
                group.channel.declare_late(operator, error.peer, error.slice + 1)
            group.check()
            raise

    def _part(self, block: Block) -> _Part:
        address = block.address + self.ranks[0] * block.stride
        return _Part(block, address, self._stride, self.world_size)


class _Part(Block):
    """Count the ranks of a block from another one on; the block keeps the memory."""

    def __init__(self, whole: Block, address: int, stride: int, ranks: int) -> None:
        device = torch.device("cpu")
        super().__init__(address, whole.nbytes, stride, ranks, device, lambda: None)
        self._whole = whole
