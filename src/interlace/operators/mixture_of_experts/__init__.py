"""Mixture of experts: dispatch, experts and combine; see README.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import default_name, process_group_named, rank_and_size
from interlace.comm.groups.group import known_nodes
from interlace.comm.groups.registration import entrance, past_autograd, recalling_group
from interlace.comm.groups.reservation import Reservation
from interlace.comm.host.nodes import declared_ranks_per_node
from interlace.costs.mixture_of_experts import ExpertsCall
from interlace.gemm import invariance
from interlace.gemm.dispatch import recall_key
from interlace.gemm.operands import FLOAT8
from interlace.operators.mixture_of_experts import (
    chunked,
    decode,
    fused,
    stock,
)
from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.call import validate
from interlace.operators.mixture_of_experts.choice import ExpertTerms, choose, decide, tile_of
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig
from interlace.operators.mixture_of_experts.layout import ExpertSizes
from interlace.registry import BATCH_INVARIANT, Implementation, Operator, operator


@operator
class MixtureOfExperts(Operator):
    """Dispatch, experts and combine: each token's sum of its experts' outputs."""

    name = "mixture_of_experts"
    collective = "all_to_all"
    sizes = ("tokens", "hidden", "ffn", "experts", "top_k")
    config_type = MixtureOfExpertsConfig
    choosers = ("auto", BATCH_INVARIANT)
    command_module = "interlace.cli.scripts"
    implementations = (
        Implementation(
            "fused",
            "kernels that send rows as they compute them",
            fused.run,
            reservation=fused.reservation,
            backward=fused.backward,
            schedule="by_slot",
            is_batch_invariant=True,
        ),
        Implementation(
            "decode",
            "kernels for few tokens, which read each weight once",
            decode.run,
            decode.refusal,
            reservation=decode.reservation,
            schedule="by_token",
            is_batch_invariant=True,
        ),
        Implementation(
            "chunked",
            "torch._grouped_mm on tokens that arrive in slices, whose sums leave in slices",
            chunked.run,
            chunked.refusal,
            schedule="to_all",
            spans_nodes=True,
            backward=chunked.backward,
        ),
        Implementation(
            "unfused",
            "torch._grouped_mm between all-gather and reduce-scatter, or, where that takes no such "
            "call, F.linear between two of all_to_all_single",
            stock.run,
            reservation=lambda _: Reservation(),
            schedule="to_all",
            spans_nodes=True,
            is_predictable=stock.is_grouped,
            backward=stock.backward,
            alias="nccl",
        ),
    )

    def choose(self, *, terms: ExpertTerms, device: torch.device) -> Any:  # type: ignore[override]
        """Return what ``impl="auto"`` runs for a call of these sizes, and why."""
        return choose(terms, device)

    def timed_call(self, result: Mapping[str, Any]) -> ExpertsCall | None:
        """Return the call whose times a benchmark's result holds, if it is a forward pass through a
        layer of SwiGLU with even routing.
        """
        is_such_a_pass = (
            result.get("part") in ("forward", "decoding")
            and result["routing"] == "balanced"
            and result.get("form", "swiglu") == "swiglu"
        )
        if not is_such_a_pass:
            return None
        sizes: dict[str, Any] = {name: int(result[name]) for name in (*self.sizes, "world_size")}
        return ExpertsCall(**sizes, itemsize=4 if result["dtype"] == "float32" else 2)

    def timed_tile(self, implementation: str, call: Any) -> tuple[int, int]:
        """Return the rows and columns of the tiles of an implementation's products."""
        return tile_of(implementation, call)

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes, by name."""
        options = ("b_in", "b_out", "w_in_scale", "w_out_scale", "activation")
        return ("x", "experts", "weights", "w_in", "w_out"), options

    def sized(  # type: ignore[override]
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        w_in: torch.Tensor,
        w_out: torch.Tensor,
        *,
        b_in: torch.Tensor | None = None,
        b_out: torch.Tensor | None = None,
        w_in_scale: torch.Tensor | None = None,
        w_out_scale: torch.Tensor | None = None,
        activation: str | ExpertActivation = "silu",
        world_size: int,
        nodes: int = 1,
    ) -> ExpertTerms:
        """Return the properties of a call that is explained, once its arguments are validated; it
        has no capacity.
        """
        the_activation = ExpertActivation.of(activation)
        validate(
            x, experts, weights, w_in, w_out, b_in, b_out, w_in_scale, w_out_scale, the_activation,
            None, world_size,
        )  # fmt: skip
        sizes = ExpertSizes.of(x, experts, w_in, world_size, max(1, len(x)))
        keeps = _keeps_gradients(x, weights, w_in, w_out, b_in, b_out)
        return ExpertTerms(sizes, x.dtype, x.device.type, keeps, nodes, w_in.dtype == FLOAT8)

    def explain(
        self,
        *tensors: Any,
        world_size: int,
        nodes: int = 1,
        lacking: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> tuple[str, str, str]:
        """Return a description of a call, what ``impl="auto"`` runs, and the reason."""
        terms = self.sized(*tensors, world_size=world_size, nodes=nodes, **options)
        x, sizes = tensors[0], terms.sizes
        choice = decide(terms, x.device, invariance.effective_impl(self, self.choosers[0]))
        chosen = choice.impl
        if chosen in ("fused", "decode"):
            chosen += f" ({choice.config})"
        name = str(x.dtype).removeprefix("torch.")
        if terms.is_float8:
            name += " with weights of float8"
        call = (
            f"{self.name} of {sizes.tokens} tokens per rank, top {sizes.top_k} of {sizes.experts} "
            f"experts {sizes.hidden} x {sizes.ffn}, {name}"
        )
        if choice.impl in lacking:
            reason = f"{choice.impl} needs {lacking[choice.impl]}; {choice.reason}"
            return call, "unfused", reason
        return call, chosen, choice.reason


_DECLARATION = MixtureOfExperts()


def mixture_of_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    b_in: torch.Tensor | None = None,
    b_out: torch.Tensor | None = None,
    *,
    w_in_scale: torch.Tensor | None = None,
    w_out_scale: torch.Tensor | None = None,
    activation: str | ExpertActivation = "silu",
    capacity: int | None = None,
    group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    config: MixtureOfExpertsConfig | None = None,
) -> torch.Tensor:
    """Send tokens to the experts that a router chose, and bring the weighted sum of their outputs
    back.

    Dimensions: T tokens of this rank, k experts per token, R ranks, L experts per rank (E = R L in
    total; rank r has those from r L on), F an expert's inner width. ``y[t] = sum over j of
    weights[t, j] * f(x[t], experts[t, j])``, where ``f(x, e) = w_out[e] @ (silu(w_in[e, :, 0] @ x)
    * (w_in[e, :, 1] @ x))`` (SwiGLU, as in Mixtral). Both products may have a bias, ``activation``
    may be another one, and experts may have no gate.

    By default two fused kernels: tokens go to their experts' ranks while the first product works
    on those that have arrived; tiles of the second product go straight to the tokens' ranks.
    Nothing waits for the host: all shapes follow from T, k, L, F and ``capacity``, so memory is for
    the worst case, unless ``capacity`` says less.

    Products accumulate in float32. The sum over j is float32, in the order of j: the same bits in
    every run. Runs on the current stream, without synchronising the host; calls of one group on
    several streams are put in order.

    Weights of float8_e4m3fn have a scale for each 128 x 128 of them, as DeepSeek V3 and the models
    after it are published: ``w_in_scale`` and ``w_out_scale``. Tokens become float8 before they
    travel, with a scale for each 128 elements, and so does the activation, which is rounded to x's
    dtype first. There are no gradients, biases and experts without a gate then, and hidden and F
    must be multiples of 128.

    Args:
        x: ``[T, hidden]``: float16, bfloat16 or float32; T the same on every rank.
        experts: ``[T, k]``, int32 or int64, 0 to E - 1, different ones for each token; k from 1 to
            16. A negative number, or one from E on, drops the slot; so k may exceed E.
        weights: ``[T, k]``, floating; used as float32.
        w_in: ``[L, F, 2, hidden]`` of x's dtype: ``w_in[e, :, 0]`` is the gate's weight, ``w_in[e,
            :, 1]`` that of up; ``[L, F, 1, hidden]`` for experts without a gate. It is read where
            it is if its memory is a contiguous ``[L, F, 2, hidden]``, ``[L, 2, F, hidden]``,
            ``[L, hidden, F, 2]`` or ``[L, hidden, 2, F]``, of which w_in is a permuted view; its
            gradient has the same strides. Other strides, and weights that do not begin at a
            multiple of 16 bytes, are copied in each call.
            Of float8 it must be a view of a contiguous ``[L, 2, F, hidden]``.
        w_out: ``[L, hidden, F]`` of w_in's dtype; also a view of a contiguous ``[L, F, hidden]``,
            unless it is float8.
        b_in: Bias of gate and up, ``[L, F, 2]`` of x's dtype (``[L, F, 1]`` without a gate), or
            None. It is copied unless its memory has gate and up in the order of w_in's.
        b_out: Bias of the second product, ``[L, hidden]`` of x's dtype, or None. Each of a token's
            experts adds its own, times its weight.
        w_in_scale: What each 128 x 128 of a float8 w_in is to be multiplied by, float32 ``[L, F /
            128, 2, hidden / 128]``; needed with float8 and refused without. It is copied unless it
            is a view of a contiguous ``[L, 2, F / 128, hidden / 128]``.
        w_out_scale: The same of w_out, ``[L, hidden / 128, F / 128]``.
        activation: The function of gate and up: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"relu"``
            or ``"relu2"`` of the gate, times up; or an :class:`interlace.ExpertActivation`, which
            clamps both and has further numbers.
        capacity: Maximum number of rows that an expert takes from each rank. Further slots, by
            token and then by j, are dropped: they add nothing to y. None: T rows, which is no
            limit as long as no token names an expert twice.
        group: 1 to 8 ranks of one node, or ranks of several nodes; default: the default process
            group.
        impl: ``"fused"``; ``"decode"``, kernels for few tokens, without gradients and capacity;
            ``"unfused"`` or ``"nccl"``, stock PyTorch: all-gather, torch._grouped_mm and
            reduce-scatter, for bfloat16 without gradients and capacity, and for other calls one
            expert after another between two all-to-alls, where the host waits for the device;
            ``"chunked"``, the former between nodes, where tokens and sums travel in slices, with
            gradients, too; or ``"auto"``: the one that the machine's profile predicts to be
            fastest, as :func:`interlace.explain` says, and the fused kernels where it predicts
            none. ``"batch_invariant"`` gives a token the same bits in every batch
            (:func:`interlace.batch_invariant`), without a capacity that could drop tokens.
        config: Configuration of the kernels; default: one for the sizes, and for ``"fused"`` from
            the tuned table of this GPU, if ``interlace tune`` has made one. It must be the same on
            every rank.

    Returns:
        ``[T, hidden]`` of x's dtype. Gradients go to x, weights, w_in, w_out, b_in and b_out. Those
        of the last four are sums over the tokens of *all* ranks: do not reduce them again. The
        backward pass is collective; ranks must agree on whether any argument requires a gradient.

    Raises:
        ArgumentError: shapes, dtypes or devices do not fit.
        RankMismatchError: ranks differ in sizes, dtype, biases, activation, capacity, impl or
            config; raised on every rank. Tokens are compared at the first such call.
        GroupError: the group is too large.
        PeerTimeoutError: a peer did not make this call before the group's deadline, or with another
            number of tokens. On CUDA the kernels end, fill their outputs with NaN, and the next
            call on the group, or :func:`interlace.synchronize`, raises.

    Example:
        >>> weights, experts = torch.softmax(router(x), -1).topk(2)
        >>> # [4096, 4096] -> [4096, 4096]
        >>> y = interlace.mixture_of_experts(x, experts, weights, w_in, w_out)

    Source: Punniyamurthy et al., SC24 (arXiv:2305.06942), "GEMM + All-to-All".
    """
    _, world_size = rank_and_size(group)
    the_activation = ExpertActivation.of(activation)
    tensors = x, experts, weights, w_in, w_out, b_in, b_out, w_in_scale, w_out_scale
    if config is None:
        y = _recalled(tensors, world_size, capacity, group, impl, the_activation)
        if y is not None:
            return y
    capacity = validate(*tensors, the_activation, capacity, world_size)
    _DECLARATION.validate_options(impl, config)
    keeps = _keeps_gradients(x, weights, w_in, w_out, b_in, b_out)
    text = "" if config is None else str(config)
    may_be_fused = ("fused", *_DECLARATION.choosers)
    y, *_ = entrance(OPERATOR)(
        x,
        experts,
        # Kernels read a slot's weight at the slot's number.
        weights.float().contiguous(),
        w_in,
        w_out,
        b_in,
        b_out,
        w_in_scale,
        w_out_scale,
        world_size,
        _limit(x, capacity),
        default_name(group),
        impl,
        text,
        str(the_activation),
        keeps,
        keeps and impl in may_be_fused and not _spans_nodes(default_name(group)),
    )
    result: torch.Tensor = y
    return result


def _recalled(
    tensors: tuple[torch.Tensor | None, ...],
    world_size: int,
    capacity: int | None,
    group: dist.ProcessGroup | None,
    impl: str,
    activation: ExpertActivation,
) -> torch.Tensor | None:
    """Return the result of a call without a configuration that has come before with these operands;
    None if it must be validated first, or :func:`recalling_group` says that it takes the long way.
    """
    x, _, weights, *_ = tensors
    known_to = recalling_group(group, *tensors)  # type: ignore[arg-type]
    if known_to is None or x is None or weights is None or not x.dim():
        return None
    if type(impl) is not str or type(capacity) not in (int, type(None)):
        return None
    # Weights that are copied lie elsewhere in each call.
    if weights.dtype != torch.float32 or not weights.is_contiguous():
        return None
    known = recall_key(
        OPERATOR, tensors, world_size, _limit(x, capacity), default_name(group), impl, "",
        str(activation), False, False,
    )  # fmt: skip
    if known is None:
        return None
    with past_autograd():
        result: tuple[torch.Tensor, Any] | None = known_to.recall(known)
    return None if result is None else result[0]


def _limit(x: torch.Tensor, capacity: int | None) -> int:
    """Return the rows that an expert takes from this rank, at most."""
    maximum = max(1, x.shape[0])
    return maximum if capacity is None else min(capacity, maximum)


def _keeps_gradients(*tensors: torch.Tensor | None) -> bool:
    """Return whether a backward pass will follow a call of these tensors."""
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def _spans_nodes(group_name: str) -> bool:
    """Return whether the ranks of a group are on several nodes, or are going to be by what the
    environment says, where they have not met yet. Nothing is sent.
    """
    process_group = process_group_named(group_name)
    nodes = known_nodes(process_group)
    if nodes is None and dist.is_initialized() and (per_node := declared_ranks_per_node()):
        nodes = len({rank // per_node for rank in dist.get_process_group_ranks(process_group)})
    return nodes is not None and nodes > 1


# A compiled graph holds the answer: it decides about shapes. This does the same as
# torch.compiler.assume_constant_result.
_spans_nodes._dynamo_marked_constant = True  # type: ignore[attr-defined]
