"""Operators on batches of matrix products, which the pass for ``torch.compile`` inserts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch

from interlace.comm import Group
from interlace.errors import ArgumentError
from interlace.gemm.choice import choose_product
from interlace.gemm.config import GemmConfig
from interlace.registry import Operator
from interlace.tuning.choice import Choice


@dataclasses.dataclass(frozen=True)
class BatchCall:
    """One call, agreed on by all ranks.

    Attributes:
        x, w: The batches; what their shapes mean, the operator says.
        group: The ranks, and what they share.
        group_name: The name of their process group.
        config: The fused kernel's configuration, if there is one.
        mark: The number that this call's signals carry; from the ranks' agreement.
        is_explicit: Whether the caller has asked for the implementation by name.
    """

    x: torch.Tensor
    w: torch.Tensor
    group: Group
    group_name: str
    config: GemmConfig
    mark: int
    is_explicit: bool


class BatchOperator(Operator):
    """An operator on a batch of products; its sizes are those of one product, but for ``rows``,
    which are those of all products.
    """

    sizes = ("rows", "columns", "inner")
    has_public_function = False
    command_module = "interlace.cli.bench_batches"
    config_type: ClassVar[type[GemmConfig]] = GemmConfig

    def choose(self, **call: Any) -> Choice[Any]:
        """Return the fastest implementation; see :func:`interlace.gemm.choice.choose_product`."""
        default = self.implementations[0].name
        return choose_product(self.name, cast(Any, self.config_type), **call, default=default)

    def decide(
        self, impl: str, rows: int, columns: int, inner: int, x: torch.Tensor, group: Group
    ) -> tuple[str, GemmConfig]:
        """Return the name of the implementation that runs, and its configuration.

        A stock pair that the tuned table prefers is no implementation here: the pass would not have
        made the call then. The first implementation stands for it.
        """
        choice = self.choose(
            rows=rows,
            columns=columns,
            inner=inner,
            dtype=x.dtype,
            world_size=group.world_size,
            device=x.device,
        )
        name = choice.impl if impl == "auto" else impl
        return name if name in self.words else self.implementations[0].name, choice.config


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
