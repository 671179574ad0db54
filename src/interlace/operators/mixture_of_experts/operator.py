"""The declaration of ``mixture_of_experts``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from interlace.costs.mixture_of_experts import ExpertsCall
from interlace.gemm import invariance
from interlace.operators.mixture_of_experts import (
    chunked,
    decode,
    fused,
    fused_backward,
    nccl,
    unfused,
)
from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.call import validate
from interlace.operators.mixture_of_experts.choice import (
    ExpertTerms,
    choose,
    choose_invariant,
    tile_of,
    times_between_nodes,
)
from interlace.operators.mixture_of_experts.config import MixtureOfExpertsConfig
from interlace.operators.mixture_of_experts.layout import ExpertSizes
from interlace.registry import BATCH_INVARIANT, Implementation, Operator, operator

_TIMED_PARTS = ("forward", "decoding")
"""The parts of a benchmark of experts that are forward passes of the layer."""


@operator
class MixtureOfExperts(Operator):
    """Dispatch, experts and combine: each token's sum of its experts' outputs."""

    name = "mixture_of_experts"
    collective = "all_to_all"
    sizes = ("tokens", "hidden", "ffn", "experts", "top_k")
    config_type = MixtureOfExpertsConfig
    choosers = ("auto", BATCH_INVARIANT)
    command_module = "interlace.cli.bench_mixture_of_experts"
    implementations = (
        Implementation(
            "fused",
            "kernels that send rows as they compute them",
            fused.run,
            backward=fused_backward.run,
            schedule="by_slot",
            is_batch_invariant=True,
        ),
        Implementation(
            "decode",
            "kernels for few tokens, which read each weight once",
            decode.run,
            decode.refusal,
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
            "nccl",
            "torch._grouped_mm between NCCL's all-gather and reduce-scatter",
            nccl.run,
            nccl.refusal,
            schedule="to_all",
            is_stock=True,
            spans_nodes=True,
        ),
        Implementation(
            "unfused",
            "F.linear and all_to_all_single, each rank's rows sorted",
            unfused.run,
            spans_nodes=True,
            backward=unfused.backward,
        ),
    )

    def choose(self, *, terms: ExpertTerms, device: torch.device) -> Any:  # type: ignore[override]
        """Return what ``impl="auto"`` runs for a call of these sizes, and why."""
        return choose(terms, device)

    def timed_call(self, result: Mapping[str, Any]) -> ExpertsCall | None:
        """Return the call whose times a benchmark's result holds, if it is a forward pass through a
        layer of SwiGLU with even routing.
        """
        if result.get("part") not in _TIMED_PARTS or result["routing"] != "balanced":
            return None
        if result.get("form", "swiglu") != "swiglu":
            return None
        sizes = {name: int(result[name]) for name in (*self.sizes, "world_size")}
        return ExpertsCall(**sizes, itemsize=4 if result["dtype"] == "float32" else 2)

    def timed_tile(self, implementation: str, call: Any) -> tuple[int, int]:
        """Return the rows and columns of the tiles of an implementation's products."""
        return tile_of(implementation, call)

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes, by name."""
        return ("x", "experts", "weights", "w_in", "w_out"), ("b_in", "b_out", "activation")

    def explain(  # type: ignore[override]
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        w_in: torch.Tensor,
        w_out: torch.Tensor,
        *,
        b_in: torch.Tensor | None = None,
        b_out: torch.Tensor | None = None,
        activation: str | ExpertActivation = "silu",
        world_size: int,
        nodes: int = 1,
    ) -> tuple[str, str, str]:
        """Return a description of a call, what ``impl="auto"`` runs, and the reason."""
        the_activation = ExpertActivation.of(activation)
        validate(x, experts, weights, w_in, w_out, b_in, b_out, the_activation, None, world_size)
        tokens, hidden = x.shape
        count, ffn, top_k = world_size * w_in.shape[0], w_in.shape[1], experts.shape[1]
        capacity = max(1, tokens)
        sizes = ExpertSizes(tokens, top_k, count, hidden, ffn, world_size, capacity, w_in.shape[2])
        keeps = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad
            for tensor in (x, weights, w_in, w_out, b_in, b_out)
        )
        terms = ExpertTerms(sizes, x.dtype, x.device.type, keeps, nodes)
        choice = self.choose(terms=terms, device=x.device)
        choice = choice.between(self, nodes, times_between_nodes(terms, x.device), terms)
        chosen, config, reason = choice.impl, choice.config, choice.reason
        if invariance.is_enabled():
            chosen, config = choose_invariant(terms, x.device, choice)
            reason = f"calls must be batch-invariant; {reason}"
        if chosen in ("fused", "decode"):
            chosen += f" ({config})"
        name = str(x.dtype).removeprefix("torch.")
        call = (
            f"{self.name} of {tokens} tokens per rank, top {top_k} of {count} experts {hidden} x "
            f"{ffn}, {name}"
        )
        return call, chosen, reason
