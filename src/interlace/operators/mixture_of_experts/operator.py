"""The declaration of ``mixture_of_experts``."""

from __future__ import annotations

from typing import Any

import torch

from interlace.operators.mixture_of_experts import launch
from interlace.operators.mixture_of_experts.config import MixtureOfExpertsConfig
from interlace.operators.mixture_of_experts.validate import validate
from interlace.registry import Implementation, Operator, operator


@operator
class MixtureOfExperts(Operator):
    """Dispatch, experts and combine: each token's sum of its experts' outputs."""

    name = "mixture_of_experts"
    collective = "all_to_all"
    sizes = ("tokens", "hidden", "ffn", "experts", "top_k")
    config_type = MixtureOfExpertsConfig
    command_module = "interlace.cli.bench_mixture_of_experts"
    implementations = (
        Implementation("fused", "kernels that send rows as they compute them"),
        Implementation(
            "unfused",
            "F.linear and all_to_all_single, each rank's rows sorted",
            spans_nodes=True,
        ),
    )

    def choose(self, **call: Any) -> Any:
        """Return what ``impl="auto"`` runs for a call of these sizes, and why."""
        return launch.choose(**call)

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes, by name."""
        return ("x", "experts", "weights", "w_in", "w_out"), ()

    def explain(  # type: ignore[override]
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        w_in: torch.Tensor,
        w_out: torch.Tensor,
        *,
        world_size: int,
        nodes: int = 1,
    ) -> tuple[str, str, str]:
        """Return a description of a call, what ``impl="auto"`` runs, and the reason."""
        validate(x, experts, weights, w_in, w_out, None, world_size)
        tokens, hidden = x.shape
        count, ffn, top_k = world_size * w_in.shape[0], w_in.shape[1], experts.shape[1]
        choice = self.choose(
            tokens=tokens,
            hidden=hidden,
            ffn=ffn,
            experts=count,
            top_k=top_k,
            dtype=x.dtype,
            world_size=world_size,
            device=x.device,
        ).between(self, nodes)
        chosen = f"fused ({choice.config})" if choice.impl == "fused" else choice.impl
        name = str(x.dtype).removeprefix("torch.")
        call = (
            f"{self.name} of {tokens} tokens per rank, top {top_k} of {count} experts {hidden} x "
            f"{ffn}, {name}"
        )
        return call, chosen, choice.reason
