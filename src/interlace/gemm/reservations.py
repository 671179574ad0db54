"""The symmetric memory of calls around a product: by the sizes of a call, or of one to come."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm.groups.reservation import CPU_GRANULARITY, GPU_GRANULARITY, Reservation
from interlace.comm.launching import kernels
from interlace.errors import ArgumentError
from interlace.gemm import launch
from interlace.gemm.call import GemmCall, RowPlan
from interlace.gemm.config import GemmConfig
from interlace.tuning.configuration import Configuration

if TYPE_CHECKING:
    from interlace.gemm.operator import GemmOperator


@dataclasses.dataclass(frozen=True)
class Memory:
    """The properties of a rank's device by which the size of symmetric memory follows.

    Attributes:
        device: The device; a GPU need not be here where its other properties are given.
        granularity: Bytes of which every allocation is a multiple.
        processors: The number of streaming multiprocessors; 0 on the CPU backend.
        moves_tiles: Whether kernels move tiles through tensor descriptors.
    """

    device: torch.device
    granularity: int
    processors: int
    moves_tiles: bool

    @staticmethod
    def of(device: torch.device, granularity: int | None = None) -> Memory:
        """Return the properties of a device that is here.

        Args:
            device: The device.
            granularity: The granularity of a group's memory; default: what is usual.
        """
        if device.type == "cpu":
            return Memory(device, granularity or CPU_GRANULARITY, 0, False)
        return Memory(
            device,
            granularity or GPU_GRANULARITY,
            kernels.processors(device),
            launch.moves_tiles(device),
        )


@dataclasses.dataclass(frozen=True)
class SizedProduct:
    """The sizes of a call around a product, without its tensors.

    Attributes:
        operator: The operator's declaration.
        rows: How rows are shared out.
        own_rows: Rows of x on this rank.
        columns, inner: N and K of this rank's product.
        dtype: The dtype of x and w.
        out_dtype: The dtype of the result.
        world_size: The number of ranks, which share memory.
        config: The fused kernel's configuration.
        configs: The configurations of implementations that have one of their own, by name.
        memory: The properties of a rank's device.
        has_bias: Whether there is a bias to add.
        is_batch_invariant: Whether a row's result must have the same bits in every batch.
    """

    operator: GemmOperator
    rows: RowPlan
    own_rows: int
    columns: int
    inner: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    world_size: int
    config: GemmConfig
    configs: Mapping[str, Configuration]
    memory: Memory
    has_bias: bool = False
    is_batch_invariant: bool = False

    @staticmethod
    def of(call: GemmCall) -> SizedProduct:
        """Return the sizes of a call."""
        operands, group = call.operands, call.group
        return SizedProduct(
            call.operator,
            call.rows,
            operands.rows,
            operands.columns,
            operands.inner,
            operands.x.dtype,
            operands.out_dtype,
            group.world_size,
            call.config,
            call.configs,
            Memory.of(group.device, group.granularity),
            operands.bias is not None,
            call.is_batch_invariant,
        )

    def by_implementation(self) -> dict[str, Reservation | None]:
        """Return what each implementation reserves; None where that is not known."""
        return {each.name: each.reservation(self) for each in self.operator.implementations}


def on_gpu(
    operator: GemmOperator,
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    world_size: int,
    config: GemmConfig,
    *,
    processors: int,
    moves_tiles: bool = True,
) -> dict[str, Reservation | None]:
    """Return what each implementation reserves on a GPU that need not be here; nothing for rows
    that the ranks do not divide.

    Args:
        rows, columns, inner: M, N and K of one rank's product.
        config: The fused kernel's configuration.
        processors: The GPU's streaming multiprocessors.
        moves_tiles: Whether its kernels move tiles through tensor descriptors.
    """
    own_rows = rows // world_size if operator.collective_first else rows
    try:
        plan = plan_of(operator, own_rows, world_size)
    except ArgumentError:
        return {}
    out_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    memory = Memory(torch.device("meta"), GPU_GRANULARITY, processors, moves_tiles)
    return SizedProduct(
        operator, plan, own_rows, columns, inner, dtype, out_dtype, world_size, config, {}, memory
    ).by_implementation()


def shortage(implementation: Any, call: GemmCall) -> str | None:
    """Return why an implementation's memory does not fit under the limit of a call's group, in
    words; None if it fits, or its memory is not known. All ranks get the same answer.
    """
    group = call.group
    if group.memory.limit_bytes is None or group.spans_nodes:
        return None
    reservation = implementation.reservation(SizedProduct.of(call))
    return None if reservation is None else group.memory.shortage(reservation)


def plan_of(operator: GemmOperator, rows: int, world_size: int) -> RowPlan:
    """Return how rows are shared out where no lists of rows are given.

    Raises:
        ArgumentError: Rows do not divide evenly.
    """
    ranks: Any = _Ranks(world_size)
    return operator.plan_rows(rows, (None,) * len(operator.split_names), ranks)


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """Rank 0 of a group that need not exist; nothing can be exchanged."""

    world_size: int
    rank: int = 0
