"""Operators on batches of matrix products, which the pass for ``torch.compile`` inserts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, cast

import torch

from interlace.comm import Group
from interlace.comm.replay.replays import places
from interlace.comm.runtime import ranges
from interlace.costs.gemm import leaving
from interlace.errors import ArgumentError
from interlace.gemm import invariance
from interlace.gemm.between_nodes import times_between_nodes
from interlace.gemm.choice import choose_product
from interlace.gemm.config import GemmConfig
from interlace.gemm.dispatch import group_for
from interlace.registry import BATCH_INVARIANT, Implementation, Operator
from interlace.tuning.choice import Choice


@dataclasses.dataclass(frozen=True)
class BatchCall:
    """One call, agreed on by all ranks.

    Attributes:
        operator: The operator's declaration.
        x, w: The batches; what their shapes mean, the operator says.
        rows: The rows of all products.
        group: The ranks, and what they share.
        group_name: The name of their process group.
        config: The fused kernel's configuration, if there is one.
        mark: The number that this call's signals carry; from the ranks' agreement.
        is_explicit: Whether the caller has asked for the implementation by name.
        is_batch_invariant: Whether a row's result must have the same bits in every batch.
    """

    operator: BatchOperator
    x: torch.Tensor
    w: torch.Tensor
    rows: int
    group: Group
    group_name: str
    config: GemmConfig
    mark: int
    is_explicit: bool
    is_batch_invariant: bool

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes by which times between nodes are predicted."""
        _, inner, columns = self.w.shape
        return {
            "rows": self.rows,
            "columns": columns,
            "inner": inner,
            "dtype": self.x.dtype,
            "device": self.x.device,
        }

    def memory(self) -> tuple[Hashable, ...]:
        """Return where the operands lie and what they are, for the key of a replay."""
        return places(self.x, self.w)


class BatchOperator(Operator):
    """An operator on a batch of products; its sizes are those of one product, but for ``rows``,
    which are those of all products.
    """

    computation = "bmm"
    sizes = ("rows", "columns", "inner")
    has_public_function = False
    command_module = "interlace.cli.bench_products"
    config_type: ClassVar[type[GemmConfig]] = GemmConfig
    choosers: ClassVar[tuple[str, ...]] = ("auto", BATCH_INVARIANT)

    def choose(self, **call: Any) -> Choice[Any]:
        """Return the fastest implementation; see :func:`interlace.gemm.choice.choose_product`."""
        default = self.implementations[0].name
        return choose_product(self.name, cast(Any, self.config_type), **call, default=default)

    def agreed_call(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        rows: int,
        group_name: str,
        impl: str,
        validate: Callable[[Group], None],
    ) -> tuple[Implementation, BatchCall]:
        """Agree on a call with all ranks, once for each kind of call, and choose what runs it.

        Args:
            x: The operand that decides where the call runs.
            w: ``[B, K, N]``.
            rows: The rows of all products.
            validate: Refuses shapes that do not fit; the same on every rank.

        Raises:
            ArgumentError: There is no such implementation, or an error of ``validate``.
            RankMismatchError: Ranks differ in shapes, dtypes or impl.
        """
        impl = invariance.effective_impl(self, impl)
        group = group_for(self.name, group_name, x.device)

        def decide() -> tuple[int, Implementation, GemmConfig]:
            # Tiles must not follow the number of rows where they may change bits.
            is_invariant = impl == BATCH_INVARIANT
            has_one_size = is_invariant and not invariance.has_one_arithmetic(x.device, x.dtype)

            def choose() -> list[Any] | None:
                if w.dim() != 3:  # which ranks refuse below, together
                    return None
                _, inner, columns = w.shape
                sizes = {
                    "rows": invariance.REFERENCE_ROWS * group.world_size if has_one_size else rows,
                    "columns": columns,
                    "inner": inner,
                    "dtype": x.dtype,
                    "world_size": group.world_size,
                    "device": x.device,
                }
                times = times_between_nodes(self.name, group.nodes, **sizes)
                return self.choose(**sizes).between(self, group.nodes, times).packed()

            agreed = {
                "the_shape_of_x": tuple(x.shape),
                "the_shape_of_w": tuple(w.shape),
                "dtypes": (str(x.dtype), str(w.dtype)),
                "impl": impl,
            }
            mark, chosen_by_rank_0 = group.agreement.agree(self.name, agreed, choose)
            # Ranks have agreed by now, so all of them refuse or none does.
            self.validate_impl(impl)
            validate(group)
            if is_invariant:
                invariance.require_invariant(self)
            self.require_nodes(impl, group.nodes)
            choice: Choice[GemmConfig] = Choice.unpacked(self, chosen_by_rank_0)
            name = choice.impl if impl == "auto" else impl
            if is_invariant:
                name = invariance.invariant_implementations(self)[0].name
                self.require_nodes(name, group.nodes, is_invariant=True)
            # A stock pair that the tuned table prefers is no implementation here: the pass would
            # not have made the call then. The first implementation stands for it.
            if name not in self.words:
                name = self.implementations[0].name
            return mark, self.implementation(name), choice.config

        key = (self.name, x.shape, w.shape, x.dtype, w.dtype, impl)
        mark, implementation, config = group.once(key, decide)
        is_explicit = impl not in self.choosers
        is_invariant = invariance.is_invariant(impl)
        return implementation, BatchCall(
            self, x, w, rows, group, group_name, config, mark, is_explicit, is_invariant
        )

    def run(self, implementation: Implementation, call: BatchCall) -> Any:
        """Run an agreed call within a range for profilers; return what the implementation does."""
        with ranges.around(
            self.name, implementation.name, (call.x, call.w), lambda: self._link_bytes(call)
        ):
            return call.group.perform(implementation.run(call))

    def _link_bytes(self, call: BatchCall) -> int:
        """Return the bytes of the rows that leave this rank, without padding."""
        _, inner, columns = call.w.shape
        rows = call.x.numel() // inner
        width = inner if self.collective_first else columns
        return leaving(rows * width * call.x.itemsize, call.group.world_size)


def require_same_dtype(operator: str, matrices: Sequence[torch.Tensor]) -> None:
    """Refuse operands of different dtypes.

    Raises:
        ArgumentError: The matrices have more than one dtype.
    """
    dtypes = [matrix.dtype for matrix in matrices]
    if len(set(dtypes)) > 1:
        raise ArgumentError(
            f"{operator}: all operands must have the same dtype; got {dtypes}. Convert them."
        )
