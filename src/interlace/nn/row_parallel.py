"""``RowParallelLinear``: a linear layer whose weight is sharded along its input features."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from interlace.comm import require_same_ranks
from interlace.errors import ArgumentError
from interlace.nn.autocast import operands
from interlace.nn.parallel_linear import ParallelLinear
from interlace.operators.gemm_all_reduce import gemm_all_reduce
from interlace.operators.gemm_reduce_scatter import gemm_reduce_scatter


class RowParallelLinear(ParallelLinear):
    """``y = x @ weight.T + bias`` with K input features cut into R equal shards, one per rank.

    Its input is the output of a column-parallel layer, of which each rank holds its own features.
    It is the second layer of a tensor-parallel MLP, or attention's output projection.

    Dimensions: N output features, K input features, R ranks, ``...`` any leading dimensions
    (tokens).

    Forward::

        x_shard_k [..., K/R],  weight_shard_k [N, K/R],  bias [N]
        y [..., N] = sum over ranks r of x_shard_k(r) @ weight_shard_k(r).T + bias

    ``y`` is the same on every rank, and the bias is added once. Backward, without communication,
    because ``grad_y`` is the same on every rank::

        grad_x_shard_k [..., K/R]    = grad_y @ weight_shard_k
        grad_weight_shard_k [N, K/R] = grad_y.T @ x_shard_k          (leading dimensions flattened)
        grad_bias [N]                = sum over leading dimensions of grad_y

    With ``sequence_parallel``, each rank gets its share of the first dimension (the sequence, S) of
    y instead of all of it::

        x_shard_k [S, ..., K/R]  ->  y_shard_s [S/R, ..., N]

    In its backward pass, ``grad_y [S, ..., N]`` is gathered from all ranks while ``grad_x_shard_k``
    is computed; the gradients are those above.

    The sum over ranks is float32 in rank order; multiplication and communication overlap in one
    kernel, which is that of :func:`interlace.gemm_all_reduce`, or of
    :func:`interlace.gemm_reduce_scatter` with ``sequence_parallel``.

    The module's parameters are ``weight``, which is ``weight_shard_k``, and ``bias``, so
    ``state_dict`` holds this rank's shard. ``load_state_dict`` takes this rank's shard, or a full
    layer's tensors and keeps its shard of them. To start from a full layer, use
    :meth:`from_linear`; for a state dict of full layers, :func:`unsharded_state_dict`.
    ``clip_grad_norm_`` and ``GradScaler`` count all ranks' shards, and are collective.

    Args:
        in_features: K, of the full layer; R must divide it.
        out_features: N.
        bias: If True, the layer has a bias, of which every rank holds a copy.
        sequence_parallel: If True, y is sharded along its first dimension, which R must divide.
        group: The ranks that share the layer; default: the default process group, or this process
            alone.
        device, dtype: Device and dtype of the parameters; float16, bfloat16 or float32.

    Attributes:
        weight: ``[N, K/R]``, columns ``rank * K/R`` to ``(rank + 1) * K/R`` of the full weight.
        bias: ``[N]`` or None.
        impl: ``"auto"`` (default), ``"fused"`` or ``"unfused"``; may be set at any time, on all
            ranks alike.

    Raises:
        ArgumentError: R does not divide ``in_features``, or a size is not positive; in forward: x
            does not end in K/R, or R does not divide its first dimension.

    Example:
        >>> down = interlace.nn.RowParallelLinear(14336, 4096, bias=False)
        >>> down.weight.shape               # on 4 ranks
        torch.Size([4096, 3584])
        >>> y = down(hidden_shard_k)        # [2, 7, 3584] -> [2, 7, 4096]
    """

    _axis, _cuts_bias, _cut_name = 1, False, "in"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, [in_features], sequence_parallel, group, device, dtype
        )

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: dist.ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> RowParallelLinear:
        """Make this rank's shard of a full layer, which every rank holds; parameters are copies.

        Raises:
            ArgumentError: R does not divide the layer's input features.
        """
        return cls._copy_of(linear, group, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``x_shard_k [..., K/R] -> y [..., N]``; collective.

        It runs on the current stream, and does not synchronise the host.

        Raises:
            ArgumentError: x does not end in K/R, or its dtype or device is not the weight's.
            GroupError: the layer's process group was destroyed or replaced.
        """
        require_same_ranks(type(self).__name__, self.group, self.rank, self.world_size)
        columns = self.weight.shape[1]
        if x.dim() == 0 or x.shape[-1] != columns:
            raise ArgumentError(
                f"RowParallelLinear: x must be this rank's features, [..., {columns}], of "
                f"{self.in_features} in all; "
                f"got shape {list(x.shape)}. Cut x along its last dimension first."
            )
        if self.sequence_parallel:
            return self._scattered(x)
        # The operator takes 2-D inputs.
        x, weight, bias = operands(type(self).__name__, x, self.weight, self.bias)
        flat = x if x.dim() == 2 else x.reshape(-1, columns)
        y = gemm_all_reduce(flat, weight, bias, group=self.group, impl=self.impl)
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _scattered(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``x_shard_k [S, ..., K/R] -> y_shard_s [S/R, ..., N]``, for sequence parallelism.

        Raises:
            ArgumentError: R does not divide S.
        """
        if x.dim() < 2 or x.shape[0] % self.world_size:
            raise ArgumentError(
                "RowParallelLinear: the first dimension of x must be the sequence and divide "
                f"evenly over {self.world_size} ranks "
                f"under sequence_parallel; got shape {list(x.shape)}. Pad the sequence."
            )
        x, weight, bias = operands(type(self).__name__, x, self.weight, self.bias)
        y = gemm_reduce_scatter(x.flatten(0, -2), weight, bias, group=self.group, impl=self.impl)
        return y.reshape(x.shape[0] // self.world_size, *x.shape[1:-1], self.out_features)
