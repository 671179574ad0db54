"""A call of ``linear_cross_entropy``: its rules, what all ranks must agree on, and what runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import NamedTuple

import torch
import torch.distributed as dist

from interlace.comm import Group, group_named, process_group_named
from interlace.comm.host.agreement import Family
from interlace.comm.runtime import ranges
from interlace.errors import ArgumentError
from interlace.gemm.operands import integer, number, require_device, require_tensor
from interlace.gemm.vocabulary import VocabularyShard, agree, choose_implementation, rows_of
from interlace.registry import Implementation, operator_named

OPERATOR = "linear_cross_entropy"
MAX_RANKS = 8
REDUCTIONS = ("mean", "sum", "none")


class Options(NamedTuple):
    """The numbers and words of a call, as the schema has them."""

    vocabulary: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    sequence_parallel: bool
    chunk_rows: int


class SizedLoss(NamedTuple):
    """The sizes of a call by which its symmetric memory follows.

    Attributes:
        rows: Rows of all ranks that the call has.
        chunk_rows: Rows whose logits are stored at a time.
        world_size: Number of ranks.
    """

    rows: int
    chunk_rows: int
    world_size: int


class LossGradients(NamedTuple):
    """The gradients of x, w and the bias; None where it is not needed."""

    x: torch.Tensor | None
    w: torch.Tensor | None
    bias: torch.Tensor | None


def flattened(
    x: torch.Tensor,
    w: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    shards: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of x, ``[M, H]``, and of target, ``[M]`` of all ranks.

    Args:
        x, w, target, bias: What the caller of :func:`interlace.linear_cross_entropy` has given for
            them.
        shards: Number of ranks that x is sharded over along its rows.

    Raises:
        ArgumentError: No rank could compute with these.
    """
    rows = rows_of(OPERATOR, x, w, bias)
    require_tensor(f"{OPERATOR}: target", target)
    if target.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"{OPERATOR}: target must be int32 or int64; got {target.dtype}.")
    targets, count = target.reshape(-1), len(rows) * shards
    if targets.shape != (count,):
        whose = "of all ranks" if shards > 1 else "like x"
        raise ArgumentError(
            f"{OPERATOR}: target must have {count} rows, {whose}; got shape {list(targets.shape)}."
        )
    require_device(f"{OPERATOR}: target", target, "x", x.device)
    return rows, targets


def validated_options(options: Options) -> Options:
    """Return the numbers and words of a call, the numbers as Python's.

    Raises:
        ArgumentError: One is out of its range.
    """
    if options.reduction not in REDUCTIONS:
        raise ArgumentError(
            f"{OPERATOR}: reduction must be one of {', '.join(REDUCTIONS)}; got "
            f"{options.reduction!r}."
        )
    rule = f"{OPERATOR}: label_smoothing must be at least 0 and less than 1"
    label_smoothing = number(rule, options.label_smoothing)
    if not 0 <= label_smoothing < 1:
        raise ArgumentError(f"{rule}; got {label_smoothing}.")
    rule = f"{OPERATOR}: z_loss must be at least 0"
    z_loss = number(rule, options.z_loss)
    if not z_loss >= 0:
        raise ArgumentError(f"{rule}; got {z_loss}.")
    ignore_index = integer(f"{OPERATOR}: ignore_index must be an integer", options.ignore_index)
    chunk_rows = at_least_one("chunk_rows", options.chunk_rows)
    return Options(
        options.vocabulary, ignore_index, label_smoothing, z_loss, options.reduction,
        bool(options.sequence_parallel), chunk_rows,
    )  # fmt: skip


def at_least_one(name: str, value: object) -> int:
    """Return the number of that name as Python's.

    Raises:
        ArgumentError: It is no integer, or below 1.
    """
    rule = f"{OPERATOR}: {name} must be at least 1"
    count = integer(rule, value)
    if count < 1:
        raise ArgumentError(f"{rule}; got {count}.")
    return count


@dataclasses.dataclass(eq=False)
class LossCall:
    """One call whose shapes and devices are validated; implementations get it agreed on.

    Attributes:
        x: ``[M, H]``, or this rank's rows of it.
        w, target, bias, options: Those of ``interlace.linear_cross_entropy``.
        scale: Float32: by what the rows' gradients are multiplied, ``[1]`` or ``[M]``.
        needs_x, needs_w, needs_bias: Which gradients are needed.
        group_name: The name of the ranks' process group.
        impl: The implementation that the caller has named, or what chooses one.
        mark: The number that this call's words carry; 0 until :meth:`agree`.
    """

    x: torch.Tensor
    w: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None
    options: Options
    scale: torch.Tensor
    needs_x: bool
    needs_w: bool
    needs_bias: bool
    group_name: str
    impl: str
    mark: int = dataclasses.field(default=0, init=False)

    @functools.cached_property
    def group(self) -> Group:
        return group_named(self.group_name, self.x.device)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group, for collectives of torch."""
        return process_group_named(self.group_name)

    @property
    def is_differentiated(self) -> bool:
        """Whether any gradient is needed."""
        return self.needs_x or self.needs_w or self.needs_bias

    @functools.cached_property
    def shard(self) -> VocabularyShard:
        """This rank's columns of the vocabulary."""
        group = self.group
        return VocabularyShard.of(
            len(self.w), self.options.vocabulary, group.rank, group.world_size
        )

    def agree(self, step: str) -> Family | None:
        """Agree on this call with all ranks, within a node once for all numbers of rows, which
        gives it its mark; see :func:`interlace.gemm.vocabulary.agree`.

        Args:
            step: The pass that the call is, ``"forward"`` or ``"backward"``.

        Returns:
            The family of calls of all numbers of rows, if there is one.
        """
        group, rows = self.group, self.target.numel()
        group.require_size(OPERATOR, MAX_RANKS)
        shared = {
            **self.options._asdict(),
            "the_step": step,
            "the_width_of_x": self.x.shape[1],
            "dtype": str(self.x.dtype),
            "whether_there_is_a_bias": self.bias is not None,
            "whether_x_needs_its_gradient": self.needs_x,
            "impl": self.impl,
        }
        self.mark, family = agree(group, OPERATOR, shared, len(self.w), rows)
        return family

    @functools.cached_property
    def implementation(self) -> Implementation:
        """The implementation that runs this call.

        Raises:
            ArgumentError: The implementation was asked for and cannot run such a call.
        """
        sized = SizedLoss(self.target.numel(), self.options.chunk_rows, self.group.world_size)
        return choose_implementation(operator_named(OPERATOR), self.impl, self.group, sized)

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return the range of this call for profilers, by the name of the operator or its half."""
        return ranges.around(name, self.implementation.name, (self.x, self.w), lambda: None)
