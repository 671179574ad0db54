"""Modules that hold shards of parameters, under wrappers and in state dicts of all shards."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from interlace.errors import ArgumentError
from interlace.nn.group_member import GroupMember
from interlace.nn.sharded_parameters import Sharing, gather, is_distributed, mark

_gathered: contextvars.ContextVar[dict[int, Any] | None] = contextvars.ContextVar(
    "gathered", default=None
)
"""Within :func:`gathering`, what became of each shard's parameter, by its identity."""


@contextlib.contextmanager
def gathering() -> Iterator[None]:
    """State dicts that are made within hold the shards of all ranks; making them is collective."""
    token = _gathered.set({})
    try:
        yield
    finally:
        _gathered.reset(token)


def is_gathering() -> bool:
    """Tell if state dicts shall hold the shards of all ranks."""
    return _gathered.get() is not None


class ShardHolder(GroupMember, nn.Module):
    """Base of modules with parameters of which every rank of a group holds a shard.

    Such a parameter is marked (:mod:`interlace.nn.sharded_parameters`) when it is set, and so are
    those that a wrapper, a conversion or a state dict puts into its place.

    Attributes:
        world_size: Number of ranks that hold shards; set before any parameter.
    """

    world_size: int

    def _sharded(self) -> list[str]:
        """Return the names of the parameters of which this rank holds a shard."""
        raise NotImplementedError

    def _sharing(self) -> Sharing:
        """Return who holds the other shards; called after ``world_size`` was set."""
        raise NotImplementedError

    # FSDP2 calls this method, because it is not nn.Module's, with the parameters that it makes.
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter):
            self._mark(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark(*self._sharded())
        return result

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        # Tensors that torch swaps, as torch.__future__ has a switch for, swap their classes.
        self._mark(*self._sharded())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark(*self._sharded())

    def _mark(self, *names: str) -> None:
        """Mark those of the parameters of these names that are sharded.

        Raises:
            ArgumentError: a parameter was sharded again, over ranks that hold different shards.
        """
        if self.world_size == 1:
            return
        sharing = self._sharing()
        for name in set(names).intersection(self._sharded()):
            parameter = self._parameters.get(name)
            if parameter is not None and mark(parameter, sharing) and is_distributed(parameter):
                mesh = set(parameter.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
                both = mesh.intersection(dist.get_process_group_ranks(sharing.group))
                if len(both) > 1:
                    raise ArgumentError(
                        f"{type(self).__name__}: {name} must be sharded again only over ranks that "
                        f"hold the same shard of it; got a mesh of ranks {sorted(mesh)}, of which "
                        f"{sorted(both)} hold different ones. Give fully_shard the other dimension "
                        "of the mesh, or these parameters as ignored_params."
                    )

    def _of_all_ranks(
        self, name: str, shard: torch.Tensor, assemble: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        """Return what ``assemble`` makes of all ranks' shards, in rank order; collective.

        Called within :func:`gathering`. One parameter, whatever its names, gives one tensor.

        Args:
            name: Of the parameter.
            shard: This rank's shard, as a state dict has it.
        """
        gathered = _gathered.get()
        assert gathered is not None
        parameter = getattr(self, name)
        if id(parameter) not in gathered:
            shards = gather(undistributed(shard.detach()), self._sharing().group)
            # The parameter is kept, too, so that no other object gets its identity.
            gathered[id(parameter)] = parameter, assemble(shards)
        full: torch.Tensor = gathered[id(parameter)][1]
        return full

    def _distribute(self, state_dict: MutableMapping[str, Any], prefix: str) -> None:
        """Shard what is loaded as FSDP2 has sharded the module's parameters.

        Args:
            state_dict: State dict that is being loaded, with this rank's shards.
        """
        for name, parameter in self.named_parameters():
            value = state_dict.get(prefix + name)
            if (
                is_distributed(parameter)
                and isinstance(value, torch.Tensor)
                and not is_distributed(value)
            ):
                # Imported here, because only a program that has imported it needs it.
                from torch.distributed.tensor import distribute_tensor

                # Every rank has the whole value and takes its own part of it.
                mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
                state_dict[prefix + name] = distribute_tensor(
                    value, mesh, placements, src_data_rank=None
                )


def undistributed(tensor: Any) -> torch.Tensor:
    """Return a DTensor as a plain tensor of all its shards, which is collective, or the tensor."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[no-any-return]
