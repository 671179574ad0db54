"""``MoE``: a mixture of experts whose experts are sharded over the ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from interlace.comm import rank_and_size, require_same_ranks
from interlace.errors import ArgumentError
from interlace.gemm.operands import integer, require_tensor
from interlace.nn.autocast import operands
from interlace.nn.shard_holder import ShardHolder, is_gathering, undistributed
from interlace.nn.sharded_parameters import Sharing
from interlace.operators.mixture_of_experts import mixture_of_experts
from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.layout import MAX_TOP_K, capacity_of


@dataclasses.dataclass(frozen=True)
class Routing:
    """A router's choice of k of E experts for T tokens.

    Attributes:
        experts: int64 ``[T, k]``: the chosen experts.
        weights: float32 ``[T, k]``: the weights of their results.
        probabilities: float32 ``[T, E]``: the probabilities of all experts.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    probabilities: torch.Tensor

    def load_balancing_loss(self) -> torch.Tensor:
        """Return ``E * sum over e of f_e * p_e``, a float32 scalar.

        It is 1 if the tokens are spread evenly over the experts, and E if all go to one expert. f_e
        is the share of the slots that went to expert e (before any were dropped), p_e the mean
        probability of e, over this rank's tokens. It is 0 without tokens. Its gradient reaches the
        router through p_e.
        Source: Fedus et al., Switch Transformers, arXiv:2101.03961, 2.2.
        """
        count = self.probabilities.shape[1]
        slots = F.one_hot(self.experts, count).sum((0, 1)).float()
        shares = slots / max(1, self.experts.numel())
        # The mean of no rows would be NaN, and with it the loss and every gradient.
        means = self.probabilities.sum(0) / max(1, self.probabilities.shape[0])
        return count * (shares * means).sum()


class MoE(ShardHolder):
    """A router, and E experts that are sharded over R ranks; every rank brings its own tokens.

    Dimensions: H hidden width, F inner width of the experts, k experts per token, ``...`` any
    leading dimensions of x (tokens). Each rank holds E/R experts.

    Forward::

        probabilities [..., E]    = softmax(x @ router.weight.T)              float32
        weights, experts [..., k] = the k largest, divided by their sum if ``normalize``
        y [..., H] = sum over j of weights[..., j]
                     * w_down[e] @ (silu(w_gate[e] @ x) * (w_up[e] @ x)),  e = experts[..., j]

    This is the layer of Mixtral (``normalize=True``) and, but for shared experts, of DeepSeekMoE.
    With ``activation``, ``bias`` and ``gated`` experts are those of other models.
    The experts are :func:`interlace.mixture_of_experts`: tokens travel during the first matrix
    product, and results during the second.

    **Gradients.** The gradients of experts' parameters hold the sum over all ranks' tokens; that of
    the router, which is the same on every rank, is of this rank's tokens.
    :func:`sum_replicated_gradients` completes and scales both after the backward pass, which is
    collective. ``clip_grad_norm_`` and ``GradScaler`` count all ranks' experts, and are collective.

    **State dict.** ``state_dict()`` holds this rank's experts one by one, ``experts.<e>.w_gate``
    and ``.w_up`` [F, H], ``.w_down`` [H, F] with e counted over all ranks, and ``router.weight``
    [E, H]; with ``bias``, ``.b_gate`` and ``.b_up`` [F] and ``.b_down`` [H] too; without a gate,
    no ``.w_gate`` and ``.b_gate``. ``load_state_dict`` takes the experts that this rank holds and
    ignores others: :func:`unsharded_state_dict`, or the merged dictionaries of all ranks that
    saved, can be loaded by any number of ranks. Under FSDP2 ``state_dict()`` is collective.

    Args:
        hidden: H.
        ffn: F.
        experts: E, of all ranks; R must divide it.
        top_k: K, from 1 to 16.
        capacity_factor: None: no token is dropped. A number: an expert takes at most the first
            ``ceil(capacity_factor * T * k / E)`` of a rank's T tokens. That bounds memory; without
            a factor there must be memory for all tokens on one rank.
        normalize: If True, the k weights of a token add up to 1.
        activation: What stands for ``silu(gate) * up``; see :func:`interlace.mixture_of_experts`.
        bias: Whether both products of an expert have a bias.
        gated: Whether experts have a gate; without, they are ``w_down @ activation(w_up @ x)``.
        group: The ranks that share the experts; default: the default process group, or this process
            alone.
        device, dtype: Device and dtype of the parameters; float16, bfloat16 or float32.
        seed: Seed of the first weights, as ``nn.Linear`` draws them; they do not depend on the
            number of ranks.

    Attributes:
        router: ``nn.Linear(H, E, bias=False)``.
        w_in: ``[E/R, F, 2, H]``: gate and up of expert ``rank * E/R + i`` in ``w_in[i, :, 0]`` and
            ``w_in[i, :, 1]``; ``[E/R, F, 1, H]`` without a gate.
        w_out: ``[E/R, H, F]``.
        b_in, b_out: ``[E/R, F, 2]`` and ``[E/R, H]``, or None.
        impl: ``"auto"`` (default), or another of :func:`interlace.mixture_of_experts`; may be set
            at any time, on all ranks alike.

    Raises:
        ArgumentError: R does not divide E, a size is not positive; in forward: x does not end in H.

    Example:
        >>> layer = interlace.nn.MoE(4096, 14336, experts=8, top_k=2, dtype=torch.bfloat16)
        >>> len(layer.w_in)                  # on 4 ranks
        2
        >>> y, routing = layer(x)            # [2, 2048, 4096] -> [2, 2048, 4096]
        >>> loss = criterion(y) + 0.01 * routing.load_balancing_loss()
    """

    _group_attributes = ("group",)

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int = 2,
        *,
        capacity_factor: float | None = None,
        normalize: bool = True,
        activation: str | ExpertActivation = "silu",
        bias: bool = False,
        gated: bool = True,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = rank_and_size(group)
        hidden, ffn, experts, top_k = (
            integer("MoE: hidden, ffn, experts and top_k must be integers", size)
            for size in (hidden, ffn, experts, top_k)
        )
        if min(hidden, ffn, experts) < 1:
            raise ArgumentError(
                f"MoE: hidden, ffn and experts must be positive; got {hidden}, {ffn} and {experts}."
            )
        if experts % self.world_size:
            raise ArgumentError(
                f"MoE: experts must divide evenly over {self.world_size} ranks; got {experts}."
            )
        if not 1 <= top_k <= min(MAX_TOP_K, experts):
            raise ArgumentError(
                f"MoE: top_k must be from 1 to {min(MAX_TOP_K, experts)} of {experts} experts; "
                f"got {top_k}."
            )
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ArgumentError(
                "MoE: capacity_factor must be positive and finite, or None for no limit; got "
                f"{capacity_factor}."
            )
        self.hidden, self.ffn, self.experts, self.top_k = hidden, ffn, experts, top_k
        self.capacity_factor, self.normalize, self.group = capacity_factor, normalize, group
        self.activation = ExpertActivation.of(activation)
        if not gated and self.activation.needs_gate:
            raise ArgumentError(
                "MoE: activation must have no limit and no up_offset without a gate; got "
                f"{self.activation}."
            )
        self.impl = "auto"
        local, gates = experts // self.world_size, 2 if gated else 1
        # Gate and up lie side by side, so that one tile of the first product holds both and the
        # kernel can activate it before it leaves the registers.
        self.router = nn.Linear(hidden, experts, bias=False, device=device, dtype=dtype)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(local, *shape, device=device, dtype=dtype))

        self.w_in, self.w_out = parameter(ffn, gates, hidden), parameter(hidden, ffn)
        self.b_in: nn.Parameter | None = None
        self.b_out: nn.Parameter | None = None
        if bias:
            self.b_in, self.b_out = parameter(ffn, gates), parameter(hidden)
        if not self.w_in.is_meta:
            self.reset_parameters(seed)
        self.register_state_dict_post_hook(_name_experts)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_own_experts)  # type: ignore[no-untyped-call]

    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the weights anew as ``nn.Linear`` does: uniform within ``1 / sqrt(features)``.

        On one kind of device, the same ``seed`` gives the same layer on any number of ranks.
        """
        # Each expert is drawn from a seed of its own, so it does not matter which rank draws it.
        with torch.no_grad():
            seed = integer("MoE: seed must be an integer", seed)
            generator = torch.Generator(self.w_in.device).manual_seed(seed)
            bound = self.hidden**-0.5
            self.router.weight.uniform_(-bound, bound, generator=generator)
            for i in range(len(self.w_in)):
                generator.manual_seed(seed * self.experts + self.rank * len(self.w_in) + i + 1)
                for parameters, features in (
                    (self.w_in, self.hidden),
                    (self.w_out, self.ffn),
                    (self.b_in, self.hidden),
                    (self.b_out, self.ffn),
                ):
                    if parameters is not None:
                        bound = features**-0.5
                        parameters[i].uniform_(-bound, bound, generator=generator)

    def route(self, x: torch.Tensor) -> Routing:
        """Choose experts for tokens ``[T, H]``; softmax and weights are in float32."""
        # In float32: which experts a token goes to depends on small differences.
        probabilities = torch.softmax(self.router(x).float(), -1)
        weights, experts = probabilities.topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights, probabilities)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """Compute ``x [..., H] -> y [..., H]``, and return y with the routing of its tokens.

        Collective, on the current stream, without synchronising the host.

        Raises:
            ArgumentError: x does not end in H, or its dtype or device is not the weights'.
            GroupError: the layer's process group was destroyed or replaced.
            RankMismatchError: ranks have different numbers of tokens.
        """
        require_same_ranks("MoE", self.group, self.rank, self.world_size)
        require_tensor("MoE: x", x)
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ArgumentError(f"MoE: x must be [..., {self.hidden}]; got shape {list(x.shape)}.")
        # The router is one of torch's layers, which autocast converts by itself.
        tokens = x.reshape(-1, self.hidden)
        rows, *parameters = operands("MoE", tokens, self.w_in, self.w_out, self.b_in, self.b_out)
        routing = self.route(tokens)
        # Not len(tokens), which would make a number of a size that is traced for all.
        capacity = capacity_of(tokens.shape[0], self.top_k, self.experts, self.capacity_factor)
        y = mixture_of_experts(
            rows,
            routing.experts,
            routing.weights,
            *parameters,
            activation=self.activation,
            capacity=capacity,
            group=self.group,
            impl=self.impl,
        )
        return y.view(x.shape), routing

    def _sharded(self) -> list[str]:
        return ["w_in", "w_out", "b_in", "b_out"]

    def _sharing(self) -> Sharing:
        return Sharing(self.group)

    def extra_repr(self) -> str:
        local = len(self.w_in)
        return (
            f"hidden={self.hidden}, ffn={self.ffn}, experts={self.experts}, top_k={self.top_k}, "
            f"capacity_factor={self.capacity_factor}, "
            f"here={self.rank * local}-{(self.rank + 1) * local - 1}, impl={self.impl}"
        )


def _names(module: MoE) -> dict[str, tuple[str, ...]]:
    """Return the names in state dicts of what each parameter of the experts holds per expert.

    Several names are the parts along the parameter's third dimension.
    """
    parts = ("gate", "up")[-module.w_in.shape[2] :]
    names: dict[str, tuple[str, ...]] = {}
    for letter in ("w",) if module.b_in is None else ("w", "b"):
        names[f"{letter}_in"] = tuple(f"{letter}_{part}" for part in parts)
        names[f"{letter}_out"] = (f"{letter}_down",)
    return names


def _name_experts(module: MoE, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Name every saved expert by its number among all ranks' experts, after saving."""
    for parameter, names in _names(module).items():
        # Parameters that a parametrization computes are saved by it, under its own names.
        if f"{prefix}{parameter}" not in state:
            continue
        values = undistributed(state.pop(f"{prefix}{parameter}"))
        first = module.rank * len(values)
        if is_gathering() and module.world_size > 1:
            first, values = 0, module._of_all_ranks(parameter, values, torch.cat)
        for i, value in enumerate(values):
            expert = f"{prefix}experts.{first + i}"
            parts = value.unbind(1) if parameter.endswith("_in") else [value]
            state.update(zip([f"{expert}.{name}" for name in names], parts, strict=True))


def _take_own_experts(module: MoE, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Stack the experts that ``module`` holds, and drop all others, before loading."""
    local = len(module.w_in)
    experts = [f"{prefix}experts.{module.rank * local + i}" for i in range(local)]
    saved = {key: state.pop(key) for key in list(state) if key.startswith(f"{prefix}experts.")}
    for parameter, names in _names(module).items():
        keys = [[f"{expert}.{name}" for name in names] for expert in experts]
        # Without all of this rank's experts nothing is stacked: loading then reports the parameter
        # as missing.
        if all(key in saved for of_expert in keys for key in of_expert):
            parts = [[saved[key] for key in of_expert] for of_expert in keys]
            is_first = parameter.endswith("_in")
            held = getattr(module, parameter)
            shape = held.shape[1:2] + held.shape[3:] if is_first else held.shape[1:]
            # What does not fit is named as torch names it; to stack it would fail without a name.
            errors = [
                f"size mismatch for {key}: copying a param with shape {saved[key].shape} from "
                f"checkpoint, the shape in current model is {shape}."
                for of_expert in keys
                for key in of_expert
                if saved[key].shape != shape
            ]
            if errors:
                arguments[-1].extend(errors)
                state[f"{prefix}{parameter}"] = held.detach()
                continue
            state[f"{prefix}{parameter}"] = torch.stack(
                [torch.stack(part, 1) if is_first else part[0] for part in parts]
            )
    module._distribute(state, prefix)
