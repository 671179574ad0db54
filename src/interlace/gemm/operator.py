"""The base class of operators around one matrix product."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch

from interlace.comm import Group
from interlace.comm.groups.reservation import Reservation
from interlace.comm.groups.symmetric_memory import SymmetricPlace
from interlace.costs import find_cost
from interlace.costs.gemm import ProductCost
from interlace.errors import ArgumentError, did_you_mean
from interlace.gemm import invariance
from interlace.gemm.between_nodes import times_between_nodes
from interlace.gemm.call import GemmCall, RowPlan
from interlace.gemm.choice import by_class, choose_product, kernel_or_product
from interlace.gemm.config import GemmConfig
from interlace.gemm.operands import (
    ALIGNMENT_BYTES,
    FLOAT8,
    Operands,
    output_dtype,
    require_tensor,
    validate,
)  # fmt: skip
from interlace.gemm.reservations import Ranks, by_implementation
from interlace.gemm.splits import check_sum, validated_list
from interlace.registry import BATCH_INVARIANT, Operator, find_operator, operators
from interlace.tuning.choice import Choice
from interlace.units import ceil_div

Splits = tuple[Sequence[int] | None, ...]


def product_operator(name: str) -> GemmOperator:
    """Return the operator around one matrix product that has a name, or whose public function for
    few rows has it.

    Raises:
        ArgumentError: There is none.
    """
    declaration = find_operator(name)
    if isinstance(declaration, GemmOperator):
        return declaration
    products = [
        declaration for declaration in operators().values() if isinstance(declaration, GemmOperator)
    ]
    known = sorted(
        {
            *(declaration.name for declaration in products),
            *(declaration.vector_name for declaration in products),
        }
    )
    raise ArgumentError(
        f"operator must be one around one product, such as {', '.join(filter(None, known))}; got "
        f"{name!r}.{did_you_mean(name, known)}"
    )


class GemmOperator(Operator):
    """An operator that computes ``x [M, K] @ w[N, K].T`` on every rank and moves rows.

    A subclass names its parts in class attributes and states its formulas in methods. Schema,
    validation, agreement, choice, dispatch, ``interlace.explain``, benchmarks and tests follow from
    that; see docs/writing-an-operator.md.

    Attributes:
        split_names: The names of the lists of rows that a caller may give.
        returns_gathered: Whether the result is a pair, the gathered x beside the product.
        adds_ranks: Whether the result is a sum over ranks; then a bias is added once, after the
            sum, and every rank has the same one.
        takes_float8: Whether it multiplies float8 operands, whose scales its kernels then apply.
    """

    computation = "gemm"
    sizes = ("rows", "columns", "inner")
    config_type: ClassVar[type[GemmConfig]] = GemmConfig
    command_module = "interlace.cli.bench_products"
    choosers = ("auto", "measured", BATCH_INVARIANT)
    split_names: ClassVar[tuple[str, ...]] = ("splits",)
    returns_gathered: ClassVar[bool] = False
    adds_ranks: ClassVar[bool] = False
    takes_float8: ClassVar[bool] = True

    # What ranks agree on, and how rows are shared out

    def exchanges(self, splits: Splits) -> bool:
        """Return whether ranks must exchange these lists in every call.

        Lists that are the same on every rank by contract are compared once. Lists that differ by
        rank are exchanged each time: one rank's may change while another's stay as they were.
        """
        return False

    def agreed(self, operands: Operands, splits: Splits, group: Group) -> dict[str, Any]:
        """Return what all ranks must have in common, beside what every product has."""
        shared = {"the_shape_of_x": tuple(operands.x.shape)}
        return shared | dict(zip(self.split_names, splits, strict=True))

    @functools.cached_property
    def reads_in_place(self) -> bool:
        """Whether an implementation lets peers read rows of x where they lie."""
        return any(implementation.reads_in_place for implementation in self.implementations)

    def place_of(self, x: torch.Tensor, group: Group) -> SymmetricPlace | None:
        """Return where x lies in a symmetric tensor of the group, if peers read its rows there.

        Copies fetch rows whole, so they must be contiguous, and begin at multiples of 16 bytes.
        Float8 has scales, which lie elsewhere. Ranks compare the place, so none decides alone.
        """
        if not self.reads_in_place or group.world_size == 1 or x.dtype == FLOAT8 or not x.numel():
            return None
        row_bytes, first = x.shape[1] * x.itemsize, x.data_ptr()
        is_aligned = row_bytes % ALIGNMENT_BYTES == 0 and first % ALIGNMENT_BYTES == 0
        return group.memory.place_of(x) if is_aligned and x.is_contiguous() else None

    def gives_rows(self, splits: Splits) -> bool:
        """Return whether every rank has rows, as far as lists say: without any, x has no place."""
        return all(min(rows, default=0) > 0 for rows in splits if rows is not None)

    @abc.abstractmethod
    def plan_rows(self, rows: int, splits: Splits, group: Group) -> RowPlan:
        """Return how rows are shared out, checked; collective where ``exchanges(splits)``.

        Args:
            rows: Rows of this rank's x.

        Raises:
            ArgumentError: The lists do not fit the rows or the group.
        """

    @abc.abstractmethod
    def result_rows(self, rows: Any, splits: Splits, rank: int, world_size: int) -> Any:
        """Return the rows of a rank's result; ``rows`` of x may be symbolic."""

    def validated_splits(self, splits: Sequence[object]) -> list[list[int] | None]:
        """Return lists of rows as lists of Python's integers, each of which may be None; what they
        must sum to, ranks check together.

        Raises:
            ArgumentError: One is no list of integers.
        """
        named = zip(self.split_names, splits, strict=True)
        return [validated_list(self.name, name, rows) for name, rows in named]

    # What runs

    def choose(self, **call: Any) -> Choice[Any]:
        """Return what ``impl="auto"`` runs, for many rows by their class; see
        :func:`interlace.gemm.choice.choose_product`.
        """
        default = kernel_or_product(self.implementations[0].name, **call)
        call = {"default": default, **by_class(self.name, call)}
        return choose_product(self.name, cast(Any, self.config_type), **call)

    def invariant_choice(
        self,
        operands: Operands,
        choice: Choice[Any],
        world_size: int,
        *,
        for_all_ranks: bool = False,
    ) -> Choice[Any]:
        """Return a choice with the configuration of batch-invariant calls: where tiles may change
        bits, that of one number of rows, and ``for_all_ranks`` of one shape, as a rank's shape
        depends on the number of ranks.
        """
        if invariance.has_one_arithmetic(operands.x.device, operands.x.dtype):
            return choice
        if for_all_ranks:
            world_size = 1
        sizes = operands.sizes(invariance.REFERENCE_ROWS * world_size)
        if for_all_ranks:
            sizes |= dict.fromkeys(("columns", "inner"), invariance.REFERENCE_SIZE)
        config = self.choose(**sizes, world_size=world_size).config
        return dataclasses.replace(choice, config=config)

    def run_empty(self, call: GemmCall) -> Any:
        """Return the result of a call in which there is nothing to compute on any rank."""
        shape = [call.rows.result, call.operands.columns]
        return call.operands.x.new_empty(shape, dtype=call.operands.out_dtype)

    def run_fused(self, call: GemmCall) -> Any:
        """Run the operator's own kernel, for ``implementations.fused.FUSED`` as it is.

        Raises:
            NotImplementedError: The operator has no such kernel.
        """
        raise NotImplementedError(f"{self.name} has no kernel of its own")

    @abc.abstractmethod
    def run_unfused(self, call: GemmCall) -> Any:
        """Run the call as a program without Interlace would: ``F.linear``, torch.distributed."""

    def cost(self, **sizes: Any) -> ProductCost:
        """Return the work and traffic of one rank by the formula that :mod:`interlace.costs` has.

        Args:
            sizes: Rows, columns, inner, itemsize and world_size, and what the formula takes beside
                them.
        """
        cost: ProductCost = find_cost(self.name).formula(**sizes)
        return cost

    def candidates(self, start: GemmConfig, rows: int, world_size: int) -> list[GemmConfig]:
        """Return the configurations worth measuring: few, since each one is compiled.

        Args:
            start: What runs without a measurement.
            rows: Rows of the product.
        """
        replace = functools.partial(dataclasses.replace, start)
        share = ceil_div(rows, world_size)
        if share < 128:
            # Few rows make few tiles; small ones give every SM some.
            tiles = [(64, 128, 64, 4, 4), (64, 256, 64, 4, 3), (64, 64, 128, 4, 4)]
            return [
                replace(block_m=m, block_n=n, block_k=k, num_warps=warps, num_stages=stages)
                for m, n, k, warps, stages in tiles
            ]
        candidates = [replace(stagger=0), replace(stagger=50), replace(stagger=100)]
        if share < 1024:
            candidates += [replace(block_n=128, stagger=0), replace(block_n=128, stagger=100)]
        return candidates

    # Gradient

    def set_up_backward(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what :meth:`backward` needs; as of ``torch.library.register_autograd``."""
        raise NotImplementedError

    def backward(self, ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of ``(x, w, bias)``; as of ``torch.library.register_autograd``."""
        raise NotImplementedError

    # What it says of a call

    def explain(  # type: ignore[override]
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        world_size: int,
        nodes: int = 1,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        lacking: Mapping[str, str] = MappingProxyType({}),
        **splits: Sequence[int],
    ) -> tuple[str, str, str]:
        """Return a description of the call, what ``impl="auto"`` runs, and the reason."""
        operands = self._operands(x, w, bias, out_dtype)
        given = [splits.get(name) for name in self.split_names]
        lists = tuple(self.validated_splits(given))
        dtype = str(x.dtype).removeprefix("torch.")
        described = f"{self.name} of x {list(x.shape)} and w {list(w.shape)}, {dtype}"
        rows, is_even = self.product_rows(operands.rows, lists, world_size)
        choice = self.choice_of(operands, rows, world_size, nodes)
        node_of_rank = tuple(rank * nodes // world_size for rank in range(world_size))
        terms = operands.terms(is_even, world_size, node_of_rank if nodes > 1 else ())
        if invariance.is_enabled():
            name = invariance.invariant_implementation(self, x.device, x.dtype, choice, terms).name
            invariant = self._invariant_choice(operands, choice, world_size)
            chosen = self._described(name, invariant)
            return described, chosen, f"calls must be batch-invariant; {choice.reason}"
        name, unmet = choice.accepted(self, terms, lacking)
        reason = choice.reason
        for refusing, lacks in unmet.items():
            verb = "needs" if refusing in lacking else "must have"
            reason = f"{refusing} {verb} {lacks}; {reason}"
        measured_us = {}
        if nodes == 1:
            measured_us = self._measured_us(operands, world_size, lists, choice.times_us)
        if measured_us:
            times = ", ".join(
                f"{implementation} {us:.0f} us" for implementation, us in measured_us.items()
            )
            reason = (
                f"{reason}; measured here by interlace.autotune, and so within it or with "
                f"impl='measured' {next(iter(measured_us))}: {times}"
            )
        return described, self._described(name, choice), reason

    def _operands(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> Operands:
        """Return the operands of a call that is explained.

        Raises:
            ArgumentError: The operator would refuse them.
        """
        require_tensor(f"{self.name}: x", x)
        # The choice depends on no scale's value, so one stands for what the call will be given.
        scale = x.new_empty([], dtype=torch.float32) if x.dtype == FLOAT8 else None
        validate(
            self, x, w, bias, scale, scale, out_dtype, "auto", None, takes_float8=self.takes_float8
        )
        return Operands(x, w, bias, scale, scale, output_dtype(x, out_dtype))

    def choice_of(
        self, operands: Operands, rows: int, world_size: int, nodes: int = 1
    ) -> Choice[Any]:
        """Return what ``impl="auto"`` chooses for a product of so many rows."""
        sizes = operands.sizes(rows) | {"world_size": world_size}
        predicted = times_between_nodes(self.name, nodes, **sizes) if nodes > 1 else None
        layout = {
            "out_dtype": operands.out_dtype,
            "w_along_k": operands.w_along_k,
            "has_block_scales": operands.has_block_scales,
        }
        return self.choose(**sizes, **layout).between(self, nodes, predicted)

    def reservations(  # type: ignore[override]
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        world_size: int,
        granularity: int,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        **splits: Sequence[int],
    ) -> dict[str, Reservation | None]:
        """Return what each implementation reserves for a call on one node; nothing for lists of
        rows.
        """
        operands = self._operands(x, w, bias, out_dtype)
        if any(splits.get(name) is not None for name in self.split_names):
            return {}

        def choose(rows: int) -> Choice[Any]:
            choice = self.choice_of(operands, rows, world_size)
            if invariance.is_enabled():
                return self._invariant_choice(operands, choice, world_size)
            return choice

        return by_implementation(self, operands, Ranks(world_size, x.device, granularity), choose)

    def _invariant_choice(
        self, operands: Operands, choice: Choice[Any], world_size: int
    ) -> Choice[Any]:
        """Return :meth:`invariant_choice` in the mode that the context or the environment says."""
        for_all_ranks = invariance.mode() > 1
        return self.invariant_choice(operands, choice, world_size, for_all_ranks=for_all_ranks)

    @staticmethod
    def _described(name: str, choice: Choice[Any]) -> str:
        """Return an implementation with its configuration, if it has one, as text."""
        config = choice.configs.get(name, choice.config if name == "fused" else None)
        return name if config is None else f"{name} ({config})"

    def _measured_us(
        self,
        operands: Operands,
        world_size: int,
        splits: Splits,
        predicted_us: Mapping[str, float],
    ) -> dict[str, float]:
        """Return the times in microseconds that were measured for such calls, the one that runs
        first; empty if none were.
        """
        # Imported here, since that module's own imports lead back to this one.
        from interlace.gemm import autotune

        if operands.x.device.type != "cuda" or any(rows is not None for rows in splits):
            return {}
        multiples = autotune.remembered(autotune.kind_of(self.name, operands, world_size))
        return autotune.Measured(self, multiples or {}).times_us(predicted_us)

    def product_rows(self, rows: int, splits: Splits, world_size: int) -> tuple[int, bool]:
        """Return the rows that a choice goes by, and whether they are shared out evenly, as far as
        one rank can tell.

        Raises:
            ArgumentError: A list does not fit the rows or the number of ranks.
        """
        lists_given = {
            name: counts
            for name, counts in zip(self.split_names, splits, strict=True)
            if counts is not None
        }
        for name, counts in lists_given.items():
            check_sum(f"{self.name}: {name}", counts, world_size, rows, "the rows of x")
        if lists_given:
            return rows, len({count for counts in lists_given.values() for count in counts}) == 1
        return rows, rows % world_size == 0

    def argument_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the options that :meth:`explain` takes."""
        return ("x", "w"), ("bias", "out_dtype", *self.split_names)
