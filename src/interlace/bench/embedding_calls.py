"""The operands of the benchmark of ``embedding_all_to_all``, and the calls on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from interlace.bench.benchmark import Benchmark
from interlace.errors import ArgumentError
from interlace.operators.embedding_all_to_all import backward, embedding_all_to_all, pooling
from interlace.operators.embedding_all_to_all.call import (
    EmbeddingCall,
    SharedArguments,
    agreed_call,
)
from interlace.operators.embedding_all_to_all.config import (
    OPERATOR,
    EmbeddingAllToAllConfig,
    choose,
)
from interlace.operators.embedding_all_to_all.layout import Layout
from interlace.operators.embedding_all_to_all.lookups import Sorted, sort_lookups
from interlace.registry import operator_named
from interlace.units import next_power_of_2

SETS = 2
"""Sets of lookups that calls take in turn: rows in the L2 are then another call's."""

LEARNING_RATE, EPSILON = 0.1, 1e-6


@dataclasses.dataclass(frozen=True)
class TablesShape:
    """One benchmarked call: ``tables`` of ``[rows, width]`` per rank, ``batch`` samples in all.

    Attributes:
        lookups: Lookups of a bag: ``"20"``, or ``"0-60"`` for a number drawn uniformly.
    """

    tables: int = 64
    rows: int = 200_000
    width: int = 256
    batch: int = 4096
    lookups: str = "20"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        first, last = self.range
        if not 0 <= first <= last:
            raise ArgumentError(
                f"lookups must be a number or a range such as 0-60; got {self.lookups!r}."
            )

    @property
    def range(self) -> tuple[int, int]:
        """The least and the most lookups of a bag."""
        first, _, last = self.lookups.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return 1, 0
        return int(first), int(last or first)

    @property
    def tolerance(self) -> float:
        """The relative error of float32 sums in two orders, and of rounding each result."""
        largest_bag = max(1, self.range[1])
        return (
            8 * math.sqrt(largest_bag) * torch.finfo(torch.float32).eps
            + 2 * torch.finfo(self.dtype).eps
        )

    @property
    def pooling_factor(self) -> int:
        """The lookups of a bag on average, as ``choose`` counts them."""
        return next_power_of_2(math.ceil(sum(self.range) / 2))

    def __str__(self) -> str:
        return f"{self.tables} x {self.rows} x {self.width}, B = {self.batch}, L = {self.lookups}"


class DrawnLookups(NamedTuple):
    """The lookups of one call.

    Attributes:
        indices, offsets: Table by table, as the operator takes them.
        sample_indices, sample_offsets: Sample by sample, over all tables as one, as
            ``F.embedding_bag`` takes them.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    sample_indices: torch.Tensor
    sample_offsets: torch.Tensor


class EmbeddingCalls(Benchmark[EmbeddingAllToAllConfig]):
    """A shape's tables and lookups on this rank, and the calls on them.

    Attributes:
        weight: All tables of this rank, one after the other.
        tables: Views of it.
        sets: Lookups.
        grad: The gradient of this rank's output.
        states: A state of row-wise Adagrad per table.
        received: The memory in which NCCL receives.
        config: The configuration that ``impl="auto"`` takes.
    """

    shape: TablesShape

    operand_sets = SETS

    def __init__(self, shape: TablesShape, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(operator_named(OPERATOR), shape, group)
        self.rank, ranks, device = self.owner.rank, self.owner.world_size, self.device
        if shape.batch % ranks:
            raise ArgumentError(
                f"the unfused pairs need a batch that {ranks} ranks divide; got {shape.batch}."
            )
        generator = torch.Generator(device).manual_seed(1 + self.rank)
        self.weight = torch.empty(
            shape.tables * shape.rows, shape.width, dtype=shape.dtype, device=device
        )
        self.weight.normal_(generator=generator)
        self.tables = list(self.weight.split(shape.rows))
        self.layout = Layout(((shape.width,) * shape.tables,) * ranks, shape.batch)
        self.samples, self.own_columns = shape.batch // ranks, shape.tables * shape.width
        self.sets = [self._lookups(generator) for _ in range(SETS)]
        self.grad = torch.randn(
            self.samples, self.layout.columns, generator=generator, device=device
        ).to(shape.dtype)
        self.states = [torch.zeros(shape.rows, device=device) for _ in self.tables]
        self.received = torch.empty(
            shape.batch * self.own_columns, dtype=shape.dtype, device=device
        )
        self.config = choose(
            tables=shape.tables,
            width=shape.width,
            batch=shape.batch,
            pooling_factor=shape.pooling_factor,
            dtype=shape.dtype,
            world_size=ranks,
            device=device,
        ).config
        self._sorted: dict[int, list[Sorted]] = {}

    def _lookups(self, generator: torch.Generator) -> DrawnLookups:
        """Draw the lookups of one call."""
        shape, device = self.shape, self.device
        # The same number of lookups in every bag, or a random one.
        first, last = shape.range
        lengths = torch.randint(
            first, last + 1, (shape.tables, shape.batch), generator=generator, device=device
        )
        offsets = F.pad(lengths.flatten().cumsum(0), (1, 0))
        indices = torch.randint(
            0, shape.rows, (int(offsets[-1]),), generator=generator, device=device
        )
        table = (
            torch.arange(shape.tables, device=device)[:, None]
            .expand_as(lengths)
            .flatten()
            .repeat_interleave(lengths.flatten())
        )
        sample = (
            torch.arange(shape.batch, device=device)
            .repeat(shape.tables)
            .repeat_interleave(lengths.flatten())
        )
        # F.embedding_bag pools bags in order, so lookups are sorted by sample, then by table.
        order = torch.argsort(sample * shape.tables + table, stable=True)
        sample_indices = (indices + table * shape.rows)[order]
        sample_offsets = F.pad(lengths.T.flatten().cumsum(0), (1, 0))
        return DrawnLookups(indices, offsets, sample_indices, sample_offsets)

    @property
    def group_name(self) -> str:
        """The name of the process group; empty for the default one."""
        return "" if self.group is None else str(self.group.group_name)

    def lookups(self, i: int) -> DrawnLookups:
        """Return the lookups of the i-th call."""
        return self.sets[i % SETS]

    def lookups_by_table(self, lookups: DrawnLookups) -> list[int]:
        """Return the number of lookups of each of this rank's tables."""
        counts: list[int] = lookups.offsets[:: self.shape.batch].diff().tolist()
        return counts

    def call(
        self, i: int, config: EmbeddingAllToAllConfig, *, alone: bool = False
    ) -> EmbeddingCall:
        """Return the i-th call; ``alone`` as a group of one makes it."""
        lookups = self.lookups(i)
        call = EmbeddingCall(
            self.tables,
            lookups.indices,
            lookups.offsets,
            None,
            self.layout,
            self.rank,
            "sum",
            self.shape.dtype,
            self.owner,
            self.group_name,
            "fused",
            config,
        )
        return call.without_peers() if alone else call

    # Forward

    def fused(self, i: int, config: EmbeddingAllToAllConfig) -> torch.Tensor:
        """Run the operator."""
        lookups = self.lookups(i)
        with torch.no_grad():
            return embedding_all_to_all(
                self.tables,
                lookups.indices,
                lookups.offsets,
                name=f"benchmark of {self.shape}",
                group=self.group,
                impl="fused",
                config=config,
            )

    def torch_bags(self, i: int) -> torch.Tensor:
        """Pool this rank's tables by ``F.embedding_bag``."""
        _, _, indices, offsets = self.lookups(i)
        return F.embedding_bag(indices, self.weight, offsets, mode="sum", include_last_offset=True)

    def our_bags(self, i: int, config: EmbeddingAllToAllConfig) -> torch.Tensor:
        """Run the kernel in a group of one: no puts and no waits, all of the pooling."""
        return pooling.pool(self.call(i, config, alone=True))

    def exchange(self, pooled: torch.Tensor) -> torch.Tensor:
        """Exchange pooled rows, or their gradients, by NCCL."""
        dist.all_to_all_single(self.received, pooled.view(-1), group=self.group)
        return self.received

    def unpack(self, received: torch.Tensor) -> torch.Tensor:
        """Put the ranks' columns side by side."""
        pieces = received.view(self.owner.world_size, self.samples, self.own_columns)
        return pieces.transpose(0, 1).reshape(self.samples, -1)

    def unfused(self, i: int) -> torch.Tensor:
        """Run the operator as a program without Interlace would."""
        return self.unpack(self.exchange(self.torch_bags(i)))

    # Backward

    def pack(self) -> torch.Tensor:
        """Put the gradients of each rank's columns one after the other."""
        return (
            self.grad.view(self.samples, self.owner.world_size, self.own_columns)
            .transpose(0, 1)
            .contiguous()
        )

    def target(self) -> backward.Target:
        """Return the tables as the backward pass updates them."""
        return backward.Target(
            update="adagrad",
            places=[table.data_ptr() for table in self.tables],
            strides=[self.shape.width] * self.shape.tables,
            states=[state.data_ptr() for state in self.states],
            rows=[self.shape.rows] * self.shape.tables,
            dtype=self.shape.dtype,
            learning_rate=LEARNING_RATE,
            epsilon=EPSILON,
        )

    def sort_lookups(self, i: int, config: EmbeddingAllToAllConfig) -> Sorted:
        """Sort the lookups of a call by row."""
        rows = [self.shape.rows] * self.shape.tables
        return sort_lookups(self.call(i, config), rows)

    def sorted_lookups(self, i: int, config: EmbeddingAllToAllConfig) -> Sorted:
        """Return lookups sorted beforehand: that depends on no gradient, and is timed by itself."""
        # Configurations with runs of the same length share the sorted lookups.
        if config.run_lookups not in self._sorted:
            self._sorted[config.run_lookups] = [self.sort_lookups(k, config) for k in range(SETS)]
        return self._sorted[config.run_lookups][i % SETS]

    def fused_update(self, i: int, config: EmbeddingAllToAllConfig) -> None:
        """Send gradients and update the tables in one kernel."""
        drawn, widths = self.lookups(i), self.layout.widths
        shared = SharedArguments(
            self.shape.batch, list(map(len, widths)), list(itertools.chain(*widths)), self.rank,
            "sum", self.shape.dtype,
        )  # fmt: skip
        call = agreed_call(
            backward.BACKWARD, self.tables, (drawn.indices, drawn.offsets, None), shared,
            (self.group_name, "fused", str(config)),
        )  # fmt: skip
        backward.launch(call, self.grad, self.target(), self.sorted_lookups(i, config))

    def our_update(self, i: int, config: EmbeddingAllToAllConfig) -> None:
        """Run the kernel in a group of one, on gradients that have been exchanged."""
        grad = self.received.view(self.shape.batch, self.own_columns)
        call, lookups = self.call(i, config, alone=True), self.sorted_lookups(i, config)
        backward.prepare(call, grad, self.target(), lookups)()
