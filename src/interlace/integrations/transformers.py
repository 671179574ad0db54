"""Interlace as an implementation of expert parallelism in ``transformers``."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.comm.groups.process_groups import rank_and_size
from interlace.errors import ArgumentError, GroupError
from interlace.gemm import invariance
from interlace.gemm.gradients import all_replicated, summed
from interlace.integrations.transformers_experts import WeightLayout
from interlace.operators.mixture_of_experts import mixture_of_experts
from interlace.units import ceil_div

NAME = "interlace"


def register() -> None:
    """Register Interlace with transformers, as ``ep_implementation="interlace"``.

    Experts' tokens then travel inside of the products that compute them, forward and backward, and
    nothing waits for the host. Where all ranks of an expert group share a batch, no token has to
    travel: each rank's experts compute their part of all tokens' results, and the parts are added
    up, unless that would move more bytes.

    It takes the experts of nearly all models that transformers has a plan of expert parallelism
    for, such as Mixtral, Qwen3-MoE, OLMoE and gpt-oss, and reads their weights where they are;
    loading a model with other experts raises :class:`interlace.ArgumentError`. Where tokens travel,
    all ranks of an expert group must bring equally many, and the group must be on one machine.

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
            self.layout = WeightLayout.of(experts, NAME)
            self.experts = experts
            # Asked for once: a mesh takes the host some 30 us for each answer.
            self.ranks, self.rank = tp_mesh.size(), ep_mesh.get_local_rank()
            self.group: dist.ProcessGroup = ep_mesh.get_group()
            self.shares_batch = self.ranks == ep_mesh.size() > 1
            if self.shares_batch:
                self.alone = _alone(self.group)

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
            # Each token would travel to k experts, of which 1 / R are here, and back; a sum over
            # the ranks moves each token twice. In the mode, it would depend on NCCL's order.
            k = top_k_index.shape[1]
            is_sum_shorter = (
                self.shares_batch and 2 * k >= self.ranks and not invariance.is_enabled()
            )
            run = self._summed if is_sum_shorter else self._exchanged
            # Parameters are this rank's while the forward pass runs, and torch.Tensors.
            parameters = self.layout.parameters(self.experts)
            return run(
                hidden_states.to(parameters[0].dtype), top_k_index, top_k_weights, parameters
            )

        def _summed(
            self,
            rows: torch.Tensor,
            index: torch.Tensor,
            weights: torch.Tensor,
            parameters: tuple[torch.Tensor, ...],
        ) -> torch.Tensor:
            """Let this rank's experts have their tokens, which are here, and add up the ranks' sums
            of their outputs.
            """
            name, count = self.group.group_name, parameters[0].shape[0]
            rows, weights = all_replicated((rows, weights), name)
            y = mixture_of_experts(
                rows,
                # Other ranks' experts have numbers that no expert has here.
                index - self.rank * count,
                weights,
                *parameters,
                activation=self.layout.activation,
                group=self.alone,
            )
            return summed(y, name)

        def _exchanged(
            self,
            rows: torch.Tensor,
            index: torch.Tensor,
            weights: torch.Tensor,
            parameters: tuple[torch.Tensor, ...],
        ) -> torch.Tensor:
            """Send this rank's share of the tokens to their experts, and gather the results."""
            tokens, ranks = rows.shape[0], self.ranks
            # The ranks of a TP group hold the same tokens. Shares are equal, as the operator needs
            # them: rows without an expert complete the last ones.
            share = max(1, ceil_div(tokens, ranks))
            missing = (ranks * share - tokens) if ranks > 1 else 0
            if missing:
                rows = F.pad(rows, (0, 0, 0, missing))
                index = F.pad(index, (0, 0, 0, missing), value=-1)
                weights = F.pad(weights, (0, 0, 0, missing))
            if ranks > 1:
                group = self.tp_mesh.get_group()
                first = self.tp_mesh.get_local_rank() * share
                rows, weights = _Share.apply(  # type: ignore[no-untyped-call]
                    group, first, share, rows, weights
                )
                index = index.narrow(0, first, share)
            y = mixture_of_experts(
                rows,
                index,
                weights,
                *parameters,
                activation=self.layout.activation,
                group=self.group,
            )
            if ranks == 1:
                return y
            whole: torch.Tensor = _Whole.apply(group, first, y)  # type: ignore[no-untyped-call]
            return whole[:tokens] if missing else whole

    return InterlaceEP


_groups_alone: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def _alone(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of this rank alone, one for all layers whose experts share ``group``."""
    alone = _groups_alone.get(group)
    if alone is not None:
        with contextlib.suppress(GroupError):  # it was destroyed
            rank_and_size(alone)
            return alone
    # NCCL would connect the ranks of the default group for it.
    made: dist.ProcessGroup = dist.new_group(
        [dist.get_rank()], use_local_synchronization=True, backend="gloo"
    )
    _groups_alone[group] = made
    return made


class _Share(torch.autograd.Function):
    """Take this rank's rows of tensors that all ranks of a group hold; gather their gradients.

    DTensor does the same, and takes the host a millisecond for it.
    """

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, first: int, rows: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.narrow(0, first, rows) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[-len(grads) :]
        gathered = (
            _gather(grad, ctx.group) if is_needed else None
            for grad, is_needed in zip(grads, needed, strict=True)
        )
        return None, None, None, *gathered


class _Whole(torch.autograd.Function):
    """Gather the rows of all ranks of a group, which all use them alike; so each rank has the
    gradient of its own rows.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, first: int, rows: torch.Tensor) -> torch.Tensor:
        ctx.first, ctx.rows = first, rows.shape[0]
        return _gather(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, grad.narrow(0, ctx.first, ctx.rows)


def _gather(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks, in rank order."""
    # PyTorch's functional operators, which torch.compile traces.
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(
        rows.contiguous(), group.size(), group.group_name
    )
    whole: torch.Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    return whole
