"""``RowParallelLinear``: a linear layer whose weight is sharded along its input features."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from interlace.errors import ArgumentError
from interlace.ops.gemv_all_reduce.api import gemv_all_reduce


class RowParallelLinear(nn.Module):
    """``y = x @ weight.T + bias`` with K input features cut into R equal shards, one a rank.

    It takes a column-parallel layer's output as that layer leaves it, each rank its own features: the second
    layer of a tensor-parallel MLP, or attention's output projection.

    Dimensions: N output features, K input features, R ranks, ``...`` any leading dimensions (tokens).

    Forward::

        x_shard_k [..., K/R],  weight_shard_k [N, K/R],  bias [N]
        y [..., N] = sum over ranks r of x_shard_k(r) @ weight_shard_k(r).T, + bias once      the same on every rank

    Backward, without communication, because ``grad_y`` is the same on every rank::

        grad_x_shard_k [..., K/R]    = grad_y @ weight_shard_k
        grad_weight_shard_k [N, K/R] = grad_y.T @ x_shard_k          (leading dimensions flattened)
        grad_bias [N]                = sum over leading dimensions of grad_y

    The sum over ranks is float32 in rank order (:func:`interlace.gemv_all_reduce`, in whose kernel multiplication and
    communication overlap). The module's parameters are ``weight``, which is ``weight_shard_k``, and ``bias``, so
    ``state_dict`` holds this rank's shard. To start from a full layer, use :meth:`from_linear`.

    Args:
        in_features: K, of the full layer; R must divide it.
        out_features: N.
        bias: whether there is one; every rank holds all of it.
        group: the ranks that share the layer; default: the default process group, or this process on its own.
        device, dtype: of the parameters; float16, bfloat16 or float32.

    Attributes:
        weight: ``[N, K/R]``, columns ``rank * K/R`` to ``(rank + 1) * K/R`` of the full weight.
        bias: ``[N]`` or None.
        impl: ``"auto"`` (default), ``"fused"`` or ``"unfused"``; may be set at any time, on all ranks alike.

    Raises:
        ArgumentError: R does not divide ``in_features``, or a size is not positive; in forward: x does not end in K/R.

    Example:
        >>> down = interlace.nn.RowParallelLinear(14336, 4096, bias=False)   # 4 ranks: weight [4096, 3584]
        >>> y = down(hidden_shard_k)                                         # [2, 7, 3584] -> [2, 7, 4096]
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = _place(group)
        if in_features < 1 or out_features < 1:
            raise ArgumentError(
                f"RowParallelLinear: in_features and out_features must be positive; got {in_features} and {out_features}."
            )
        if in_features % self.world_size:
            raise ArgumentError(
                f"RowParallelLinear: in_features must divide evenly over {self.world_size} ranks; got {in_features}. "
                f"Pad the layer to {-(-in_features // self.world_size) * self.world_size} input features with zeros, "
                f"or use a group whose size divides {in_features}."
            )
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.impl = "auto"
        shard = torch.empty(out_features, in_features // self.world_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(shard)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: dist.ProcessGroup | None = None) -> RowParallelLinear:
        """This rank's shard of a full layer, which every rank holds. The parameters are copies.

        Raises:
            ArgumentError: R does not divide the layer's input features.
        """
        bias = linear.bias
        module = cls(linear.in_features, linear.out_features, bias is not None, group=group, device="meta")
        with torch.no_grad():
            shard = linear.weight[:, module._columns()].clone(memory_format=torch.contiguous_format)
        module.weight = nn.Parameter(shard, requires_grad=linear.weight.requires_grad)
        if bias is not None:
            module.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        return module.train(linear.training)

    def reset_parameters(self) -> None:
        """Initialise as ``nn.Linear(in_features, out_features)``: uniform within ``1 / sqrt(in_features)``.

        Draws the full weight and keeps this rank's columns: ranks with the same seed (as they must have, for their
        biases to agree) get the shards of the very layer that ``nn.Linear`` gives with that seed.
        """
        with torch.no_grad():
            full = self.weight.new_empty(self.out_features, self.in_features)
            nn.init.kaiming_uniform_(full, a=math.sqrt(5))
            self.weight.copy_(full[:, self._columns()])
            if self.bias is not None:
                bound = 1 / math.sqrt(self.in_features)
                nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x_shard_k [..., K/R] -> y [..., N]``; collective. On the current stream, without synchronising the host.

        Raises:
            ArgumentError: x does not end in K/R, or its dtype or device is not the weight's.
        """
        columns = self.weight.shape[1]
        if x.dim() == 0 or x.shape[-1] != columns:
            raise ArgumentError(
                f"RowParallelLinear: x must be this rank's features, [..., {columns}], of {self.in_features} in all; "
                f"got shape {list(x.shape)}. Cut x along its last dimension first."
            )
        flat = x if x.dim() <= 2 else x.flatten(0, -2)
        y = gemv_all_reduce(flat, self.weight, self.bias, group=self.group, impl=self.impl)
        return y if x.dim() <= 2 else y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.rank} of {self.world_size}, impl={self.impl}"
        )

    def _columns(self) -> slice:
        width = self.in_features // self.world_size
        return slice(self.rank * width, (self.rank + 1) * width)


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in ``group`` and the group's size."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ArgumentError("RowParallelLinear: the calling rank must be a member of the group; it is not.")
    return rank, dist.get_world_size(group)
