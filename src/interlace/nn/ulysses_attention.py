"""``UlyssesAttention``: attention over a sequence that is sharded over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from interlace.comm import rank_and_size, require_same_ranks
from interlace.errors import ArgumentError
from interlace.gemm.operands import require_tensor
from interlace.gemm.splits import validated_list
from interlace.nn.autocast import operands
from interlace.nn.group_member import GroupMember
from interlace.operators.all_to_all_gemm import all_to_all_gemm
from interlace.operators.gemm_all_to_all_columns import (
    gemm_all_to_all_columns,
    qkv_column_ranges,
)


class UlyssesAttention(GroupMember, nn.Module):
    """Self-attention with its QKV and output products, of a sequence that R ranks share out.

    Each rank has some tokens. The QKV product's columns go to the ranks that own their heads, each
    rank attends over the whole sequence of its own heads, and the output product takes the heads
    back (Ulysses' sequence parallelism; DeepSpeed's ``DistributedAttention`` with its two linear
    layers).

    Dimensions: S_s tokens on rank s, S of all ranks, B samples, H width, D columns of a head.

    Forward::

        x_shard_s [S_s, B, H] or [S_s, H],  qkv.weight [(heads + 2 kv_heads) D, H]
        q [B, heads / R, S, D],  k, v [B, max(kv_heads / R, 1), S, D]
        attend(q, k, v) [B, heads / R, S, D],  out.weight [H, heads D]
        -> [S_s, B, H] or [S_s, H]

    Every rank holds both weights whole, and has the gradients of its own tokens: sum them over the
    ranks, by ``sum_replicated_gradients(model, average=False)`` where the ranks' losses add up to
    the loss. Every rank must run the backward pass.

    Override :meth:`attend` for rotary embeddings, a mask or another kernel.

    Args:
        width: H.
        heads: Query heads; R divides them.
        kv_heads: Key heads, and as many value heads; default: ``heads``. They divide ``heads``, and
            R divides them or they divide R: with fewer than ranks, several ranks have the same one.
        head_dim: D; default: ``width // heads``.
        bias: If True, both products have a bias.
        is_causal: If True, a token attends to itself and to those before it.
        group: The ranks that share the sequence; default: the default process group, or this
            process alone.
        device, dtype: Device and dtype of the parameters; float16, bfloat16 or float32.

    Attributes:
        qkv, out: The two ``nn.Linear``, whose parameters they hold: queries of all heads, then
            keys, then values. They are not called.
        heads, kv_heads, head_dim, is_causal: The arguments.
        impl: ``"auto"`` (default), ``"fused"``, ``"unfused"`` or ``"batch_invariant"``, which says
            nothing of the attention between the products; may be set at any time, on all ranks
            alike.

    Raises:
        ArgumentError: The heads cannot be shared out over the ranks; in forward: x is not ``[S_s,
            ..., H]``.

    Example:
        >>> attention = interlace.nn.UlyssesAttention(4096, 32, 8, is_causal=True)
        >>> y = attention(x)                # [2048, 1, 4096] on each of 4 ranks: 8192 tokens
    """

    _group_attributes = ("group",)

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        is_causal: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.is_causal, self.group = heads, is_causal, group
        self.kv_heads = heads if kv_heads is None else kv_heads
        # Heads that are not positive are refused below.
        self.head_dim = width // max(heads, 1) if head_dim is None else head_dim
        self.rank, self.world_size = rank_and_size(group)
        self._column_ranges = qkv_column_ranges(
            self.heads, self.kv_heads, self.head_dim, self.world_size
        )
        columns = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(width, columns, bias, device=device, dtype=dtype)
        self.out = nn.Linear(heads * self.head_dim, width, bias, device=device, dtype=dtype)
        self.impl = "auto"

    def forward(self, x: torch.Tensor, splits: Sequence[int] | None = None) -> torch.Tensor:
        """Attend over all ranks' tokens, and return those of this rank.

        Args:
            x: ``[S_s, ..., H]``: this rank's tokens, the sequence first.
            splits: Tokens of each rank, the same list on every rank. Default: all ranks have as
                many as this one.

        Raises:
            ArgumentError: x has another shape, dtype or device than the layer takes, or the splits
                do not fit.
            GroupError: The layer's process group was destroyed or replaced.
        """
        name = type(self).__name__
        require_tensor(f"{name}: x", x)
        if x.dim() < 2 or x.shape[-1] != self.qkv.in_features:
            raise ArgumentError(
                f"{name}: x must be [S_s, ..., {self.qkv.in_features}]; got shape {list(x.shape)}."
            )
        splits = validated_list(name, "splits", splits)
        require_same_ranks(name, self.group, self.rank, self.world_size)
        samples = x.shape[1:-1].numel()
        rows = None if splits is None else [samples * count for count in splits]
        qkv = self._parameters_of("qkv", x)
        columns = gemm_all_to_all_columns(
            qkv[0].reshape(-1, x.shape[-1]),
            *qkv[1:],
            column_ranges=self._column_ranges,
            splits=rows,
            group=self.group,
            impl=self.impl,
        )
        own_ranges = self._column_ranges[self.rank]
        # Not from the number of rows, which is 0 without samples.
        tokens = x.shape[0] * self.world_size if splits is None else sum(splits)
        q, k, v = (
            # Heads before tokens, as attention takes them.
            part.unflatten(0, (tokens, samples))
            .unflatten(2, (-1, self.head_dim))
            .permute(1, 2, 0, 3)
            for part in columns.split([end - first for first, end in own_ranges], 1)
        )
        attended = self.attend(q, k, v).permute(2, 0, 1, 3).flatten(2).flatten(0, 1)
        y = all_to_all_gemm(
            *self._parameters_of("out", attended), splits=rows, group=self.group, impl=self.impl
        )
        return y.reshape(x.shape)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return attention of this rank's heads over the whole sequence.

        Args:
            q: ``[B, heads / R, S, D]``.
            k, v: ``[B, kv heads of this rank, S, D]``.

        Returns:
            ``[B, heads / R, S, D]``.
        """
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=self.is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _parameters_of(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return x, and the weight and the bias of a product, in the dtype that they have there."""
        linear = self.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        return operands(f"{type(self).__name__}.{name}", x, linear.weight, linear.bias)

    def extra_repr(self) -> str:
        """Describe the heads."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
