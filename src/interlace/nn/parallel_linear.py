"""Linear layers whose weight is sharded over ranks, and state dicts of the full layers."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from interlace.comm import default_name, rank_and_size, require_same_ranks
from interlace.comm.groups.registration import entrance
from interlace.errors import ArgumentError
from interlace.gemm import invariance
from interlace.gemm.gradients import replicated, unviewed
from interlace.gemm.operands import require_tensor
from interlace.nn.autocast import operands
from interlace.nn.shard_holder import ShardHolder, gathering, is_gathering, undistributed
from interlace.nn.sharded_parameters import Sharing
from interlace.operators.all_gather_gemm import all_gather_gemm
from interlace.operators.gemm_all_reduce import gemm_all_reduce
from interlace.operators.gemm_reduce_scatter import gemm_reduce_scatter
from interlace.units import ceil_div, round_up


class ParallelLinear(ShardHolder):
    """Base of the layers whose weight ``[N, K]`` is sharded: :class:`ColumnParallelLinear`,
    :class:`RowParallelLinear` and :class:`LinearCrossEntropyLoss`.

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
        # Only a layer without parts pads what the ranks do not divide.
        shape[self._axis] = ceil_div(shape[self._axis], self.world_size)
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

    def _require_features(self, x: torch.Tensor) -> None:
        """Refuse an x that does not end in all input features, or has no sequence where it must.

        Raises:
            ArgumentError: x is no dense tensor of this rank, or has another shape.
        """
        require_tensor(f"{type(self).__name__}: x", x)
        least = 2 if self.sequence_parallel else 1
        if x.dim() < least or x.shape[-1] != self.in_features:
            shape = "[sequence, ..., " if self.sequence_parallel else "[..., "
            raise ArgumentError(
                f"{type(self).__name__}: x must be {shape}{self.in_features}]; got shape "
                f"{list(x.shape)}."
            )

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
    weight, then see this rank's tokens only: :func:`sum_replicated_gradients` completes their
    gradients.

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
        self._require_features(x)
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
        return _product(x, weight, bias)
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


def _product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``F.linear``; where calls must be batch-invariant, by Interlace's own kernel.

    In a graph of ``torch.compile``, the pass puts that kernel in its place.
    """
    if torch.compiler.is_compiling() or not invariance.is_enabled():
        return F.linear(x, w, bias)
    (y,) = entrance("linears")(x.reshape(-1, x.shape[-1]), [w], [bias])
    product: torch.Tensor = y.view(*x.shape[:-1], w.shape[0])
    return product


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
        # With a bias, torch's product of more than two dimensions is a view of one of two.
        return unviewed(_product(x, w, bias))

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
        require_tensor("RowParallelLinear: x", x)
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


def _take_own_shard(
    module: ParallelLinear,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *_: object,
) -> None:
    """Replace full tensors by what this rank holds of them, before a state dict is loaded."""
    full = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
    for name in module._sharded():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and tuple(value.shape) == full[name]:
            shard = module.shard_of(undistributed(value))
            # A parameter that is a view would keep the full layer in memory, and in files.
            is_kept = metadata.get("assign_to_params_buffers", False) and module.world_size > 1
            state_dict[prefix + name] = shard.clone() if is_kept else shard
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
        ArgumentError: a layer's parameter of which ranks hold shards is computed from others, by a
            parametrization, weight normalisation or pruning.

    Example:
        >>> state = interlace.nn.unsharded_state_dict(model)  # on every rank
        >>> if dist.get_rank() == 0: torch.save(state, "model.pt")
        >>> state = torch.load("model.pt", weights_only=True)
        >>> model.load_state_dict(state)  # on any number of ranks
    """
    for name, layer in module.named_modules():
        if isinstance(layer, ShardHolder) and layer.world_size > 1:
            _require_own_parameters(name, layer)
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
        for submodule in module.modules():
            if not isinstance(submodule, ParallelLinear):
                tied = {
                    name: owners[id(parameter)]
                    for name, parameter in submodule._parameters.items()
                    if id(parameter) in owners
                }
                if tied:
                    hook = functools.partial(_save_tied, tied)
                    hooks.callback(submodule.register_state_dict_post_hook(hook).remove)
        state: dict[str, Any] = module.state_dict()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = undistributed(value)
    return state


def _require_own_parameters(name: str, layer: ShardHolder) -> None:
    """Refuse a layer with a parameter that is computed from others: how ranks share those is not
    known.
    """
    for key in layer._sharded():
        # Older utilities than parametrizations put weight_v or weight_orig in the place of weight.
        is_older = key not in layer._parameters and any(
            other.startswith(f"{key}_") for other in layer._parameters
        )
        if is_older or parametrize.is_parametrized(layer, key):
            raise ArgumentError(
                "unsharded_state_dict: parameters of which ranks hold shards must not be computed "
                f"from others; got {key} of {type(layer).__name__} {name!r}. Remove the "
                "parametrization first, or save a state_dict() on each rank."
            )


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
