"""A call of ``mixture_of_experts``: its sizes, what all ranks must agree on, what it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from interlace.comm import Group, group_named
from interlace.comm.runtime import ranges
from interlace.errors import ArgumentError
from interlace.gemm.invariance import is_invariant, name_in
from interlace.operators.mixture_of_experts.activation import ExpertActivation
from interlace.operators.mixture_of_experts.choice import (
    ExpertTerms,
    choose,
    choose_invariant,
    configuration,
)
from interlace.operators.mixture_of_experts.config import OPERATOR, MixtureOfExpertsConfig
from interlace.operators.mixture_of_experts.layout import MAX_RANKS, ExpertSizes, Parameters
from interlace.operators.mixture_of_experts.network_choice import times_between_nodes
from interlace.registry import operator_named

if TYPE_CHECKING:
    from interlace.operators.mixture_of_experts.kernels.activation import Form


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call whose shapes and devices ``api`` has validated; see ``op`` for the fields.

    Attributes:
        activation: The text of an ``ExpertActivation``.
        keeps: Whether a backward pass will follow.
        saves: Whether tensors for it are results. If not, it computes them anew.
    """

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    w_in: torch.Tensor
    w_out: torch.Tensor
    b_in: torch.Tensor | None
    b_out: torch.Tensor | None
    capacity: int
    group_name: str
    impl: str
    config: str
    activation: str
    keeps: bool
    saves: bool

    def __post_init__(self) -> None:
        dtypes = [tensor.dtype for tensor in (self.x, *self.parameters) if tensor is not None]
        if len(set(dtypes)) > 1:
            raise ArgumentError(
                f"{OPERATOR}: x, weights and biases must have the same dtype; got {dtypes}. "
                "Convert them."
            )

    @property
    def parameters(self) -> Parameters:
        """The experts' weights and biases."""
        return Parameters(self.w_in, self.w_out, self.b_in, self.b_out)

    @functools.cached_property
    def form(self) -> Form:
        """The constants by which kernels know the activation."""
        return _form(self.sizes.gates, self.activation)

    @functools.cached_property
    def group(self) -> Group:
        return group_named(self.group_name, self.x.device)

    @functools.cached_property
    def sizes(self) -> ExpertSizes:
        ranks = self.group.world_size
        return ExpertSizes.of(self.x, self.experts, self.w_in, ranks, self.capacity)

    def agree(self, operator: str) -> int:
        """Agree on this call with all ranks; return its mark (``Group.agree``)."""
        self.group.require_size(OPERATOR, MAX_RANKS)
        return self.group.agree(
            operator,
            the_shape_of_x=tuple(self.x.shape),
            top_k=self.experts.shape[1],
            experts_of_a_rank=self.w_in.shape[0],
            the_inner_width=self.w_in.shape[1],
            whether_experts_have_a_gate=self.w_in.shape[2] == 2,
            dtype=str(self.x.dtype),
            which_biases_there_are=tuple(
                name for name in ("b_in", "b_out") if getattr(self, name) is not None
            ),
            activation=self.activation,
            capacity=self.capacity,
            whether_gradients_are_needed=self.keeps,
            whether_tensors_are_saved=self.saves,
            impl=self.impl,
            config=self.config,
        )

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return the range of this call for profilers, by the name of the operator or its half.

        The bytes that it sends are unknown: only the device knows how many rows go where.
        """
        operands = (self.x, self.experts, self.w_in, self.w_out)
        return ranges.around(name, self.chosen[0], operands, lambda: None)

    @functools.cached_property
    def terms(self) -> ExpertTerms:
        """The properties of this call by which implementations may refuse it."""
        return ExpertTerms(
            self.sizes, self.x.dtype, self.x.device.type, self.keeps, self.group.nodes
        )

    @functools.cached_property
    def chosen(self) -> tuple[str, MixtureOfExpertsConfig]:
        """The implementation and the configuration of this call.

        Raises:
            ArgumentError: The implementation was asked for and cannot run such a call.
        """
        terms, declaration = self.terms, operator_named(OPERATOR)
        is_free, nodes = not is_invariant(self.impl), self.group.nodes
        asked_for = name_in(self.impl) or declaration.choosers[0]
        declaration.require_nodes(asked_for, nodes, terms, is_invariant=not is_free)
        times = times_between_nodes(terms, self.x.device)
        choice = choose(terms, self.x.device).between(declaration, nodes, times, terms)
        if not is_free:
            named = name_in(self.impl)
            impl, config = choose_invariant(terms, self.x.device, choice, named)
            declaration.require_nodes(impl, nodes, terms, is_invariant=True)
        else:
            impl = choice.impl if self.impl == "auto" else self.impl
            config = configuration(impl, terms, self.x.device)
        unmet = declaration.refusal(impl, terms)
        if unmet is not None:
            raise ArgumentError(
                f"{OPERATOR}: impl={impl!r} must have {unmet}. {declaration.advice(terms, nodes)}"
            )
        if self.config:
            return impl, MixtureOfExpertsConfig.parse(self.config)
        return impl, config


@functools.cache
def _form(gates: int, activation: str) -> Form:
    from interlace.operators.mixture_of_experts.kernels.activation import Form

    return Form(gates, *dataclasses.astuple(ExpertActivation.parse(activation)))


@dataclasses.dataclass(frozen=True)
class Saved:
    """The tensors of the forward pass that the backward pass needs, besides the call's arguments.

    They have no elements if nothing is saved; otherwise their shapes follow from the call's sizes.

    Attributes:
        plan: int32; see ``layout``.
        slot_rows: int32 ``[T, k]``: the row at which a slot's result comes back; -1 if it was
            dropped.
        slot_at: int32 ``[returns]``: the slot of each row of results.
        received: ``[arrivals, hidden]``: rows of this rank's experts.
        kept: ``[gates, arrivals, ffn]``: gate and up of these rows.
    """

    plan: torch.Tensor
    slot_rows: torch.Tensor
    slot_at: torch.Tensor
    received: torch.Tensor
    kept: torch.Tensor

    @staticmethod
    def empty(
        sizes: ExpertSizes,
        x: torch.Tensor,
        saves: bool,
        new: Callable[..., torch.Tensor] = torch.empty,
    ) -> Saved:
        """Return tensors of a call's shapes, not filled; or of none if it saves nothing.

        Args:
            sizes: The call's sizes.
            x: The call's tokens, for dtype and device.
            saves: Whether the call saves anything.
            new: Makes a tensor of a shape, a dtype and a device.
        """
        numbers = sizes.plan, (sizes.tokens, sizes.top_k), sizes.returns
        rows = (sizes.arrivals, sizes.hidden), (sizes.gates, sizes.arrivals, sizes.ffn)
        return Saved(
            *(new(shape if saves else 0, dtype=torch.int32, device=x.device) for shape in numbers),
            *(new(shape if saves else 0, dtype=x.dtype, device=x.device) for shape in rows),
        )
