"""``ColumnParallelLinear``: a linear layer whose weight is sharded along its output features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from interlace.comm import default_name, require_same_ranks
from interlace.comm.groups.registration import entrance
from interlace.errors import ArgumentError
from interlace.gemm.gradients import replicated
from interlace.nn.autocast import operands
from interlace.nn.parallel_linear import ParallelLinear
from interlace.operators.all_gather_gemm import all_gather_gemm


class ColumnParallelLinear(ParallelLinear):
    """``y = x @ weight.T + bias`` with N output features cut into R equal shards, one per rank.

    The first layer of a tensor-parallel MLP, or attention's projection to queries, keys and values;
    the layers after it work on this rank's features, up to a :class:`RowParallelLinear`.

    Dimensions: N output features, K input features, R ranks, ``...`` any leading dimensions
    (tokens).

    Forward, without communication, because x is the same on every rank::

        x [..., K],  weight_shard_n [N/R, K],  bias_shard_n [N/R]
        y_shard_n [..., N/R] = x @ weight_shard_n.T + bias_shard_n

    Backward::

        grad_x [..., K]              = sum over ranks r of grad_y_shard_n(r) @ weight_shard_n(r)
        grad_weight_shard_n [N/R, K] = grad_y_shard_n.T @ x          (leading dimensions flattened)
        grad_bias_shard_n [N/R]      = sum over leading dimensions of grad_y_shard_n

    ``grad_x`` is the same on every rank. It comes from :func:`interlace.gemm_all_reduce`, where
    multiplication and sum overlap in one kernel.

    With ``sequence_parallel``, each rank has its share of the first dimension (the sequence, S) of
    x instead of all of it::

        x_shard_s [S/R, ..., K]  ->  y_shard_n [S, ..., N/R]

    by :func:`interlace.all_gather_gemm`; grad_x_shard_s comes from
    :func:`interlace.gemm_reduce_scatter`. Parameters that come before, such as a normalisation's
    weight, then see this rank's tokens only: sum their gradients over the ranks.

    ``state_dict`` holds this rank's shard. ``load_state_dict`` takes this rank's shard, or a full
    layer's tensors and keeps its shard of them. To start from a full layer, use
    :meth:`from_linear`; for a state dict of full layers, :func:`unsharded_state_dict`.
    ``clip_grad_norm_`` and ``GradScaler`` count all ranks' shards, and are collective.

    Args:
        in_features: K.
        out_features: N, of the full layer.
        bias: If True, the layer has a bias, of which every rank holds its N/R.
        parts: Output features of several projections whose weights are stacked, gate and up or
            queries, keys and values; they sum to N, and R must divide every part. Parts are
            sharded one by one: ``y.split([part // R for part in parts], -1)``. Default: one part,
                N.
        sequence_parallel: If True, x is sharded along its first dimension, on all ranks alike.
        group: The ranks that share the layer; default: the default process group, or this process
            alone.
        device, dtype: Device and dtype of the parameters; float16, bfloat16 or float32.

    Attributes:
        weight: ``[N/R, K]``: of each part, rows ``rank * part/R`` to ``(rank + 1) * part/R``.
        bias: ``[N/R]`` or None.
        impl: ``"auto"`` (default), ``"fused"`` or ``"unfused"``; may be set at any time, on all
            ranks alike.

    Raises:
        ArgumentError: R does not divide a part, parts do not sum to N, or a size is not positive;
            in forward: x does not end in K.

    Example:
        >>> up = interlace.nn.ColumnParallelLinear(4096, 14336, bias=False)
        >>> up.weight.shape                 # on 4 ranks
        torch.Size([3584, 4096])
        >>> hidden_shard_n = up(x)          # [2, 7, 4096] -> [2, 7, 3584]

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053); sequence parallelism: Korthikanti et al.
    (arXiv:2205.05198).
    """

    _axis, _cuts_bias, _cut_name = 0, True, "out"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parts: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        parts = [out_features] if parts is None else list(parts)
        if sum(parts) != out_features or min(parts, default=0) < 1:
            raise ArgumentError(
                "ColumnParallelLinear: parts must be positive and sum to out_features, "
                f"{out_features}; got {parts}."
            )
        super().__init__(
            in_features, out_features, bias, parts, sequence_parallel, group, device, dtype
        )

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: dist.ProcessGroup | None = None,
        *,
        parts: Sequence[int] | None = None,
        sequence_parallel: bool = False,
    ) -> ColumnParallelLinear:
        """Make this rank's shard of a full layer, which every rank holds; parameters are copies.

        Raises:
            ArgumentError: R does not divide the layer's output features, or a part of them.
        """
        return cls._copy_of(linear, group, parts=parts, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``x [..., K] -> y_shard_n [..., N/R]``; the backward pass is collective.

        Both run on the current stream.

        Raises:
            ArgumentError: x does not end in K, its dtype or device is not the weight's, its dtype
                is none of those above, or a transform of ``torch.func`` needs its gradient.
            GroupError: the layer's process group was destroyed or replaced.
        """
        require_same_ranks(type(self).__name__, self.group, self.rank, self.world_size)
        least = 2 if self.sequence_parallel else 1
        if x.dim() < least or x.shape[-1] != self.in_features:
            shape = "[sequence, ..., " if self.sequence_parallel else "[..., "
            raise ArgumentError(
                f"ColumnParallelLinear: x must be {shape}{self.in_features}]; got shape "
                f"{list(x.shape)}."
            )
        x, weight, bias = operands(type(self).__name__, x, self.weight, self.bias)
        # Gathering x is part of the operator: products of rows that have arrived begin at once.
        if self.sequence_parallel:
            y = all_gather_gemm(x.flatten(0, -2), weight, bias, group=self.group, impl=self.impl)
            return y.reshape(x.shape[0] * self.world_size, *x.shape[1:-1], y.shape[-1])
        return _linear_of_replicated(x, weight, bias, default_name(self.group), self.impl)


def _linear_of_replicated(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str, impl: str
) -> torch.Tensor:
    """Compute ``F.linear`` of an x that every rank holds; see :class:`_ReplicatedLinear`.

    Raises:
        ArgumentError: a gradient is needed within a transform of ``torch.func``.
    """
    if not (
        torch.is_grad_enabled()
        and any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    ):
        # Nothing has to be summed over the ranks later, so every transform of torch's works.
        return F.linear(x, weight, bias)
    # torch.func would ask for a form of _Replicated that it differentiates by itself, and the
    # operators in its backward pass refuse that. Dynamo, which cannot trace the question, does not
    # ask it.
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise ArgumentError(
            "ColumnParallelLinear: this layer cannot be differentiated by torch.func; got a call "
            "inside of grad, vjp, jacrev, jvp or vmap, with an input or a parameter that requires "
            "a gradient. Use loss.backward(), or torch.no_grad() around a vmap without gradients."
        )
    apply: Any = _ReplicatedLinear.apply
    y: torch.Tensor = apply(x, weight, bias, group_name, impl)
    return y


class _ReplicatedLinear(torch.autograd.Function):
    """``F.linear`` of an x that every rank holds: the gradient of x is summed over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        group_name: str,
        impl: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.group_name, ctx.impl = group_name, impl
        return F.linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        # Ranks hold different shards of the weight, so the gradient of this gradient with respect
        # to x is a sum over the ranks, too.
        if torch.is_grad_enabled():
            x = replicated(x, ctx.group_name)
        rows = grads[0].reshape(-1, w.shape[0])
        grad_x = grad_w = grad_bias = None
        # Each rank's columns give a part of the gradient of x, which all of them need.
        if ctx.needs_input_grad[0]:
            grad_x = entrance("gemm_all_reduce")(
                rows, w.T, None, None, None, w.dtype, ctx.group_name, ctx.impl, ""
            ).view_as(x)
        if ctx.needs_input_grad[1]:
            grad_w = rows.mT @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_w, grad_bias, None, None
