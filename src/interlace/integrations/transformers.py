"""Interlace as an implementation of expert parallelism in ``transformers``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from interlace.errors import ArgumentError
from interlace.integrations.transformers_experts import Layout
from interlace.operators.mixture_of_experts.api import mixture_of_experts
from interlace.units import ceil_div

NAME = "interlace"


def register() -> None:
    """Register Interlace with transformers, as ``ep_implementation="interlace"``.

    Experts' tokens then travel inside of the products that compute them, forward and backward, and
    nothing waits for the host. It takes the experts of nearly all models that transformers has a
    plan of expert parallelism for, such as Mixtral, Qwen3-MoE, OLMoE and gpt-oss, and reads their
    weights where they are; loading a model with other experts raises
    :class:`interlace.ArgumentError`. All ranks of an expert group must bring equally many tokens,
    and the group must be on one machine.

    Raises:
        ArgumentError: This version of transformers has no implementations of expert parallelism.

    Example:
        >>> interlace.integrations.transformers.register()
        >>> config = DistributedConfig(tp_size=4, ep_size=4, ep_implementation="interlace")
        >>> model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)
    """
    _interface().register(NAME, _implementation())


def _interface() -> Any:
    import transformers

    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError as error:
        raise ArgumentError(
            "transformers must have transformers.distributed.expert_parallel, as version 5.23 has; "
            f"got version {transformers.__version__}. Upgrade it."
        ) from error
    return EPImplementationInterface


@functools.cache
def _implementation() -> type:
    """Return the implementation, a class that derives from one of transformers'."""
    from transformers.distributed.expert_parallel import EPImplementation

    class InterlaceEP(EPImplementation):  # type: ignore[misc]
        """The experts of a layer, shared out over the ranks of ``ep_mesh``."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.layout = Layout.of(experts, NAME)
            self.experts = experts

        def __call__(
            self,
            hidden_states: torch.Tensor,
            top_k_index: torch.Tensor,
            top_k_weights: torch.Tensor,
        ) -> torch.Tensor:
            """Return each token's weighted sum of its experts' outputs.

            Args:
                hidden_states: ``[T, hidden]``: the tokens of this rank.
                top_k_index, top_k_weights: ``[T, k]``: their experts, by their numbers among those
                    of all ranks, and the experts' weights.
            """
            tokens = hidden_states.shape[0]
            rows, index, weights = (
                self._slice(tensor, fill)
                for tensor, fill in ((hidden_states, 0), (top_k_index, -1), (top_k_weights, 0))
            )
            # Parameters are this rank's while the forward pass runs, and torch.Tensors.
            parameters = self.layout.parameters(self.experts)
            y = mixture_of_experts(
                rows.to(parameters[0].dtype),
                index,
                weights,
                *parameters,
                activation=self.layout.activation,
                group=self.ep_mesh.get_group(),
            )
            if self.tp_mesh.size() == 1:
                return y
            whole: torch.Tensor = DTensor.from_local(
                y, self.tp_mesh, [Shard(0)], run_check=False
            ).full_tensor()
            return whole[:tokens]

        def _slice(self, tensor: torch.Tensor, fill: int) -> torch.Tensor:
            """Return this rank's share of rows that all ranks of the TP group hold.

            Shares are equal, as the operator needs them: rows of ``fill`` complete the last ones.
            Gradients of the share are gathered.
            """
            ranks = self.tp_mesh.size()
            if ranks == 1:
                return tensor
            missing = ranks * max(1, ceil_div(tensor.shape[0], ranks)) - tensor.shape[0]
            padded = F.pad(tensor, (0, 0, 0, missing), value=fill) if missing else tensor
            whole = DTensor.from_local(padded, self.tp_mesh, [Replicate()], run_check=False)
            share: torch.Tensor = whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()
            return share

    return InterlaceEP
