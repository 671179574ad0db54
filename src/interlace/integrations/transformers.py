"""Interlace as an implementation of expert parallelism in ``transformers``.

:class:`WeightLayout` reads from a module of experts what it computes and how it is laid out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.comm.groups.process_groups import rank_and_size
from interlace.counting import calls_of
from interlace.errors import ArgumentError, GroupError
from interlace.gemm import invariance
from interlace.gemm.gradients import all_replicated, summed
from interlace.gemm.operands import FLOAT8, FLOATS
from interlace.gemm.scaled import SCALE_BLOCK
from interlace.operators.mixture_of_experts import mixture_of_experts
from interlace.operators.mixture_of_experts.activation import KINDS, ExpertActivation
from interlace.units import ceil_div

NAME = "interlace"

calls = calls_of("transformers")
"""Counts of the layers of experts that were made in this process."""


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
            calls.take("mixture_of_experts")
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
            if not self.layout.is_float8:
                hidden_states = hidden_states.to(parameters[0].dtype)
            return run(hidden_states, top_k_index, top_k_weights, parameters)

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
                **self.layout.scales(self.experts),
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
            padding = (ranks * share - tokens) if ranks > 1 else 0
            if padding:
                rows = F.pad(rows, (0, 0, 0, padding))
                index = F.pad(index, (0, 0, 0, padding), value=-1)
                weights = F.pad(weights, (0, 0, 0, padding))
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
                **self.layout.scales(self.experts),
                activation=self.layout.activation,
                group=self.group,
            )
            if ranks == 1:
                return y
            y_of_all: torch.Tensor = _Whole.apply(group, first, y)  # type: ignore[no-untyped-call]
            return y_of_all[:tokens] if padding else y_of_all

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
    y_of_all: torch.Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    return y_of_all


_QUICK_GELU = 1.702

_NUMBERS = ("alpha", "swiglu_alpha", "limit", "swiglu_limit")
"""The attributes of experts that hold numbers of their activation."""


class WeightLayout(NamedTuple):
    """The layout in which a module keeps the weights of :func:`interlace.mixture_of_experts`.

    Attributes:
        activation: What lies between the two products.
        gates: 2 if experts have gate and up, 1 if they have no gate.
        halves: Whether the gate's rows lie before those of up, or else a row of each in turn.
        along_k: Whether weights lie as in ``nn.Linear``, or else with both dimensions exchanged.
        has_bias: Whether both products have a bias.
        is_float8: Whether weights are float8, with a scale for each 128 x 128.
    """

    activation: ExpertActivation
    gates: int
    halves: bool
    along_k: bool
    has_bias: bool
    is_float8: bool = False

    @classmethod
    def of(cls, experts: Any, name: str) -> WeightLayout:
        """Return the layout of a module of experts.

        Args:
            name: The implementation that was asked for, for errors.

        Raises:
            ArgumentError: The operator does not compute what these experts do.
        """

        def refuse(rule: str, value: object) -> ArgumentError:
            return ArgumentError(
                f"{type(experts).__name__} by ep_implementation={name!r} must {rule}; got {value}. "
                'Use ep_implementation="auto".'
            )

        # What transformers' decorator of experts has set; without it, nothing is known of them.
        flags = ("has_gate", "is_concatenated", "is_transposed", "has_bias")
        has_gate, is_concatenated, is_transposed, has_bias = (
            getattr(experts, flag, None) for flag in flags
        )
        if None in (has_gate, is_concatenated, is_transposed, has_bias):
            raise refuse("be of transformers' form (use_experts_implementation)", "another one")
        if getattr(experts, "has_post_expert_norm", False):
            raise refuse("not normalise an expert's output", "has_post_expert_norm=True")
        activation = _activation(experts, bool(has_gate), bool(is_concatenated))
        if activation is None:
            function = "_apply_gate" if has_gate else "act_fn"
            raise refuse(
                "have SiLU, GELU or ReLU as their activation, of a gate that multiplies up",
                f"{function} of another one, {getattr(experts, 'act_fn', 'without act_fn')}",
            )
        layout = cls(
            activation,
            2 if has_gate else 1,
            bool(has_gate and is_concatenated),
            not is_transposed,
            bool(has_bias),
        )
        for parameter, dimensions in layout._names():
            found = getattr(experts, parameter, None)
            if not isinstance(found, torch.Tensor) or found.dim() != dimensions:
                raise refuse(f"have {parameter} of {dimensions} dimensions", found)
        dtypes = {getattr(experts, parameter).dtype for parameter, _ in layout._names()}
        if dtypes <= set(FLOATS):
            return layout
        scales = [getattr(experts, f"{name}_scale_inv", None) for name in layout._weights]
        has_blocks = (
            dtypes == {FLOAT8}
            and layout.gates == 2
            and layout.halves
            and list(getattr(experts, "block_size", None) or ()) == [SCALE_BLOCK, SCALE_BLOCK]
            and getattr(experts, "activation_scheme", None) == "dynamic"
            and all(scale is not None and scale.dtype == torch.float32 for scale in scales)
        )
        if not has_blocks:
            raise refuse(
                "have float16, bfloat16 or float32 weights, or float8 gate, up and down with "
                "float32 scales of blocks of 128 x 128 and activations that are quantised as they "
                "come",
                sorted(map(str, dtypes)),
            )
        return layout._replace(is_float8=True)

    @property
    def _weights(self) -> list[str]:
        """The names of both products' weights."""
        return ["gate_up_proj" if self.gates == 2 else "up_proj", "down_proj"]

    def _names(self) -> list[tuple[str, int]]:
        """Return the names of weights, then of biases, and their numbers of dimensions."""
        names = [(weight, 3) for weight in self._weights]
        return names + [(f"{weight}_bias", 2) for weight in self._weights if self.has_bias]

    def parameters(self, experts: Any) -> tuple[torch.Tensor, ...]:
        """Return ``w_in``, ``w_out`` and, if there are any, both biases, as views."""
        first, second, *biases = (getattr(experts, name) for name, _ in self._names())
        if not self.along_k:
            first, second = first.transpose(1, 2), second.transpose(1, 2)
        if biases:
            biases[0] = self._lines(biases[0])
        return self._lines(first), second, *biases

    def scales(self, experts: Any) -> dict[str, Any]:
        """Return the scales of float8 weights as the operator takes them, by name."""
        if not self.is_float8:
            return {}
        first, second = (getattr(experts, f"{name}_scale_inv") for name in self._weights)
        return {"w_in_scale": self._lines(first), "w_out_scale": second}

    def _lines(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return ``[L, 2 F, ...]`` as ``[L, F, 2, ...]``, or blocks of so many lines."""
        width = parameter.shape[1] // self.gates
        sizes = (self.gates, width) if self.halves else (width, self.gates)
        lines: torch.Tensor = parameter.unflatten(1, sizes)
        return lines.transpose(1, 2) if self.halves else lines


def _activation(experts: Any, has_gate: bool, is_concatenated: bool) -> ExpertActivation | None:
    """Return the activation that agrees with a module's own function, or None.

    The function is tried rather than known by its name: models define it in code of their own, and
    a model of tomorrow may do so differently.
    """
    numbers = [
        float(value)
        for value in (getattr(experts, name, None) for name in _NUMBERS)
        if isinstance(value, (int, float)) and 0 < value < math.inf
    ]
    # Where activations bend, and on both sides of every limit that there may be.
    points = [0.3 * i for i in range(-20, 21)]
    points += [factor * number for number in numbers for factor in (-1.5, -0.7, 0.7, 1.5)]
    line = torch.tensor(points, dtype=torch.float64, device="cpu")
    gate, up = (grid.flatten() for grid in torch.meshgrid(line, line, indexing="ij"))
    with torch.no_grad():
        if has_gate:
            both = (
                torch.cat([gate, up]) if is_concatenated else torch.stack([gate, up], 1).flatten()
            )
            expected = experts._apply_gate(both[None])[0]
        else:
            expected = experts.act_fn(gate)
        for activation in _candidates(numbers, has_gate):
            activated = activation(gate, up) if has_gate else activation(gate)
            # Some models compute the activation in float32.
            if torch.allclose(activated, expected.to(activated.dtype), rtol=1e-5, atol=1e-5):
                return activation
    return None


def _candidates(numbers: list[float], has_gate: bool) -> Iterator[ExpertActivation]:
    """Return the activations that experts with these numbers may have, the plain ones first."""
    limits = [None, *numbers] if has_gate else [None]
    for up_offset, limit in itertools.product((0.0, 1.0) if has_gate else (0.0,), limits):
        for kind in KINDS:
            alphas = (1.0, _QUICK_GELU, *numbers) if kind == "silu" else (1.0,)
            for alpha in alphas:
                yield ExpertActivation(kind, alpha, limit, up_offset)
