"""``ParallelLinear``, the base of linear layers whose weight is sharded over ranks, and state dicts
of the full layers.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn

from interlace.comm import rank_and_size
from interlace.errors import ArgumentError
from interlace.nn.shard_holder import ShardHolder, gathering, is_gathering, undistributed
from interlace.nn.sharded_parameters import Sharing
from interlace.units import round_up


class ParallelLinear(ShardHolder):
    """Base of :class:`RowParallelLinear` and :class:`ColumnParallelLinear`.

    Attributes:
        weight: This rank's shard of the full weight ``[N, K]``.
        bias: ``[N]``, or this rank's shard of it; None if the layer has no bias.
        sequence_parallel: True if activations that are not sharded by features are sharded by
            tokens.
        impl: ``"auto"`` (default), ``"fused"`` or ``"unfused"``; may be set at any time, on all
            ranks alike.
    """

    _group_attributes = ("group",)

    # The axis of the weight that is cut, True if the bias is cut with it, and the word for the cut
    # features in errors ("in" or "out").
    _axis: ClassVar[int]
    _cuts_bias: ClassVar[bool]
    _cut_name: ClassVar[str]

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        parts: Sequence[int],
        sequence_parallel: bool,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.rank, self.world_size = rank_and_size(group)
        if in_features < 1 or out_features < 1:
            raise ArgumentError(
                f"{name}: in_features and out_features must be positive; got {in_features} and "
                f"{out_features}."
            )
        # Parts are cut one by one, so the ranks must divide each of them.
        for part in parts:
            if part % self.world_size:
                cut = f"{self._cut_name}_features" if len(parts) == 1 else "parts"
                raise ArgumentError(
                    f"{name}: {cut} must divide evenly over {self.world_size} ranks; got {part}. "
                    f"Pad the layer to {round_up(part, self.world_size)} {self._cut_name}put "
                    "features with zeros, "
                    f"or use a group whose size divides {part}."
                )
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.parts = tuple(parts)
        self.sequence_parallel, self.impl = sequence_parallel, "auto"
        shape = [out_features, in_features]
        shape[self._axis] //= self.world_size
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(
                torch.empty(
                    shape[0] if self._cuts_bias else out_features, device=device, dtype=dtype
                )
            )
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        # State dicts of the full layer load too: the hook cuts their tensors first.
        self.register_load_state_dict_pre_hook(_take_own_shard)  # type: ignore[no-untyped-call]

    @classmethod
    def _copy_of(cls, linear: nn.Linear, group: dist.ProcessGroup | None, **options: Any) -> Self:
        """Return a layer with this rank's shard of ``linear`` and its flags.

        Args:
            options: Further arguments of the layer.
        """
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        # The layer is made on the meta device. The copies have the full layer's dtype and device.
        layer = cls(*sizes, group=group, device="meta", **options)
        with torch.no_grad():
            layer.weight = nn.Parameter(
                layer.shard_of(linear.weight).contiguous().clone(), linear.weight.requires_grad
            )
            if linear.bias is not None:
                bias = layer.shard_of(linear.bias) if cls._cuts_bias else linear.bias
                layer.bias = nn.Parameter(bias.clone(), linear.bias.requires_grad)
        return layer.train(linear.training)

    def reset_parameters(self) -> None:
        """Draw the parameters as ``nn.Linear`` does: uniform within ``1 / sqrt(in_features)``.

        Ranks must have the same seed, also because parameters that are not sharded must be equal.
        They then get the shards of the layer that ``nn.Linear(in_features, out_features)`` draws
        with that seed.
        """
        # The full layer is drawn, and this rank's shard of it kept: the random numbers of a shard
        # depend on all that were drawn before it.
        with torch.no_grad():
            full = self.weight.new_empty(self.out_features, self.in_features)
            nn.init.kaiming_uniform_(full, a=math.sqrt(5))
            self.weight.copy_(self.shard_of(full))
            if self.bias is not None:
                bound = 1 / math.sqrt(self.in_features)
                full = self.bias.new_empty(self.out_features)
                nn.init.uniform_(full, -bound, bound)
                self.bias.copy_(self.shard_of(full) if self._cuts_bias else full)

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor that is cut as the weight or the bias is.

        It serves for gradients and optimizer states, too.

        Args:
            full: ``[N, K]``, or ``[N]`` if the bias is sharded.
        """
        axis = self._axis if full.dim() > 1 else 0
        # Each part is cut by itself, so that a rank has its share of every stacked projection.
        pieces = [
            part.chunk(self.world_size, axis)[self.rank]
            for part in full.split(list(self.parts), axis)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)

    def whole(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Assemble the full tensor from all ranks' shards, in rank order.

        It is the inverse of :meth:`shard_of`.
        """
        axis = self._axis if shards[0].dim() > 1 else 0
        sizes = [part // self.world_size for part in self.parts]
        by_part = zip(*(shard.split(sizes, axis) for shard in shards), strict=True)
        return torch.cat([piece for pieces in by_part for piece in pieces], axis)

    def _sharded(self) -> list[str]:
        # A bias that is added once, after a sum over ranks, is the same on every rank.
        has_bias = getattr(self, "bias", None) is not None
        return ["weight", "bias"] if self._cuts_bias and has_bias else ["weight"]

    def _sharing(self) -> Sharing:
        return Sharing(self.group)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if is_gathering() and self.world_size > 1:
            for key in [prefix + name for name in self._sharded()]:
                # Where FSDP saves on its first rank alone, others have no parameters.
                if key in destination:
                    name = key.removeprefix(prefix)
                    destination[key] = self._whole(name, destination[key])

    def _whole(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a parameter, of which ``shard`` is this rank's; collective."""
        return self._of_all_ranks(name, shard, self.whole)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, "
            f"rank={self.rank} of {self.world_size}, impl={self.impl}"
        ) + (", sequence_parallel=True" if self.sequence_parallel else "")


def _take_own_shard(
    module: ParallelLinear, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Replace full tensors by what this rank holds of them, before a state dict is loaded."""
    full = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
    for name in module._sharded():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and tuple(value.shape) == full[name]:
            state_dict[prefix + name] = module.shard_of(undistributed(value))
    module._distribute(state_dict, prefix)


@torch.no_grad()
def unsharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return ``module.state_dict()`` with all ranks' shards of its parameters.

    Collective; every rank gets the whole parameters: full weights of parallel linear layers, all
    experts of :class:`MoE` and all tables of :class:`ShardedEmbeddingBags`. Parameters that FSDP2
    has sharded are whole, too. It loads into any number of ranks, and, without experts and tables,
    into the model before its ``nn.Linear`` layers were sharded. The whole parameters must fit into
    memory beside the model on every rank.

    The names are those of ``module.state_dict()``, whatever wrappers the module has. A parameter
    with several names has one tensor under all of them.

    Raises:
        GroupError: this rank is not a member of a layer's group.

    Example:
        >>> state = interlace.nn.unsharded_state_dict(model)  # on every rank
        >>> if dist.get_rank() == 0: torch.save(state, "model.pt")
        >>> state = torch.load("model.pt", weights_only=True)
        >>> model.load_state_dict(state)  # on any number of ranks
    """
    # Layers put full tensors into the place of their shards themselves, so it does not matter how
    # wrappers name them. Other modules that have such a parameter, as a tied embedding, are asked
    # for it by hooks.
    owners = {
        id(getattr(layer, name)): (layer, name)
        for layer in module.modules()
        if isinstance(layer, ParallelLinear) and layer.world_size > 1
        for name in layer._sharded()
    }
    with gathering(), contextlib.ExitStack() as hooks:
        for other in module.modules():
            if not isinstance(other, ParallelLinear):
                tied = {
                    name: owners[id(parameter)]
                    for name, parameter in other._parameters.items()
                    if id(parameter) in owners
                }
                if tied:
                    hook = functools.partial(_save_tied, tied)
                    hooks.callback(other.register_state_dict_post_hook(hook).remove)
        state: dict[str, Any] = module.state_dict()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = undistributed(value)
    return state


def _save_tied(
    tied: dict[str, tuple[ParallelLinear, str]],
    _: nn.Module,
    state: dict[str, Any],
    prefix: str,
    *__: object,
) -> None:
    """Put full tensors into the place of shards that another module has from parallel layers."""
    for key, (layer, name) in tied.items():
        state[prefix + key] = layer._whole(name, state[prefix + key])
