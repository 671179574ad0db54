"""Copies and pickles of modules that belong to a process group."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from interlace.comm import Group, default_name, group_of, process_group_named, rank_and_size
from interlace.errors import GroupError


class GroupMember:
    """Base of modules that hold a process group, which can be neither copied nor pickled itself.

    ``copy.deepcopy`` shares the group with the original, on this rank alone. ``pickle``, and so
    ``torch.save(module)``, keeps the group's name and size and this process's rank in it. The
    process that loads the module must have a group of that name and size, and the same rank in it.
    Loading a module with sharded embeddings is collective if the loading process has not used the
    group before.
    """

    _group_attributes: ClassVar[tuple[str, ...]]
    """Names of attributes that hold a ``Group``, a process group, or None for the default one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Objects in the memo count as copied already, so the copy refers to the original's group.
        for name in self._group_attributes:
            group = getattr(self, name)
            memo[id(group)] = group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(
            {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        )
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # A process group is of this process; by its name another process finds its own.
        return self.__dict__ | {
            name: _Reference.to(getattr(self, name)) for name in self._group_attributes
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = {name: state[name].resolve(type(self).__name__) for name in self._group_attributes}
        # nn.Module has a __setstate__ of its own, which adds attributes that older pickles lack.
        restore = getattr(super(), "__setstate__", self.__dict__.update)
        restore(state | groups)


@dataclasses.dataclass(frozen=True)
class _Reference:
    """The part of a group that a pickle holds.

    Attributes:
        name: Name of the process group; ``""`` for the default one.
        rank: This process's rank in the group.
        world_size: Number of ranks in the group.
        device: Device on which a ``Group`` runs its kernels; None for a process group.
    """

    name: str
    rank: int
    world_size: int
    device: torch.device | None

    @classmethod
    def to(cls, group: Group | dist.ProcessGroup | None) -> _Reference:
        """Make a reference to a group; None is the default process group."""
        if isinstance(group, Group):
            return cls(group.name, group.rank, group.world_size, group.device)
        return cls(default_name(group), *rank_and_size(group), None)

    def resolve(self, module: str) -> Group | dist.ProcessGroup | None:
        """Find the group of that name in this process, for a module that is being loaded.

        Raises:
            GroupError: there is no such group, its size is another one, or this process's rank in
                it is another one.
        """
        advice = "Make the same groups in the same order, or load a state dict into a new module."
        try:
            process_group = process_group_named(self.name)
        except GroupError as error:
            raise GroupError(
                f"{module}: the process group that it was saved with must exist; got none of the "
                f"name {self.name!r}. {advice}"
            ) from error
        rank, world_size = rank_and_size(process_group)
        if (rank, world_size) != (self.rank, self.world_size):
            raise GroupError(
                f"{module}: it must be loaded by the rank that saved it, {self.rank} of "
                f"{self.world_size}; "
                f"got {rank} of {world_size}. {advice}"
            )
        return process_group if self.device is None else group_of(process_group, self.device)
