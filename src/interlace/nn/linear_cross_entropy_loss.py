"""``LinearCrossEntropyLoss``: a language model's head and its loss, the vocabulary sharded over the
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from interlace.comm import rank_and_size, require_same_ranks
from interlace.errors import ArgumentError
from interlace.gemm.operands import require_tensor
from interlace.nn.autocast import operands
from interlace.nn.parallel_linear import ParallelLinear
from interlace.operators.linear_cross_entropy import linear_cross_entropy
from interlace.operators.linear_top_k import TopColumns, linear_top_k
from interlace.units import ceil_div


class LinearCrossEntropyLoss(ParallelLinear):
    """The cross entropy of ``x @ weight.T + bias``, whose V columns are sharded over R ranks.

    It takes the place of a language model's last linear layer (its head) and of the loss behind
    it, as ``torch.nn.LinearCrossEntropyLoss`` does on one rank. The logits of all tokens are never
    in memory at once: see :func:`interlace.linear_cross_entropy`.

    Dimensions: H width of x, V size of the vocabulary, R ranks, ``...`` any leading dimensions
    (tokens).

    Forward::

        x [..., H],  target [...],  weight_shard_v [ceil(V/R), H],  bias_shard_v [ceil(V/R)]
        logits [..., V] = x @ weight.T + bias        (of a chunk of tokens at a time)
        loss = mean over tokens of -log_softmax(logits)[target]

    Backward: the gradient of x is the sum over ranks, the same on every rank, and each rank has the
    gradient of its shard. Unless ``reduction`` is ``"none"``, the forward pass has computed both.

    With ``sequence_parallel``, each rank has its share of the first dimension (the sequence, S) of
    x; ``target`` is of the whole sequence::

        x_shard_s [S/R, ..., H],  target [S, ...]  ->  loss

    The gradient of x is this rank's share of the sum. Parameters that come before, such as a
    normalisation's weight, then see this rank's tokens only: sum their gradients over the ranks.

    R need not divide V. If it does not, the last rank's shard ends with rows of padding, which are
    0, count for no token and have a gradient of 0.

    ``state_dict`` holds this rank's shard. ``load_state_dict`` takes this rank's shard, or a full
    layer's tensors and keeps its shard of them. To start from a full layer, use
    :meth:`from_linear`; for a state dict of full layers, :func:`unsharded_state_dict`, whose
    weight is ``[V, H]`` without padding. ``clip_grad_norm_`` and ``GradScaler`` count all ranks'
    shards, and are collective.

    Args:
        in_features: H.
        vocabulary: V; every rank must have a column of it.
        bias: If True, the logits have a bias, of which every rank holds its shard.
        ignore_index: Tokens with this target count for nothing.
        label_smoothing: From 0 to less than 1, as in ``F.cross_entropy``.
        z_loss: Factor of the square of each token's ``logsumexp(logits)``, which is added to its
            loss.
        reduction: ``"mean"`` over the tokens that count, ``"sum"``, or ``"none"``.
        chunk_rows: Tokens whose logits are in memory at a time; default: as many as have 256 MiB.
        sequence_parallel: If True, x is sharded along its first dimension, on all ranks alike.
        group: The ranks that share the layer; default: the default process group, or this process
            alone.
        device, dtype: Device and dtype of the parameters; float16, bfloat16 or float32.

    Attributes:
        weight: ``[ceil(V/R), H]``: rows from ``rank * ceil(V/R)`` on of the full weight.
        bias: ``[ceil(V/R)]`` or None.
        out_features: V.
        ignore_index, label_smoothing, z_loss, reduction, chunk_rows: The arguments; may be set at
            any time, on all ranks alike.
        impl: ``"auto"`` (default), ``"fused"`` or ``"unfused"``; may be set at any time, on all
            ranks alike.

    Raises:
        ArgumentError: V is too small for R ranks, or a size is not positive; in forward: x does not
            end in H, or target is not of the tokens of x.

    Example:
        >>> head = interlace.nn.LinearCrossEntropyLoss(4096, 128256)
        >>> head.weight.shape               # on 4 ranks
        torch.Size([32064, 4096])
        >>> loss = head(x, target)          # [2, 4096, 4096], [2, 4096] -> a float32 number
    """

    _axis, _cuts_bias, _cut_name = 0, True, "out"

    def __init__(
        self,
        in_features: int,
        vocabulary: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        chunk_rows: int | None = None,
        sequence_parallel: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _, ranks = rank_and_size(group)
        if (ranks - 1) * ceil_div(vocabulary, ranks) >= vocabulary:
            raise ArgumentError(
                f"LinearCrossEntropyLoss: vocabulary must give each of {ranks} ranks a column, "
                f"where all but the last have {ceil_div(vocabulary, ranks)}; got {vocabulary}. Use "
                "a group of fewer ranks."
            )
        # There are no parts that the ranks must divide: the vocabulary is padded.
        super().__init__(in_features, vocabulary, bias, [], sequence_parallel, group, device, dtype)
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.reduction, self.chunk_rows = reduction, chunk_rows

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> LinearCrossEntropyLoss:
        """Make this rank's shard of a full layer, which every rank holds; parameters are copies.

        Args:
            options: Further arguments of the class: ``ignore_index``, ``label_smoothing``,
                ``z_loss``, ``reduction``, ``chunk_rows``, ``sequence_parallel``.

        Raises:
            ArgumentError: The layer has too few output features for R ranks.
        """
        return cls._copy_of(linear, group, **options)

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor of the weight's or the bias's shape, padded with
        zeros.

        It serves for gradients and optimizer states, too.

        Args:
            full: ``[V, H]`` or ``[V]``.
        """
        rows = ceil_div(self.out_features, self.world_size)
        own_rows = full[self.rank * rows : (self.rank + 1) * rows]
        return F.pad(own_rows, [0, 0] * (full.dim() - 1) + [0, rows - len(own_rows)])

    def whole(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Assemble the full tensor from all ranks' shards, in rank order, without the padding.

        It is the inverse of :meth:`shard_of`.
        """
        *others, last = shards
        # The padding goes before the copy, so that a file does not have it either.
        return torch.cat([*others, last[: self.out_features - len(others) * len(last)]])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compute the loss, a float32 number, or with ``reduction="none"`` one for each token, of
        the shape of ``target``; collective.

        It runs on the current stream, and does not synchronise the host.

        Args:
            x: ``[..., H]``, the same on every rank, or with ``sequence_parallel`` this rank's
                ``[S/R, ..., H]``.
            target: int32 or int64, the column of each token, of all ranks' tokens; the same on
                every rank.

        Raises:
            ArgumentError: x does not end in H, its dtype or device is not the weight's, target is
                not of the tokens of x, or an attribute is out of its range.
            GroupError: The layer's process group was destroyed or replaced.
        """
        require_same_ranks(type(self).__name__, self.group, self.rank, self.world_size)
        self._require_features(x)
        require_tensor(f"{type(self).__name__}: target", target)
        tokens = list(x.shape[:-1])
        if self.sequence_parallel:
            tokens[0] *= self.world_size
        if list(target.shape) != tokens:
            raise ArgumentError(
                f"{type(self).__name__}: target must have the tokens' shape, {tokens}; got shape "
                f"{list(target.shape)}."
            )
        x, weight, bias = operands(type(self).__name__, x, self.weight, self.bias)
        return linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
            vocabulary=self.out_features,
            sequence_parallel=self.sequence_parallel,
            chunk_rows=self.chunk_rows,
            group=self.group,
            impl=self.impl,
        )

    def top_k(self, x: torch.Tensor, k: int = 1) -> TopColumns:
        """Choose the k columns with the highest logits, as in decoding, without a gather of the
        logits; collective, and without gradients. See :func:`interlace.linear_top_k`.

        Args:
            x: ``[..., H]``, the same on every rank.
            k: 1 to 64.

        Raises:
            ArgumentError: x does not end in H, its dtype or device is not the weight's, or k is out
                of its range.
            GroupError: The layer's process group was destroyed or replaced.
        """
        require_same_ranks(type(self).__name__, self.group, self.rank, self.world_size)
        self._require_features(x)
        with torch.no_grad():
            x, weight, bias = operands(type(self).__name__, x, self.weight, self.bias)
            return linear_top_k(
                x, weight, k, bias, vocabulary=self.out_features, group=self.group, impl=self.impl
            )


__all__ = ["LinearCrossEntropyLoss"]
